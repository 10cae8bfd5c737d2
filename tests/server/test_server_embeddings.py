"""/v1/embeddings, as OpenAI's own client sees it, beside llama_cpp's embeddings."""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import PoolingType

import tiny_gguf
from good_bodies import CHAT, COMPLETIONS, EMBEDDINGS, GOOD
from needed import needed
from pyh2o.core.embedding import Embedder
from pyh2o.core.parameters import Parameters
from pyh2o.errors import UnsupportedModelError
from pyh2o.models.header import read_header
from tiny_gguf import write_tiny_gguf
from tiny_llama import ONE_THREAD, tiny_parent
from tiny_model import TinyModel

openai = needed("openai")
loopback = needed("loopback", name="the server's packages")
several = needed("several_models", name="the server's packages")
server_module = needed("pyh2o.server", name="the server's packages")
PATIENCE, wait_until = loopback.PATIENCE, loopback.wait_until
TRAINED = several.TRAINED

TEXTS = ["once upon a time", "a ship called sage", "once upon a time, there was", "\N{SNOWMAN}"]


@pytest.fixture(scope="module")
def expected(paths: dict[str, Path]) -> list[list[float]]:
    """llama_cpp's embeddings of the texts."""
    with contextlib.closing(tiny_parent(paths["bert"], n_ctx=TRAINED, embedding=True)) as llm:
        return [llm.embed(text, normalize=True) for text in TEXTS]


@pytest.fixture(scope="module")
def tokens(paths: dict[str, Path]) -> list[list[int]]:
    """Those that llama_cpp embeds the texts as."""
    with contextlib.closing(tiny_parent(paths["bert"], vocab_only=True)) as llm:
        return [llm.tokenize(text.encode()) for text in TEXTS]


Serve = Callable[..., Any]


@pytest.fixture(scope="module")
def serve(paths: dict[str, Path]) -> Iterator[Serve]:
    """Starts a server of these models, the first of which is loaded."""
    with contextlib.ExitStack() as started:

        def start(*names: str, **limits: Any) -> Any:
            models = several.Loads(paths, server_module.Limits(**limits)).models(*names)
            started.enter_context(contextlib.closing(models))
            return started.enter_context(loopback.LoopbackServer(models))

        yield start


@pytest.fixture(scope="module")
def server(serve: Serve) -> Any:
    return serve("first", "bert")


@pytest.fixture
def client(server: Any) -> Any:
    return loopback.openai_client(server.address)


def assert_close(response: Any, vectors: Any, n_tokens: int) -> None:
    assert [each.index for each in response.data] == list(range(len(vectors)))
    for each, vector in zip(response.data, vectors, strict=True):
        np.testing.assert_allclose(each.embedding, vector, atol=1e-6)
        assert np.linalg.norm(each.embedding) == pytest.approx(1)
    assert response.model == "bert"
    assert response.usage.prompt_tokens == response.usage.total_tokens == n_tokens


def test_embeddings_are_llama_cpp_s(
    client: Any, expected: list[list[float]], tokens: list[list[int]]
) -> None:
    assert not np.allclose(expected[0], expected[1], atol=0.1)
    n_tokens = sum(map(len, tokens))
    for asked in ({}, {"encoding_format": "float"}):  # the client's own is base64
        response = client.embeddings.create(model="bert", input=TEXTS, **asked)
        assert_close(response, expected, n_tokens)
    response = client.embeddings.create(model="bert", input=TEXTS, encoding_format="base64")
    for each in response.data:
        each.embedding = np.frombuffer(base64.b64decode(each.embedding), "<f4")
    assert_close(response, expected, n_tokens)
    for one in (TEXTS[1], [TEXTS[1]], tokens[1], [tokens[1]]):
        response = client.embeddings.create(model="bert", input=one)
        assert_close(response, expected[1:2], len(tokens[1]))
    assert_close(client.embeddings.create(model="bert", input=tokens), expected, n_tokens)


def test_the_longest_text(client: Any, paths: dict[str, Path], rng: np.random.Generator) -> None:
    ids = [1, *rng.integers(3, 384, TRAINED - 1).tolist()]
    response = client.embeddings.create(model="bert", input=ids)
    assert response.usage.prompt_tokens == TRAINED
    with pytest.raises(openai.BadRequestError) as error:
        client.embeddings.create(model="bert", input=[[1, 5], [*ids, 7]])
    assert error.value.code == "context_length_exceeded"
    assert error.value.body["param"] == "input[1]"
    assert "the text has 129 tokens, the limit is 128" in error.value.message
    with pytest.raises(openai.BadRequestError, match="the limit is 128"):
        client.embeddings.create(model="bert", input="once upon a time " * 1000)


def test_requests_at_the_same_time(client: Any, expected: list[list[float]]) -> None:
    def ask(i: int) -> Any:
        return client.embeddings.create(model="bert", input=[TEXTS[i % 4], TEXTS[0]]).data

    with ThreadPoolExecutor(8) as pool:
        for i, (one, first) in enumerate(pool.map(ask, range(24))):
            np.testing.assert_allclose(one.embedding, expected[i % 4], atol=1e-6)
            np.testing.assert_allclose(first.embedding, expected[0], atol=1e-6)


NO_INPUTS: list[Any] = [
    "", [], [""], ["once", ""], [[]], ["once", 3], [3, "once"], [[3], 3], [[3, True]], [True],
    [[3.0]], 3, {"text": "once"}, [["once"]], [["once", 3]], [-1], [384], [2**31], [10**30],
    [[3], [10**30]], ["once"] * 2049,
]  # fmt: skip


@pytest.mark.parametrize("given", NO_INPUTS, ids=lambda given: repr(given)[:30])
def test_inputs_that_are_none(server: Any, given: Any) -> None:
    error = server.refused(EMBEDDINGS, {"model": "bert", "input": given})
    assert error["message"].startswith("input")
    assert error["param"].startswith("input")
    assert server.post(EMBEDDINGS, {"model": "bert", "input": "once"}).status == 200


def test_fields_that_are_wrong(server: Any) -> None:
    good = {"model": "bert", "input": "once"}
    for field, value in (("encoding_format", "int8"), ("dimensions", 0), ("dimensions", "8")):
        assert server.refused(EMBEDDINGS, {**good, field: value})["param"] == field
    error = server.refused(EMBEDDINGS, {**good, "dimensions": 64})
    assert "the vectors of bert have 128 values" in error["message"]
    assert server.post(EMBEDDINGS, {**good, "dimensions": 128}).status == 200


def test_each_model_does_its_own(server: Any, serve: Serve) -> None:
    error = server.refused(EMBEDDINGS, {"model": "first", "input": "once"})
    assert error["message"] == "the model first is not an embedding model: use bert"
    assert server.post(EMBEDDINGS, {"input": "once"}).json["model"] == "bert"
    for route in (COMPLETIONS, CHAT):
        error = server.refused(route, {**GOOD[route], "model": "bert"})
        assert error["message"] == "the model bert is an embedding model: use first"
        assert error["param"] == "model"
    only = serve("bert")
    assert only.post(EMBEDDINGS, {"model": "text-embedding-3-small", "input": "a"}).status == 200
    error = only.refused(CHAT, {**GOOD[CHAT], "model": "gpt-4"})
    assert "the model bert is an embedding model" in error["message"]
    assert "serve another one too" in error["message"]


def test_the_wait_has_an_end(serve: Serve) -> None:
    server = serve("bert", wait_seconds=0.3)
    model = only_model(server)
    with model._turn:
        reply = server.post(EMBEDDINGS, {"input": "once"})
    assert reply.status == 503
    assert "no slot was free for 0.3 seconds" in reply.error["message"]
    assert server.post(EMBEDDINGS, {"input": "once"}).status == 200


def test_a_client_that_leaves(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other texts are not read."""
    server = serve("bert")
    model = only_model(server)
    is_read = threading.Event()
    n_read = 0

    def embed_tokens(_tokens: Any) -> Any:
        """Takes until the client has left."""
        nonlocal n_read
        n_read += 1
        is_read.set()
        with contextlib.suppress(BaseException):
            while True:
                model.check()
        return np.ones(128, np.float32)

    monkeypatch.setattr(model.embedder, "embed_tokens", embed_tokens)
    connection = server.send(EMBEDDINGS, {"input": ["once"] * 100})
    assert is_read.wait(PATIENCE)
    connection.close()
    wait_until(lambda: server.models.named("bert").n_leases == 0)
    assert n_read == 1


def only_model(server: Any) -> Any:
    """The only model of a server."""
    (model,) = server.models.loaded()
    return model


def embedder(path: Path, **settings: Any) -> Any:
    return contextlib.closing(Embedder(path, parameters=Parameters(**ONE_THREAD), **settings))


def test_a_model_that_writes_is_not_loaded_for_embeddings(paths: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="not an embedding model"):
        embedder(paths["first"])


def test_the_window_is_the_trained_one_at_most(paths: dict[str, Path], tmp_path: Path) -> None:
    """And no larger than memory likes."""
    long = write_tiny_gguf(
        tmp_path / "long.gguf", seed=1, n_layer=1, n_ctx_train=8192, arch_variant="encoder"
    )
    bert = paths["bert"]
    for path, n_ctx, window in (
        (bert, 0, TRAINED), (bert, 64, 64), (bert, 10**6, TRAINED), (long, 0, 2048)
    ):  # fmt: skip
        with embedder(path, n_ctx=n_ctx) as llm:
            assert llm.window == window
            assert llm.embed_tokens([3] * min(window, 200)).shape == (llm.n_values,) == (128,)


def test_a_model_whose_last_token_is_its_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """It writes text by its architecture; what its file says counts."""
    architecture, add_layers = tiny_gguf.ALL_VARIANTS["llama"]

    def add(model: TinyModel) -> None:
        add_layers(model)
        model.writer.add_pooling_type(PoolingType.LAST)

    monkeypatch.setitem(tiny_gguf.ALL_VARIANTS, "pooled", (architecture, add))
    path = write_tiny_gguf(tmp_path / "last.gguf", seed=2, n_ctx_train=600, arch_variant="pooled")
    header = read_header(path)
    assert (header.has_embeddings, header.causal) == (True, True)
    texts = ["".join(map(chr, rng.integers(97, 123, n))) for n in (3, 20, 500)]
    window = {"n_ctx": 600, "n_batch": 600, "n_ubatch": 600}
    with contextlib.closing(tiny_parent(path, embedding=True, **window)) as parent:
        expected = [parent.embed(text, normalize=True) for text in texts]
    with embedder(path) as llm:
        for text, vector in zip(texts, expected, strict=True):
            got = llm.embed_tokens(llm.tokenize(text.encode()))
            np.testing.assert_allclose(got, vector, atol=1e-6)
