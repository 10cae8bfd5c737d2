"""Interruptions: what was said is kept, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from conversations import EVICTING, SHORT, Trap, in_cache, said, text_of
from pyh2o import Conversation
from pyh2o.cache import aborting
from tiny_llama import tiny_llama


@pytest.mark.parametrize("n_words", [6, 40])
def test_ctrl_c_while_a_batch_is_computed(
    path: Path, monkeypatch: pytest.MonkeyPatch, n_words: int
) -> None:
    """The batch leaves no trace: only what was evicted for those before it is read again."""
    monkeypatch.setattr(aborting, "INTERVAL", 0)
    llm = tiny_llama(path, **EVICTING)
    conversation = Conversation(llm, copies_mib=0)
    said(conversation.say("hello", max_tokens=SHORT))
    before = conversation.turns, text_of(conversation)
    asked: list[int] = []

    def press() -> None:
        asked.append(llm.n_tokens)
        if len(asked) > 20 and (n_words == 6 or llm.kv.compactions):
            raise KeyboardInterrupt

    llm.text.while_reading = press
    with pytest.raises(KeyboardInterrupt):
        said(conversation.say("long " * n_words, max_tokens=SHORT))
    llm.text.while_reading = None
    assert (conversation.turns, text_of(conversation)) == before
    assert in_cache(llm) == before[1][: llm.n_tokens]
    assert (llm.n_tokens == 0) == (n_words == 40)
    said(conversation.say("short", max_tokens=SHORT))
    assert in_cache(llm)[: len(before[1])] == before[1]


def test_ctrl_c_in_a_batch_that_has_evicted(path: Path, trap: Trap) -> None:
    llm = tiny_llama(path, **EVICTING)
    conversation = Conversation(llm, copies_mib=0)
    said(conversation.say("hello", max_tokens=SHORT))
    before = text_of(conversation)
    trap.countdown, trap.after = 5, True  # those before fill the cache
    with pytest.raises(KeyboardInterrupt):
        said(conversation.say("long " * 40, max_tokens=SHORT))
    # The model has not recorded the batch, but rows from before it are gone: nothing is left.
    assert (llm.n_tokens, text_of(conversation)) == (0, before)
    said(conversation.say("short", max_tokens=SHORT))
    assert in_cache(llm)[: len(before)] == before
