"""What a model is told before a story, and what is no part of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyh2o import Llama
from pyh2o.errors import SettingsError
from pyh2o.sessions.story import Story
from pyh2o.writing.sampling import Sampling
from stories import PROMPT

MEMORY = "It rains."


def test_a_memory_is_before_the_text_and_stays(llm: Llama, tmp_path: Path) -> None:
    tale = Story(llm, PROMPT, memory=MEMORY, echo=True, sampling=Sampling(seed=5))
    prompt = llm.tokenize(f"{MEMORY}\n{PROMPT}".encode())
    assert tale.tokens == prompt
    assert tale.begins_with(PROMPT)
    assert not tale.begins_with("Twice")
    text = "".join(tale.write(300))
    assert tale.text() == text
    assert text.startswith(PROMPT)
    assert llm.kv.compactions > 0
    [(start, end)] = tale.pins
    assert llm.detokenize(tale.tokens[start:end]) == f"{MEMORY}\n".encode()
    positions, _ = llm.kv_rows(0)
    assert all(set(range(end)) <= set(row.tolist()) for row in positions)
    tale.save(tmp_path / "s.h2o")
    more = "".join(tale.write(20))
    again = Story.load(tmp_path / "s.h2o", llm)
    assert (again.memory, again.pins) == (MEMORY, tale.pins)
    assert "".join(again.write(20)) == more
    again.edit("Twice upon a time")  # the prompt, too
    assert again.tokens == llm.tokenize(f"{MEMORY}\nTwice upon a time".encode())
    assert again.text() + "".join(again.write(5)) == again.text()
    assert again.pins == tale.pins


def test_a_memory_needs_room(llm: Llama) -> None:
    with pytest.raises(SettingsError, match="tokens to pin do not fit"):
        Story(llm, PROMPT, memory=MEMORY * 200)
