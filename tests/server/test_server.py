"""The server, as OpenAI's own client sees it on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broken_weights import POLICY, infinite_model
from many_texts import tiny_engine
from needed import needed
from pyh2o import Llama
from pyh2o.engine import Engine
from tiny_gguf import CHAT_TEMPLATE

openai = needed("openai")
loopback = needed("loopback", name="the server's packages")

WINDOW = 256
CACHE: dict[str, Any] = {"n_ctx": WINDOW, "hh": 32, "recent": 32, "slack": 16}
NO_END = loopback.NO_END
# One token is one character then; others would be cut between chunks.
ONLY_ASCII: dict[str, float] = {str(3 + byte): -100.0 for byte in range(128, 256)}

MESSAGES: Any = [{"role": "user", "content": "Hello?"}]

Serve = Callable[[Engine], openai.OpenAI]


@pytest.fixture
def seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**31))


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server for an engine on a free port and returns a client of it."""
    with ExitStack() as servers:
        yield lambda engine: loopback.openai_client(
            servers.enter_context(loopback.LoopbackServer(engine)).address
        )


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return loopback.openai_client(server.address)


def chat(client: openai.OpenAI, **arguments: Any) -> Any:
    arguments = {"messages": MESSAGES, "max_tokens": 20, "logit_bias": NO_END, **arguments}
    return client.chat.completions.create(model="tiny", **arguments)


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_the_model_has_a_name_and_the_server_is_well(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client._client.get(f"{client.base_url}../health").json() == {"status": "ok"}


def test_a_chat_answer_is_the_model_s(client: openai.OpenAI, alone: Llama) -> None:
    answer = chat(client, seed=3, logit_bias=ONLY_ASCII)
    alone.reset()
    expected = alone.create_chat_completion(  # whose own temperature is another one
        MESSAGES, seed=3, max_tokens=20, logit_bias=ONLY_ASCII, temperature=0.8
    )
    assert answer.choices[0].message.content == expected["choices"][0]["message"]["content"]
    assert answer.choices[0].finish_reason == expected["choices"][0]["finish_reason"]
    assert answer.usage.total_tokens == expected["usage"]["total_tokens"]


def test_a_streamed_chat_answer_is_the_plain_one(client: openai.OpenAI, seed: int) -> None:
    plain = chat(client, seed=seed, max_tokens=200)
    chunks = list(chat(client, stream=True, seed=seed, max_tokens=200))
    assert text_of(chunks) == plain.choices[0].message.content
    assert len(chunks) > 100
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]


def test_a_request_ends_with_its_limit_or_with_the_window(client: openai.OpenAI) -> None:
    for limit, n in ((None, WINDOW), (7, 7)):  # the new name of max_tokens
        answer = chat(client, max_tokens=None, max_completion_tokens=limit)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == n


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_to_one_prompt(
    client: openai.OpenAI, engine: Engine, seed: int, stream: bool
) -> None:
    """Each is that of its own seed; the prompt, longer than the cache, is read once."""
    long = [{"role": "user", "content": f"{seed} " + "once upon a time " * 20}]
    settings: dict[str, Any] = {"messages": long, "stream": stream}
    if stream:
        settings["stream_options"] = {"include_usage": True}
    before = engine.batches.tokens
    moved_out = engine.stored.moved_out
    answers = chat(client, n=8, seed=seed, **settings)
    chunks = list(answers) if stream else [answers]
    usage = chunks[-1].usage
    assert usage.completion_tokens == 160
    assert usage.total_tokens == usage.prompt_tokens + 160
    n_again = engine.batches.tokens - before - usage.total_tokens
    assert n_again < usage.prompt_tokens / 2  # of seven more answers, which need its end
    # the end of the prompt for when it comes again, and whatever was in the place before
    assert engine.stored.moved_out - moved_out <= 2
    assert len({chunk.id for chunk in chunks}) == 1
    texts = [""] * 8
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += (choice.delta if stream else choice.message).content or ""
    assert len(set(texts)) == 8
    alone = [chat(client, messages=long, seed=seed + number) for number in range(8)]
    assert [answer.choices[0].message.content for answer in alone] == texts


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_at_once(client: openai.OpenAI, seed: int, stream: bool) -> None:
    def complete(prompt: Any, **arguments: Any) -> Any:
        return client.completions.create(
            model="tiny", prompt=prompt, max_tokens=12, logit_bias=NO_END, **arguments
        )

    prompts = [f"once {seed}", "upon", "a time"]
    answer = complete(prompts, n=2, seed=seed, stream=stream)
    texts = [""] * 6
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    alone = [complete(p, seed=seed + n) for p in prompts for n in range(2)]
    assert texts == [each.choices[0].text for each in alone]
    if not stream:
        assert answer.usage.completion_tokens == 72
        assert answer.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone[::2])


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client: openai.OpenAI, alone: Llama, stream: bool) -> None:
    settings = {"temperature": 0.0, "logit_bias": ONLY_ASCII}
    answer = chat(client, logprobs=True, top_logprobs=2, stream=stream, **settings)
    chunks = list(answer) if stream else [answer]
    tokens = [
        token
        for chunk in chunks
        for token in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or ()
    ]
    text = text_of(chunks) if stream else answer.choices[0].message.content
    assert "".join(token.token for token in tokens) == text
    assert {len(token.top_logprobs) for token in tokens} == {2}
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == text

    prompt = client._client.post(
        f"{client.base_url}../v1/completions",
        json={
            "prompt": "once",
            "max_tokens": 5,
            "logprobs": 3,
            "temperature": 0,
            "logit_bias": ONLY_ASCII,
        },
    ).json()["choices"][0]["logprobs"]
    alone.reset()
    expected = alone.create_completion(
        "once",
        max_tokens=5,
        logprobs=3,
        temperature=0.0,
        logit_bias={int(t): b for t, b in ONLY_ASCII.items()},
    )["choices"][0]["logprobs"]
    assert prompt["tokens"] == expected["tokens"]
    assert prompt["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-4)


def test_a_refusal_amid_a_stream(client: openai.OpenAI) -> None:
    dead_end = {"grammar": 'root ::= "ab"', "min_tokens": 10}
    with pytest.raises(openai.APIError, match="allows none of the tokens") as caught:
        list(chat(client, stream=True, extra_body=dead_end))
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_attention_that_is_infinite_ends_no_server(
    serve: Serve, tmp_path: Path, stream: bool
) -> None:
    broken = infinite_model(tmp_path / "broken.gguf", chat_template=CHAT_TEMPLATE)
    with tiny_engine(broken, texts=2, **CACHE, policy=POLICY) as engine:
        client = serve(engine)
        long = [{"role": "user", "content": "word " * 100}]
        with pytest.raises(openai.APIError, match="the attention of the model is inf") as caught:
            list(chat(client, messages=long, stream=stream))
        assert caught.value.type == "internal_server_error"
        with pytest.raises(openai.APIError, match="the output of the model is infinite"):
            list(chat(client, max_tokens=1, stream=stream))
        assert client.models.list().data


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_does_not_fit(serve: Serve, model_path: Path, stream: bool) -> None:
    long = [{"role": "user", "content": "x " * 300}]
    with tiny_engine(model_path, texts=2, n_ctx=WINDOW, evict=False) as engine:
        client = serve(engine)
        with pytest.raises(openai.APIError, match="exceed context window of 256") as caught:
            list(chat(client, messages=long, stream=stream))
    assert caught.value.code == "context_length_exceeded"


def test_only_pages_of_allowed_origins(engine: Engine) -> None:
    allowed = "http://localhost:3000"
    with loopback.LoopbackServer(engine, allowed_origins=[allowed]) as server:
        for origin in (allowed, "http://localhost:3001", "http://127.0.0.1", "https://example.com"):
            for route in ("/v1/models", "/v1/sessions"):
                headers = server.headers("GET", route, Origin=origin)
                told = headers.get("access-control-allow-origin")
                assert told == (origin if origin == allowed else None)
        own = f"http://127.0.0.1:{server.port}"
        page = {"Origin": own, "Sec-Fetch-Site": "same-origin"}
        assert server.post("/v1/completions", {"prompt": "once", "max_tokens": 1}, **page).json


def test_head_is_answered(engine: Engine) -> None:
    with loopback.LoopbackServer(engine) as server:
        for route in ("/", "/health", "/v1/models", "/v1/models/tiny", "/api/tags", "/api/version"):
            told = loopback.ask(server.port, "HEAD", route)
            assert (told.status, told.body) == (200, b"")
        assert loopback.ask(server.port, "HEAD", "/v1/completions").status == 405
