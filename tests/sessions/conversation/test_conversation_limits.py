"""The end of all positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conversations import (
    SHORT,
    SYSTEM,
    check_positions,
    refuse,
    said,
    text_of,
)
from pyh2o import Conversation
from pyh2o.errors import ContextLimitError
from pyh2o.writing.chat_template import ChatTemplate
from pyh2o.writing.sampling import Sampling
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama


@pytest.mark.parametrize(
    ("variant", "settings", "finish", "cure"),
    [
        ("llama", {"n_ctx": 256, "evict": False}, "length", "turn eviction on"),
        ("learned_positions", {"hh": 60, "recent": 60}, "trained_context", "new conversation"),
    ],
)
def test_the_end_of_all_positions(
    tmp_path: Path, variant: str, settings: dict[str, Any], finish: str, cure: str
) -> None:
    path = write_chat_gguf(
        tmp_path / "tiny.gguf", CHATML, arch_variant=variant, n_ctx_train=256, n_layer=1
    )
    # long enough to reach the limit, with no end
    greedy = Sampling(temperature=0.0, repeat_penalty=1.0)
    llm = tiny_llama(path, **settings)
    conversation = Conversation(llm, sampling=greedy)
    said(conversation.say("hello", max_tokens=100))
    with pytest.raises(ContextLimitError, match=cure) as error:
        said(conversation.say("x" * 500))
    assert "\n" not in str(error.value)
    assert len(conversation.turns) == 1
    said(conversation.say("go on"))
    assert conversation.turns[-1].finish == finish
    assert conversation.turns[-1].end == 256 + 1
    with pytest.raises(ContextLimitError, match=cure):
        said(conversation.say("and now?"))
    said(conversation.edit("less", max_tokens=SHORT))
    assert [turn.user for turn in conversation.turns] == ["hello", "less"]
    check_positions(conversation)


def test_the_last_position_can_be_used(path: Path) -> None:
    llm = tiny_llama(path, n_ctx=256, evict=False)
    opening = len(ChatTemplate(llm.text.model, None).first_turn(""))
    for room in (2, 1, 0):
        conversation = Conversation(llm)
        answer = conversation.say("\u0001" * (256 - opening - room))
        if room == 0:
            with pytest.raises(ContextLimitError, match="no room for an answer in 256"):
                said(answer)
        else:
            said(answer)
            (turn,) = conversation.turns
            assert turn.end - turn.answer_start == room + 1


@pytest.mark.parametrize("scheme", ["original", "dense"])
def test_a_text_without_an_end(tmp_path: Path, scheme: str, drawn: list[list[int]]) -> None:
    path = write_chat_gguf(tmp_path / "tiny.gguf", CHATML, n_ctx_train=256, n_layer=1)
    llm = tiny_llama(path, hh=60, recent=60, slack=40, positions=scheme)
    conversation = Conversation(llm, system=SYSTEM, on_recompute=refuse)
    for _ in range(30):
        said(conversation.say("go on", max_tokens=SHORT))
    assert llm.n_tokens > 3 * 256
    assert llm.kv.rebases > 0
    turn = conversation.turns[-1]
    assert text_of(conversation)[turn.answer_start :] == drawn[-1]
