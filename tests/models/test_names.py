"""Find models by name or by the start of a name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli_fakes import run
from pyh2o import Conversation
from pyh2o.core.description import describe_model
from pyh2o.errors import ModelError
from pyh2o.models import DEMO, GEMMA, find_model, list_models, models_folder
from pyh2o.models.header import read_header
from pyh2o.models.names import readable_name
from tiny_pictures import mark_of, tiny_seer, write_models
from tiny_projector import png

pytestmark = pytest.mark.usefixtures("surroundings")


def put(*names: str) -> list[Path]:
    """Create files in the models folder."""
    models_folder().mkdir(exist_ok=True)
    paths = [models_folder() / name for name in names]
    for path in paths:
        path.write_bytes(b"GGUF")
    return paths


@pytest.mark.parametrize(
    "name", ["Qwen3-0.6B-Q4_K_M", "qwen3-0.6b-q4_k_m", "qwen3", "Q", "Qwen3-0.6B-Q4_K_M.gguf"]
)
def test_the_start_of_a_name_finds_a_model(name: str) -> None:
    path, _ = put("Qwen3-0.6B-Q4_K_M.gguf", "tiny.gguf")
    assert find_model(name) == find_model(Path(name)) == path


def test_an_ambiguous_start_is_refused() -> None:
    put("qwen3-4b.gguf", "qwen3-8b.gguf", "qwen.gguf")
    with pytest.raises(ModelError, match=r"match qwen3: give .* qwen3-4b or qwen3-8b$"):
        find_model("qwen3")
    assert find_model("qwen") == models_folder() / "qwen.gguf"


@pytest.mark.parametrize("name", ["qwen3-4b", "owner", "q4"])
def test_an_unknown_name_is_reported(name: str) -> None:
    put("tiny-q4.gguf")
    with pytest.raises(ModelError, match=rf"no model {name}: give a GGUF file, or a name from"):
        find_model(name)


@pytest.mark.parametrize("name", ["tin.gguf", "folder/tiny", "../tiny", "~/tiny"])
def test_a_path_is_not_a_name(name: str) -> None:
    put("tiny.gguf")
    assert find_model(name) == Path(name).expanduser()


def test_an_existing_file_takes_precedence(tmp_path: Path) -> None:
    [path] = put("tiny.gguf")
    (tmp_path / "tiny").mkdir()
    assert find_model("tiny") == path
    (tmp_path / "tin").write_bytes(b"GGUF")
    assert find_model("tin") == Path("tin")
    assert find_model("tiny.gguf") == path
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    assert find_model("tiny.gguf") == Path("tiny.gguf")


def test_the_start_of_a_name_finds_a_packaged_model() -> None:
    with pytest.raises(ModelError, match="model gemma3-270m is not here yet: run"):
        find_model("gemma3")
    [other] = put("gemma3-big.gguf")
    assert find_model("gemma3") == other
    [gemma] = put(GEMMA.file)
    assert find_model("gemma3-2") == find_model("gemma-3") == gemma
    [demo] = put(DEMO.file)
    assert find_model("smollm2") == find_model("dem") == demo


def test_a_model_in_several_files_has_one_name() -> None:
    names = [f"big-Q8_0-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    first, *_ = put(*names, ".hidden.gguf")
    [*_, listed] = list_models()
    assert (listed.name, listed.path, listed.bytes) == ("big-Q8_0", first, 12)
    assert find_model("big") == find_model("big-Q8_0-00001-of-00003") == first
    with pytest.raises(ModelError, match="no model hidden"):
        find_model("hidden")


@pytest.mark.parametrize(
    "file",
    ["Tiny-Q8_0.GGUF", "Tiny-Q8_0.gguf-00001-of-00002.gguf", "Tiny-Q8_0-00001-of-00002.GGUF"],
)
def test_the_file_extension_is_case_insensitive(file: str) -> None:
    [path] = put(file)
    [*_, listed] = list_models()
    assert (listed.name, listed.path) == ("Tiny-Q8_0", path)
    for name in ("Tiny-Q8_0", "tiny", "Tiny-Q8_0.gguf", "tiny-q8_0.GGUF", file):
        assert find_model(name) == path
    assert find_model("tin.GGUF") == Path("tin.GGUF")


@pytest.mark.parametrize("command", ["generate -p x", "serve --port 0", "bench", "models check"])
def test_commands_accept_names(command: str) -> None:
    """The error shows the path of the name."""
    [path] = put("broken-model.gguf")
    option = [] if command == "models check" else ["-m"]
    output = run(*command.split(), *option, "broken", stdin="x\n")
    assert output.code == 1
    assert str(path) in output.notes


def test_file_names_need_not_be_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    files = model, _ = write_models(folder)
    with tiny_seer(files, n_ctx=256, hh=20, recent=20, slack=8) as llm:
        assert mark_of(llm, png(1))
        talk = Conversation(llm)
        list(talk.say("Hello", max_tokens=200))
        talk.save(folder / "talk.h2o")
        assert Conversation.load(folder / "talk.h2o", llm).turns == talk.turns
    assert describe_model(model).n_layer
    assert read_header(model).n_head
    assert readable_name(model.parent.name) == "\ufffd"
