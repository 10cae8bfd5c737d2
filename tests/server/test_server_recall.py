"""The server with a model that recalls: its answers find what they find with the class itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from good_bodies import CHAT
from many_texts import tiny_engine
from needed import needed
from pyh2o import Llama
from pyh2o.engine import Engine
from tiny_llama import tiny_llama

loopback = needed("loopback", name="the server's packages")

RECALL = 48
CACHE: dict[str, Any] = {"n_ctx": 512, "hh": 40, "recent": 40, "slack": 24}
# As a request has them and as the class does: its defaults are others.
SAMPLING: dict[str, Any] = {"temperature": 0.0, "repeat_penalty": 1.1, "max_tokens": 24}
NO_END: dict[str, float] = {"2": -100.0}


def recalling(path: Path, **settings: Any) -> Llama:
    return tiny_llama(path, **{**CACHE, "recall": RECALL, **settings})


@pytest.fixture
def engine(model_path: Path) -> Iterator[Engine]:
    """One place, so that chats take turns in it."""
    with tiny_engine(model_path, texts=1, **CACHE, recall=RECALL) as running:
        yield running


@pytest.fixture
def server(engine: Engine) -> Iterator[Any]:
    with loopback.LoopbackServer(engine) as running:
        yield running


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def long_chat(rng: np.random.Generator) -> list[dict[str, str]]:
    """One whose beginning is evicted before the question comes."""
    words = ["".join(map(chr, rng.integers(97, 123, 4))) for _ in range(90)]
    return [
        user(" ".join(words[:45])),
        {"role": "assistant", "content": " ".join(words[45:])},
        user(f"what was said of {words[7]}"),
    ]


def asked(server: Any, messages: list[dict[str, str]], **body: Any) -> Any:
    reply = server.post(CHAT, {"messages": messages, **SAMPLING, "logit_bias": NO_END, **body})
    assert reply.status == 200, reply.body[:500]
    return reply


def expected_of(llm: Llama, messages: list[dict[str, str]]) -> Any:
    return llm.create_chat_completion(messages, **SAMPLING, logit_bias={2: -100.0})


def content_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def without_details(usage: dict[str, Any]) -> dict[str, Any]:
    """What the class tells, too."""
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}


def test_an_answer_is_the_model_s(
    server: Any, engine: Engine, model_path: Path, rng: np.random.Generator
) -> None:
    """It needs what is found: without recall it is another one."""
    messages = long_chat(rng)
    answer = asked(server, messages).json
    with recalling(model_path) as alone:
        expected = expected_of(alone, messages)
        (place,) = engine.report()
        assert list(place.recalled) == [(each.start, each.end) for each in alone.recalled()] != []
        assert place.kv.n_looked == alone.kv.n_looked == alone.n_tokens
        assert place.kv.found_share == pytest.approx(alone.kv.found_share, rel=1e-3)
        assert place.kv.archived == alone.kv.archived > 0
        n_prompt = alone.n_tokens + 1 - SAMPLING["max_tokens"]
    assert content_of(answer) == content_of(expected)
    assert without_details(answer["usage"]) == expected["usage"]
    assert answer["usage"]["prompt_tokens"] == n_prompt
    with recalling(model_path, recall=0) as without:
        assert content_of(answer) != content_of(expected_of(without, messages))


def test_chats_by_turns(server: Any, model_path: Path, rng: np.random.Generator) -> None:
    """One that goes on is not read again; another gets the answer it would get alone."""
    first, second = long_chat(rng), long_chat(rng)
    with recalling(model_path) as alone:
        for messages in (first, second):
            for _ in range(2):
                answer, expected = asked(server, messages).json, expected_of(alone, messages)
                assert content_of(answer) == content_of(expected)
                assert without_details(answer["usage"]) == expected["usage"]
                messages += [answer["choices"][0]["message"], user("and what else")]
            alone.reset()
