"""Everything at once: any sequence of changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conversations import (
    EVICTING,
    FULL,
    ROOMY,
    SHORT,
    Trap,
    check_positions,
    next_logits,
    said,
    text_of,
)
from pyh2o import Conversation, Llama
from pyh2o.writing.chat_template import ChatTemplate
from tiny_llama import tiny_llama


class Model:
    """What the text has to be, from what was drawn alone."""

    def __init__(self, llm: Llama) -> None:
        self.llm = llm
        self.system: str | None = None
        self.turns: list[tuple[str, list[int]]] = []

    def text(self) -> list[int]:
        parts = ChatTemplate(self.llm.model, self.system)
        tokens: list[int] = []
        for message, answer in self.turns:
            tokens += (parts.next_turn if tokens else parts.first_turn)(message) + answer
        return tokens


@pytest.mark.usefixtures("with_ends")
@pytest.mark.parametrize("settings", [EVICTING, ROOMY, FULL])
def test_any_sequence_of_changes(
    path: Path,
    tmp_path: Path,
    trap: Trap,
    drawn: list[list[int]],
    evaluated: list[int],
    rng: np.random.Generator,
    settings: dict[str, Any],
) -> None:
    conversation = Conversation(tiny_llama(path, **settings, n_batch=24))
    model = Model(conversation.llm)
    counted = 0
    for _ in range(120):
        if conversation.llm.n_tokens > 1500:
            conversation.clear()
            model.turns.clear()
        action = str(rng.choice(["say", "say", "say", "edit", "regenerate", "undo", "other"]))
        if action != "other" and (action == "say" or model.turns):
            message = "m" * int(rng.integers(0, 60))
            if action == "undo":
                conversation.undo()
                model.turns.pop()
            else:
                replaced = action != "say"
                message = model.turns[-1][0] if action == "regenerate" else message
                arguments = () if action == "regenerate" else (message,)
                if rng.random() < 0.4:
                    trap.countdown = int(rng.integers(1, 20))
                    trap.after = bool(rng.random() < 0.5)
                    trap.error = KeyboardInterrupt if rng.random() < 0.5 else RuntimeError
                limit = int(rng.integers(1, 20))
                leave = int(rng.integers(1, 20))
                n_drawn = len(drawn)
                failed = None
                answer = getattr(conversation, action)(*arguments, max_tokens=limit)
                try:
                    for i, _piece in enumerate(answer):
                        if i == leave:
                            answer.close()
                            break
                except (KeyboardInterrupt, RuntimeError) as error:
                    failed = type(error)
                trap.countdown = -1
                tokens = drawn[-1] if len(drawn) > n_drawn else []
                if tokens and failed is not RuntimeError:
                    if replaced:
                        model.turns.pop()
                    model.turns.append((message, tokens))
        elif rng.random() < 0.3:
            model.system = (
                str(rng.choice(["Be brief.", "Be long."])) if rng.random() < 0.7 else None
            )
            conversation.set_system(model.system)
        else:
            counted += conversation.tokens_evaluated
            conversation.save(tmp_path / "chat")
            llm = (
                conversation.llm if rng.random() < 0.7 else tiny_llama(path, **settings, n_batch=24)
            )
            conversation = Conversation.load(tmp_path / "chat", llm)
            assert conversation.tokens_evaluated == 0
        text = text_of(conversation)
        assert [turn.user for turn in conversation.turns] == [message for message, _ in model.turns]
        assert conversation.system == model.system
        if model.turns:
            assert text == model.text()
        else:
            opening = conversation._template.opening
            assert text == opening[: len(text)]
        check_positions(conversation)
    assert len(model.turns) + len(drawn) > 20
    # A batch that was computed but not recorded is counted in neither.
    assert counted + conversation.tokens_evaluated == sum(evaluated)
    if settings is EVICTING:
        return
    # Nothing was evicted, so a full cache has to agree.
    other = tiny_llama(path, **FULL)
    said(conversation.say("end", max_tokens=SHORT))
    text = [*text_of(conversation), 5]
    other.eval(text)
    conversation.llm.eval(text[conversation.llm.n_tokens :])
    np.testing.assert_allclose(next_logits(conversation.llm), next_logits(other), atol=1e-4)
