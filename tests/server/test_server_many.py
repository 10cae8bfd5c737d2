"""Many clients at once: each gets what it would get alone, and nobody is kept for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from good_bodies import CHAT, COMPLETIONS
from many_texts import at_once, tiny_engine
from needed import needed
from pyh2o import Llama
from pyh2o.engine import Engine
from pyh2o.limits import Limits
from sampled_answers import words
from tiny_llama import EXACT_ROWS, tiny_llama

loopback = needed("loopback", name="the server's packages")
wait_until, ENDLESS, NO_END = loopback.wait_until, loopback.ENDLESS, loopback.NO_END

N_CLIENTS = 60
N_PLACES = 4
# What a text gets does not depend on the size of its batches.
EXACT: dict[str, Any] = {
    **EXACT_ROWS, "attention": "ops", "n_ctx": 256, "hh": 24, "recent": 24, "slack": 16
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    with tiny_engine(model_path, texts=N_PLACES, **EXACT) as running:
        yield running


@pytest.fixture(scope="module")
def alone(model_path: Path) -> Iterator[Llama]:
    with tiny_llama(model_path, **EXACT) as model:
        yield model


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Any]:
    with loopback.LoopbackServer(engine, limits=Limits(waiting=N_CLIENTS)) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(engine: Engine) -> Iterator[None]:
    yield
    wait_until(lambda: engine.n_running == engine.n_waiting == 0)
    assert not any(place.running for place in engine.report())


def test_many_clients_get_what_each_gets_alone(
    server: Any, engine: Engine, alone: Llama, rng: np.random.Generator
) -> None:
    """Chats and completions, streams and plain answers, in texts of which some evict."""
    prompts = [words(rng, int(n)) for n in rng.integers(1, 30, N_CLIENTS)]
    client = loopback.openai_client(server.address)
    drawing = {"model": "tiny", "max_tokens": 8, "temperature": 0.0, "logit_bias": NO_END}

    def chat(i: int) -> str:
        messages: Any = [{"role": "user", "content": prompts[i]}]
        done = client.chat.completions.create(messages=messages, stream=i % 4 > 1, **drawing)
        if i % 4 > 1:
            return "".join(chunk.choices[0].delta.content or "" for chunk in done)
        return str(done.choices[0].message.content)

    def complete(i: int) -> str:
        done = client.completions.create(prompt=prompts[i], stream=i % 4 > 1, **drawing)
        return "".join(chunk.choices[0].text for chunk in (done if i % 4 > 1 else [done]))

    def ask(i: int) -> str:
        return chat(i) if i % 2 else complete(i)

    before = engine.batches
    answers = at_once([lambda i=i: ask(i) for i in range(N_CLIENTS)])
    n_batches = engine.batches.batches - before.batches
    assert engine.batches.texts - before.texts > 2 * n_batches

    own = {"max_tokens": 8, "temperature": 0.0, "logit_bias": {2: -100.0}}
    for i, prompt in enumerate(prompts):
        alone.reset()
        if i % 2:
            told = alone.create_chat_completion([{"role": "user", "content": prompt}], **own)
            expected = told["choices"][0]["message"]["content"]
        else:
            expected = alone.create_completion(prompt, **own)["choices"][0]["text"]
        assert answers[i] == expected


def test_clients_that_leave_make_room_for_others(server: Any, engine: Engine) -> None:
    stays, *leavers = [
        server.send(COMPLETIONS, {**ENDLESS, "stream": i % 2 == 0}) for i in range(N_PLACES)
    ]
    wait_until(lambda: engine.n_running == N_PLACES)
    body = {"prompt": "a", "max_tokens": 3, "logit_bias": NO_END}
    with ThreadPoolExecutor(2 * N_PLACES) as pool:
        waiting = [pool.submit(server.post, COMPLETIONS, body) for _ in range(2 * N_PLACES)]
        wait_until(lambda: engine.n_waiting == 2 * N_PLACES)
        for connection in leavers:
            connection.close()
        assert {each.result(loopback.PATIENCE).status for each in waiting} == {200}
    assert engine.n_running == 1
    assert stays.recv(20).startswith(b"HTTP/1.1 200 OK")
    stays.close()


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("end", [{}, {"stop": ["e"]}, {"grammar": 'root ::= "yes"'}])
def test_a_stream_tells_the_tokens_used(server: Any, route: str, end: dict[str, Any]) -> None:
    """In one chunk more, without a choice, and only if it is asked for."""
    text: Any = {"messages": [{"role": "user", "content": "Hello?"}], "prompt": "Hello?"}
    body = {**text, "max_tokens": 40, "seed": 3, **end}
    plain = server.post(route, body).json["usage"]

    def chunks(**fields: Any) -> list[Any]:
        return list(server.post(route, {**body, "stream": True, **fields}).events)

    *others, last = chunks(stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["id"] == others[0]["id"]
    usage = last["usage"]
    assert 0 <= usage.pop("prompt_tokens_details")["cached_tokens"] < usage["prompt_tokens"]
    assert usage == {name: plain[name] for name in usage}
    assert len(usage) == 3
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks())


def test_stream_options_are_checked(server: Any) -> None:
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": "yes"}}
    assert server.refused(COMPLETIONS, body)["param"] == "stream_options.include_usage"
