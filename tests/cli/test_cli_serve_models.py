"""`pyh2o serve` with several models: the real program, with OpenAI's own client."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from needed import needed
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

openai = needed("openai")
serving = needed("serving_program", name="the server's packages")
PATIENCE, Program = serving.PATIENCE, serving.Program

pytestmark = pytest.mark.real
MESSAGES: Any = [{"role": "user", "content": "Hello?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("first", "second")):
        write_tiny_gguf(
            made / f"{name}.gguf", seed=seed, n_ctx_train=1024, chat_template=CHAT_TEMPLATE
        )
    write_tiny_gguf(made / "bert.gguf", seed=9, n_ctx_train=128, arch_variant="encoder")
    return made


@pytest.fixture
def program(folder: Path) -> Iterator[Callable[..., Any]]:
    started: list[Any] = []

    def start(*models: str | Path, options: tuple[str, ...] = ()) -> Any:
        given = [each for name in models for each in ("--model", folder / f"{name}.gguf")]
        started.append(Program(*given, "--port", "0", "--texts", "2", *options))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait(PATIENCE)


def test_several_models_answer(program: Callable[..., Any]) -> None:
    server = program("first", "second", "bert", options=("--ctx", "256"))
    client = openai.OpenAI(base_url=server.address(), api_key="any", timeout=PATIENCE)
    lines = server.notes.splitlines()
    assert lines[0].startswith("first · 2 texts at once, each: KV 0/256 cells")
    assert lines[1:3] == [
        "second · 2 texts at once, loaded when it is asked for",
        "bert · embeddings, loaded when it is asked for",
    ]
    assert [model.id for model in client.models.list()] == ["first", "second", "bert"]
    for name in ("second", "first"):
        answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=5)
        assert answer.model == name
    embedded = client.embeddings.create(model="bert", input=["once", "upon a time"])
    assert [len(each.embedding) for each in embedded.data] == [128, 128]
    server.process.send_signal(signal.SIGINT)
    assert server.end() == 0
    assert server.notes.splitlines()[-1] == "stopped"
    assert "Traceback" not in server.notes


def test_a_model_for_embeddings_alone(program: Callable[..., Any]) -> None:
    server = program("bert")
    client = openai.OpenAI(base_url=server.address(), api_key="any", timeout=PATIENCE)
    assert server.notes.startswith(
        "bert · embeddings of 128 values, for texts of up to 128 tokens\n"
    )
    assert len(client.embeddings.create(model="any", input="once").data[0].embedding) == 128


def test_what_is_wrong_with_a_later_model_is_said_at_once(
    program: Callable[..., Any], folder: Path
) -> None:
    (folder / "broken.gguf").write_bytes(b"GGUF and no more")
    write_tiny_gguf(folder / "mamba.gguf", seed=1, arch_variant="recurrent")
    write_unpooled(folder / "bert.gguf", folder / "unpooled.gguf")
    (folder / "other").mkdir(exist_ok=True)
    (folder / "other" / "first.gguf").write_bytes((folder / "first.gguf").read_bytes())
    for name, reason in {
        "none": "there is no model file",
        "broken": "its header cannot be read",
        "mamba": "--no-evict keeps the full cache, for all models",
        "unpooled": "no pooling type that makes an embedding",
        "other/first": "two models are called first",
    }.items():
        server = program("first", name)
        assert server.end() == 1
        assert server.notes.startswith("error: ")
        assert reason in server.notes
        assert server.notes.count("\n") == 1


def write_unpooled(path: Path, copy: Path) -> None:
    """A copy whose pooling type is NONE."""
    copy.write_bytes(path.read_bytes())
    reader = GGUFReader(copy, "r+")
    field = reader.get_field("bert.pooling_type")
    assert field is not None
    field.parts[field.data[0]][0] = 0
    reader.data.flush()
