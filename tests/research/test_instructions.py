"""Instructions under a dialogue with a tiny random model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from measured import Quiet, results, without_times
from pyh2o.errors import SettingsError
from pyh2o.sessions.conversation import Conversation
from research.eval.caches import Compute
from research.eval.instructions import Instructions, InstructionSettings
from research.eval.measurement import CacheSettings


def instruction_settings(path: Path, **changes: Any) -> InstructionSettings:
    settings = InstructionSettings(
        model=path,
        compute=Compute(threads=1),
        turns=2,
        samples=2,
        pins=("system", "none"),
        seed=0,
        caches=CacheSettings(("h2o",), (1100,), 0.2),
    )
    return replace(settings, **changes)


def test_instructions(chat_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, int]] = []
    say = Conversation.say

    def known(self: Conversation, message: str, **settings: Any) -> Any:
        said.append((len(self.turns), self.llm.kv.pinned))
        return say(self, message, **settings)

    monkeypatch.setattr(Conversation, "say", known)
    progress = Quiet()
    target = tmp_path / "a.json"
    instructions = Instructions(instruction_settings(chat_path), results(target), progress)
    instructions.run()
    assert progress.planned == progress.done == 3 * 2 * (2 + 2)
    units = list(json.loads(target.read_text())["units"].values())
    summaries = instructions.summaries()
    assert [(one.cache, one.pin, one.samples) for one in summaries] == [
        ("full", "", 2),
        ("h2o, 1100 rows", "system", 2),
        ("h2o, 1100 rows", "none", 2),
    ]
    # two messages and the request, in each of six dialogues; only one pinning has pinned rows
    assert [turn for turn, _ in said] == [0, 1, 2] * 6
    pinned = [n for _, n in said]
    assert all(n > 100 for n in pinned[:12])
    assert pinned[12:] == [0] * 6
    for unit, one in zip(units[::2], summaries, strict=True):
        assert unit["directives"].index("defence") == 0
        assert [len(turn) for turn in unit["followed"]] == [5, 5]
        assert len(unit["answers"]) == 3
        assert set(unit["margins"]) == set(unit["directives"])
        assert 0 <= one.followed <= 1
        assert one.followed == pytest.approx(np.mean(one.by_turn))
        assert (one.leaked_defence_first, one.leaked) == (unit["leaked"], pytest.approx(one.leaked))
    full, *others = summaries
    assert full.margin_to_full is None
    for one in others:
        assert one.margin_to_full == pytest.approx(one.margin - full.margin, abs=1e-6)


def test_instructions_are_the_same_in_every_run(chat_path: Path) -> None:
    settings = instruction_settings(chat_path, samples=1, turns=1)
    files = [results(), results()]
    for file in files:
        Instructions(settings, file, Quiet()).run()
    assert without_times(files[0].units) == without_times(files[1].units)


def test_refused_instructions(path: Path, chat_path: Path) -> None:
    small = CacheSettings(("h2o",), (100,), 0.5)
    with pytest.raises(SettingsError, match=r"system prompt takes .* h2o, 100 rows has 38 rows"):
        Instructions(instruction_settings(chat_path, caches=small), results(), Quiet())
    with pytest.raises(SettingsError, match=r"--turns 99 may come to \d+ tokens, more than the"):
        Instructions(instruction_settings(chat_path, turns=99), results(), Quiet())
