"""Chats of a thinking model: of the history without thoughts nothing is read again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from good_bodies import CHAT
from many_texts import tiny_engine
from needed import needed
from pyh2o.engine import Engine
from sampled_answers import said, words
from tiny_chat import THINKING, write_chat_gguf

loopback = needed("loopback", name="the server's packages")

# Answers that are within the recent rows as a whole: they can be taken back.
SHORT = 'root ::= "<think>\\n" [ab]{9,12} "</think>\\n\\n" [ab]{4,6}'


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    path = write_chat_gguf(tmp_path / "tiny.gguf", THINKING)
    with tiny_engine(path, texts=1, n_ctx=256, hh=32, recent=32, slack=16, recall=8) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
def test_only_what_is_new_is_read_unless_thoughts_are_kept(
    engine: Engine, rng: np.random.Generator, stream: bool
) -> None:
    """By a field of the request."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body: dict[str, Any] = {"grammar": SHORT, "max_tokens": 100, "seed": 3, **options}
    messages = [said(words(rng, 5))]
    text = engine._slots.all[0].text
    with loopback.LoopbackServer(engine) as server:
        for turn in range(5):
            n_there = len(text.kept_positions)
            kept = {"keep_reasoning": True} if turn == 3 else {}
            reply = server.post(CHAT, {**body, **kept, "messages": messages})
            if stream:
                *events, last = reply.events
                deltas = [event["choices"][0]["delta"] for event in events]
                answer = "".join(delta.get("content") or "" for delta in deltas)
            else:
                last = reply.json
                answer = last["choices"][0]["message"]["content"]
            n_cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert n_cached == n_there if turn < 4 else n_cached < n_there
            assert len(text.dropped_spans) == [1, 2, 3, 3, 4][turn]
            answer = answer.rpartition("</think>")[2].strip()
            messages += [said(answer, by="assistant"), said(words(rng, 3))]
