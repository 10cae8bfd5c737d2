"""Clients that leave, and clients that wait: nothing is done for nobody, and texts stay right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needed import needed
from pyh2o import Llama
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import tiny_llama

loopback = needed("loopback", name="the server's packages")
limits = needed("pyh2o.openai.limits", name="the server's packages")

CACHE: dict[str, Any] = {"n_ctx": 256, "hh": 32, "recent": 32, "slack": 16}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NO_END = {"2": -100}
# Pieces of a prompt are as long as the slack; this is some thousands of them.
LONG_PROMPT = "once upon a time " * 10_000
ENDLESS = {"prompt": "once", "max_tokens": 10**9, "logit_bias": NO_END}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf",
        seed=5,
        n_ctx_train=1024,
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture
def llm(path: Path) -> Iterator[Llama]:
    with tiny_llama(path, **CACHE) as model:
        yield model


class Watched:
    """A server, and what its model has read of prompts."""

    def __init__(self, llm: Llama, **settings: Any) -> None:
        roomy = limits.Limits(prompt_tokens=10**6, **settings)
        self.server = loopback.LoopbackServer(llm, limits=roomy)
        self.llm = llm
        self.read = self.to_read = 0
        report = llm.prompt_progress
        assert report is not None

        def watch(done: int, total: int) -> None:
            self.read, self.to_read = done, total
            report(done, total)

        llm.prompt_progress = watch

    def wait_until_reading(self) -> None:
        wait_until(lambda: self.to_read > 100_000 and self.read > 0)

    def wait_until_writing(self) -> None:
        wait_until(lambda: self.llm.n_tokens > 20)


def wait_until(is_so: Any) -> None:
    end = time.monotonic() + loopback.PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def watched(llm: Llama) -> Iterator[Watched]:
    made = Watched(llm)
    yield made
    made.server.close()


@pytest.fixture
def fresh(path: Path) -> Iterator[Llama]:
    with tiny_llama(path, **CACHE) as model:
        yield model


def check_next_answers(watched: Watched, fresh: Llama, rng: np.random.Generator) -> None:
    """What comes next is what a model that never worked before writes."""
    for seed in rng.integers(2**31, size=3).tolist():
        given = {"prompt": f"{seed} sheep on the hill", "seed": seed, "max_tokens": 30}
        answer = watched.server.post(COMPLETIONS, {**given, "logit_bias": NO_END}).json
        expected = fresh.create_completion(
            given["prompt"], seed=seed, max_tokens=30, logit_bias={2: -100.0}, repeat_penalty=1.1
        )
        assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
        fresh.reset()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_client_that_leaves_while_its_prompt_is_read(
    watched: Watched, fresh: Llama, rng: np.random.Generator, route: str, stream: bool
) -> None:
    messages = [{"role": "user", "content": LONG_PROMPT}]
    body = {"messages": messages} if route == CHAT else {"prompt": LONG_PROMPT}
    connection = watched.server.send(route, {**body, "max_tokens": 5, "stream": stream})
    watched.wait_until_reading()
    connection.close()
    wait_until(lambda: watched.server.post("/extras/tokenize", {"input": "a"}).status == 200)
    assert watched.read < watched.to_read
    check_next_answers(watched, fresh, rng)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_is_answered(
    watched: Watched, fresh: Llama, rng: np.random.Generator, stream: bool
) -> None:
    connection = watched.server.send(COMPLETIONS, {**ENDLESS, "stream": stream})
    watched.wait_until_writing()
    connection.close()
    check_next_answers(watched, fresh, rng)


def test_a_client_that_leaves_the_queue(watched: Watched) -> None:
    at_work = watched.server.send(COMPLETIONS, ENDLESS)
    watched.wait_until_writing()
    waiting = [
        watched.server.send(COMPLETIONS, {"prompt": LONG_PROMPT, "stream": stream})
        for stream in (False, True)
    ]
    time.sleep(0.2)
    for connection in (*waiting, at_work):
        connection.close()
    answer = watched.server.post(COMPLETIONS, {"prompt": "once", "max_tokens": 3})
    assert answer.status == 200
    assert watched.to_read < 100_000  # nobody's prompt was read for those who left


def test_a_stream_begins_while_its_prompt_is_read(watched: Watched) -> None:
    """So that the client of a long prompt can tell it from a server that hangs."""
    connection = watched.server.send(COMPLETIONS, {"prompt": LONG_PROMPT, "stream": True})
    assert connection.recv(20).startswith(b"HTTP/1.1 200 OK")
    assert watched.read < watched.to_read
    connection.close()


def test_the_wait_has_a_limit(llm: Llama) -> None:
    watched = Watched(llm, wait_seconds=0.3, waiting=1)
    at_work = watched.server.send(COMPLETIONS, ENDLESS)
    watched.wait_until_writing()
    for stream in (False, True):
        reply = watched.server.post(COMPLETIONS, {"prompt": "a", "stream": stream})
        assert reply.status == 503
        assert reply.error["message"].startswith("the model was busy for 0.3 seconds")
    at_work.close()
    assert watched.server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status == 200
    watched.server.close()


def test_the_queue_has_a_limit(llm: Llama) -> None:
    watched = Watched(llm, waiting=1)
    at_work = watched.server.send(COMPLETIONS, ENDLESS)
    watched.wait_until_writing()
    waiting = watched.server.send(COMPLETIONS, ENDLESS)
    time.sleep(0.2)
    reply = watched.server.post(COMPLETIONS, {"prompt": "a"})
    assert reply.status == 503
    assert reply.error["message"] == "1 requests wait already: try again later"
    for connection in (waiting, at_work):
        connection.close()
    watched.server.close()
