"""Chats over HTTP whose answers the tokenizer cuts into other tokens than those that were drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drawn_answers import AS_DRAWN, said, words
from good_bodies import CHAT, COMPLETIONS
from many_texts import tiny_engine
from pyh2o.engine import Engine
from tiny_chat import CHATML, LLAMA_2, LLAMA_3, write_chat_gguf

N_PLACES = 2
# Each conversation evicts.
BUDGET: dict[str, Any] = {"n_ctx": 256, "hh": 24, "recent": 24, "slack": 16}
TEMPLATES = {"chatml": CHATML, "llama 2": LLAMA_2, "llama 3": LLAMA_3}
# Its template puts a space before answers, in the place of the one that models write.
SPACE_FIRST = {**AS_DRAWN, "grammar": 'root ::= " " [ab]+'}


@pytest.fixture(scope="module", params=TEMPLATES)
def template(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def engine(template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path: Path = tmp_path_factory.mktemp("drawn") / "tiny.gguf"
    write_chat_gguf(path, TEMPLATES[template])
    with tiny_engine(path, texts=N_PLACES, **BUDGET) as running:
        yield running


def test_a_chat_evaluates_only_what_is_new(
    template: str, server: Any, engine: Engine, rng: np.random.Generator
) -> None:
    """After evictions, and wherever it was meanwhile: in its place or out of it."""
    messages = [said(words(rng, 16))]
    body = {"max_tokens": 20, **(SPACE_FIRST if template == "llama 2" else AS_DRAWN)}
    used, drawn_otherwise = 0, 0
    for n_others in (0, 0, 1, 3 * N_PLACES, 0):
        for _ in range(n_others):
            server.post(CHAT, {"messages": [said(words(rng, 10))], "max_tokens": 3})
        before = engine.batches.tokens
        answer = server.post(CHAT, {"messages": messages, **body}).json
        usage = answer["usage"]
        n_cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert n_cached == max(0, used - 1)  # all that was read and written but the newest token
        n_new = usage["prompt_tokens"] - n_cached
        assert engine.batches.tokens - before == n_new + usage["completion_tokens"] - 1
        used = usage["total_tokens"]
        text = answer["choices"][0]["message"]["content"]
        cut = engine.model.tokenize(b"\n" + text.encode(), add_bos=False)
        drawn_otherwise += len(cut) != usage["completion_tokens"]
        messages += [said(text, by="assistant"), said(words(rng, 2))]
    assert engine.stored.moved_in > 0
    assert drawn_otherwise > 0


def test_a_prompt_of_text_goes_on_likewise(
    server: Any, engine: Engine, rng: np.random.Generator
) -> None:
    """As clients send it that have a template of their own."""
    prompt, used = words(rng, 20) + "\n", 0
    for _ in range(3):
        body = {"prompt": prompt, "max_tokens": 20, **AS_DRAWN}
        answer = server.post(COMPLETIONS, body).json
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == max(0, used - 1)
        used = usage["total_tokens"]
        prompt += answer["choices"][0]["text"] + f"\n{words(rng, 2)}\n"
