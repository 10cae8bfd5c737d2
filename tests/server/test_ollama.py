"""Ollama's routes, as its own client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from good_bodies import CHAT, COMPLETIONS, EMBEDDINGS, FLAG_SCHEMA
from needed import needed
from pyh2o.engine import Engine
from pyh2o.writing.generation import Generation

ollama = needed("ollama")
loopback = needed("loopback", name="the server's packages")

# Long enough for its tokens to be in the cache when they come again, in texts that evict none.
PROMPT = "once upon a time"
MESSAGES = [{"role": "user", "content": PROMPT}]
OPTIONS = {"num_predict": 20, "seed": 3, "temperature": 0.9, "num_ctx": 4096}
DRAWING = {"max_tokens": 20, "seed": 3, "temperature": 0.9}


@pytest.fixture
def client(server: Any) -> Any:
    return ollama.Client(f"http://127.0.0.1:{server.port}")


def chat(client: Any, **arguments: Any) -> Any:
    return client.chat(
        **{"model": "tiny:latest", "messages": MESSAGES, "options": OPTIONS, **arguments}
    )


def test_a_chat_is_openai_s(client: Any, server: Any) -> None:
    told = server.post(CHAT, {"messages": MESSAGES, **DRAWING}).json
    answer = chat(client)
    assert answer.message.role == "assistant"
    assert answer.message.content == told["choices"][0]["message"]["content"]
    assert answer.prompt_eval_count == told["usage"]["prompt_tokens"]
    assert answer.eval_count == told["usage"]["completion_tokens"]
    assert (answer.done, answer.done_reason) == (True, "length")
    assert answer.eval_duration > 0
    *parts, last = chat(client, stream=True)
    assert "".join(part.message.content for part in parts) == answer.message.content
    assert (last.done_reason, last.eval_count) == ("length", answer.eval_count)
    assert len(parts) > 5
    assert not any(part.done for part in parts)


def test_text_is_generated(client: Any, server: Any) -> None:
    """By the chat template, or without it."""
    system = {"role": "system", "content": "Be brief."}
    told = server.post(CHAT, {"messages": [system, *MESSAGES], **DRAWING}).json
    settings = {"model": "tiny", "prompt": PROMPT, "options": OPTIONS}
    answer = client.generate(**settings, system="Be brief.")
    assert answer.response == told["choices"][0]["message"]["content"]
    told = server.post(COMPLETIONS, {"prompt": PROMPT, **DRAWING}).json
    raw = list(client.generate(**settings, raw=True, stream=True))
    assert "".join(part.response for part in raw) == told["choices"][0]["text"]
    assert raw[-1].prompt_eval_count == told["usage"]["prompt_tokens"]
    with pytest.raises(ollama.ResponseError, match="suffix: the model cannot fill gaps"):
        client.generate(**settings, suffix=" end")


@pytest.mark.parametrize("wanted", ["json", FLAG_SCHEMA])
def test_an_answer_in_json(client: Any, wanted: Any) -> None:
    options = {"num_predict": 200, "temperature": 0}
    try:
        answer = json.loads(chat(client, format=wanted, options=options).message.content)
    except json.JSONDecodeError:
        assert wanted == "json"  # any JSON may be long
        return
    assert wanted == "json" or isinstance(answer["flag"], bool)


def test_log_probabilities(client: Any) -> None:
    settings = {"logprobs": True, "top_logprobs": 2, "options": {**OPTIONS, "seed": 4}}
    plain = chat(client, **settings).logprobs
    parts = chat(client, stream=True, **settings)
    streamed = [token for part in parts for token in part.logprobs or ()]
    assert [token.token for token in streamed] == [token.token for token in plain]
    assert len(plain) == 20
    assert {len(token.top_logprobs) for token in plain} == {2}


def test_a_model_can_be_loaded(client: Any) -> None:
    assert client.generate("tiny").done_reason == "load"
    assert chat(client, messages=[]).done_reason == "load"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"num_predict": "many"}}, "options.num_predict"),
        ({"options": {"tfs_z": 0.5}}, "tfs_z"),
        ({"options": {"dry_base": 0.5}}, "options.dry_base"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, "messages[0].images"),
        ({"format": {"type": "nonsense"}}, "format"),
    ],
)
def test_what_is_wrong_is_named(server: Any, fields: Any, named: str, stream: bool) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "stream": stream, **fields}
    reply = server.post("/api/chat", body)
    assert reply.status == 400
    assert reply.json.keys() == {"error"}
    assert reply.json["error"].startswith(f"{named}: ")


def test_an_error_amid_a_stream(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_generation: Generation) -> Any:
        raise RuntimeError("no more")

    monkeypatch.setattr(Generation, "end", fail)
    with pytest.raises(ollama.ResponseError, match="no more"):
        list(chat(client, stream=True))


def test_which_models_there_are(client: Any, server: Any, engine: Engine) -> None:
    [listed] = client.list().models
    assert [each.model for each in client.ps().models] == [listed.model]
    assert listed.model == "tiny:latest"
    assert listed.size == Path(engine.model.path).stat().st_size
    shown = client.show("tiny:latest")
    kind = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{kind}.context_length"] == 8 * engine.model.window
    assert shown.capabilities == ["completion"]
    assert shown.template == engine.model.metadata["tokenizer.chat_template"]
    assert server.get("/api/version").json.keys() == {"version"}


def test_embeddings_and_models_by_name(paths: dict[str, Path]) -> None:
    several = needed("several_models", name="the server's packages")
    models = several.Loads(paths).models("first", "bert")
    with closing(models), loopback.LoopbackServer(models) as server:
        client = ollama.Client(f"http://127.0.0.1:{server.port}")
        told = server.post(EMBEDDINGS, {"model": "bert", "input": ["once", "upon"]}).json
        answer = client.embed("bert:latest", ["once", "upon"])
        assert answer.embeddings == [each["embedding"] for each in told["data"]]
        assert answer.prompt_eval_count == told["usage"]["prompt_tokens"]
        assert client.show("bert").capabilities == ["embedding"]
        with pytest.raises(ollama.ResponseError, match="is an embedding model"):
            chat(client, model="bert")
        with pytest.raises(ollama.ResponseError, match="unknown model 'none'") as caught:
            chat(client, model="none")
        assert caught.value.status_code == 404


@pytest.fixture
def loads(paths: dict[str, Path]) -> Any:
    return needed("several_models", name="the server's packages").Loads(paths)


@pytest.fixture
def several_server(loads: Any) -> Iterator[Any]:
    models = loads.models("first", "second", "bert")
    with closing(models), loopback.LoopbackServer(models) as running:
        yield running


def test_models_are_unloaded(several_server: Any, loads: Any) -> None:
    client = ollama.Client(f"http://127.0.0.1:{several_server.port}")

    def loaded() -> set[str]:
        return {each.model.removesuffix(":latest") for each in client.ps().models}

    for name in ("first", "second"):  # of which only the first is loaded
        assert client.generate(name, keep_alive=0).done_reason == "unload"
    assert client.chat("first", [], keep_alive="0s").done_reason == "unload"
    assert loaded() == set()
    assert loads.counts == {"first": 1}
    assert client.chat("first", MESSAGES, options=OPTIONS, keep_alive=0).done_reason == "length"
    assert loaded() == set()
    client.embed("bert", "once", keep_alive=-1)
    client.generate("first", "once", options=OPTIONS)
    assert client.generate("bert", keep_alive=0).done_reason == "unload"
    assert loaded() == {"first"}
    assert client.generate("second", keep_alive="20ms").done_reason == "load"
    loopback.wait_until(lambda: loaded() == {"first"})
    client.generate("first", "once", options=OPTIONS, keep_alive="1h2m")
    assert several_server.models.named("first").keep_alive == 3720
    client.generate("first", "once", options=OPTIONS, keep_alive=1e300)
    assert loaded() == {"first"}
    for odd in ("soon", "5 m", "", False, "1d", "1" * 60 + "x"):
        body = {"model": "first", "keep_alive": odd}
        message = several_server.post("/api/generate", body).json["error"]
        assert message.startswith("keep_alive: ")


def test_a_model_that_is_used_is_not_unloaded(several_server: Any) -> None:
    client = ollama.Client(f"http://127.0.0.1:{several_server.port}")
    parts = client.generate("first", "once", stream=True, options={"num_predict": -1})
    next(parts)
    assert client.generate("first", keep_alive=0).done_reason == "unload"
    assert client.ps().models
    assert list(parts)[-1].done
    loopback.wait_until(lambda: not client.ps().models)


def test_long_texts_are_cut_for_embeddings(several_server: Any) -> None:
    client = ollama.Client(f"http://127.0.0.1:{several_server.port}")
    texts = ["word " * 200, "word " * 300]
    one, other = client.embed("bert", texts).embeddings
    assert one == other
    assert client.embed("bert", texts[0]).prompt_eval_count == 128
    with pytest.raises(ollama.ResponseError, match=r"input\[0\]: .* the limit is 128"):
        client.embed("bert", texts, truncate=False)
    old = client.embeddings("bert", "once").embedding
    assert [old] == client.embed("bert", "once").embeddings
    with pytest.raises(ollama.ResponseError, match=r"prompt: .* the limit is 128"):
        client.embeddings("bert", texts[0])


def test_errors_are_ollama_s_where_nothing_is(server: Any) -> None:
    for reply, status in (
        (server.get("/api/none"), 404),
        (server.get("/api/chat"), 405),
        (server.post("/api/tags", {}), 405),
        (server.post("/api/generate", b"{"), 400),
        (server.post("/api/blobs/sha256:1", {}), 404),
    ):
        assert reply.status == status
        assert isinstance(reply.json["error"], str)
        assert reply.json.keys() == {"error"}


def test_a_client_without_the_key(engine: Engine) -> None:
    with loopback.LoopbackServer(engine, api_key="secret") as server:
        url = f"http://127.0.0.1:{server.port}"
        with pytest.raises(ollama.ResponseError, match="--api-key"):
            ollama.Client(url).list()
        client = ollama.Client(url, headers={"Authorization": "Bearer secret"})
        assert client.list().models
