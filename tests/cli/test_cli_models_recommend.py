"""`pyh2o models recommend`: what it prints, and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_fakes import run
from pyh2o.core import recommended

pytestmark = pytest.mark.usefixtures("surroundings")


def with_memory(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(recommended, "discrete_gpus", list)
    monkeypatch.setattr(recommended, "available_bytes", lambda: n_bytes)
    monkeypatch.setattr(recommended, "_bandwidth", lambda: 34.9e9)


def test_one_is_marked_and_those_that_do_not_fit_come_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_memory(monkeypatch, 8 * 10**9)
    output = run("models", "recommend", "--json", "found.json")
    assert (output.code, output.notes) == (0, "")
    first, second, over, headings, *lines = output.text.splitlines()
    assert first == "7.5 GiB free of main memory, read at 34.9 GB/s, 1.0 of it for an archive"
    assert second == "GiB for a text of 32,768 tokens, with its archive in main memory:"
    assert over == "      full cache"
    assert headings.split() == ["file", "f16", "q8_0", "ours", "arch.", "t/s"]
    row = " 4.7  4.5  2.4  1.0   2.2  5.8  Qwen/Qwen3-8B-GGUF"
    assert [line for line in lines if line.startswith(">")] == [f"> {row}"]
    assert lines.index("too large:") == lines.index(f"> {row}") + 1
    assert lines[-1] == "the choice: pyh2o models fetch Qwen/Qwen3-8B-GGUF"
    record = json.loads((tmp_path / "found.json").read_text())
    assert (record["choice"], record["memory_bytes"]) == ("Qwen/Qwen3-8B-GGUF", 8 * 10**9)
    assert run("models", "recommend", "--json", "found.json").code == 1


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 10**9)
    output = run("models", "recommend")
    assert output.code == 0
    assert ">" not in output.text
    assert output.text.splitlines()[-1].startswith("none of these fits: `pyh2o models fetch`")


def test_what_fits_on_a_card(tmp_path: Path) -> None:
    output = run("models", "recommend", "--vram", "12", "--json", "found.json")
    assert (output.code, output.notes) == (0, "")
    first, second, over, headings, *lines = output.text.splitlines()
    assert first == "12.0 GiB free on a card of 12 GB, 1.0 of it for compute buffers"
    assert second.endswith("main memory; longest in k:")
    assert over.split() == ["full", "cache", "longest"]
    assert headings.split() == ["file", "f16", "q8_0", "ours", "arch.", "f16", "ours"]
    groups = [line for line in lines if line.endswith(":")]
    assert groups == [
        "fit with a full f16 cache:",
        "fit with a full q8_0 cache:",
        "fit with ours:",
        "too large:",
    ]
    ours = lines.index("fit with ours:")
    assert lines[ours + 1] == ">  8.4  5.0  2.7  1.1   2.4   16   76  Qwen/Qwen3-14B-GGUF"
    assert "  11.3  0.8  0.4  0.2   0.4    -    -  ggml-org/gpt-oss-20b-GGUF:MXFP4" in lines
    # the one name of more than 41 characters
    assert max(len(line) for line in lines if "Mistral-Small" not in line) <= 80
    record = json.loads((tmp_path / "found.json").read_text())
    assert (record["memory_bytes"], record["reserved_bytes"]) == (12 * 2**30, 2**30)
    (model,) = (model for model in record["models"] if model["name"] == record["choice"])
    assert (model["longest_full"], model["longest_evicting"]) == (16 * 1024, 76 * 1024)
    assert model["needed_bytes"] == (
        model["file_bytes"] + model["evicting_bytes"] + model["codes_bytes"] + 2**30
    )


@pytest.mark.parametrize("vram", ["0", "-8", "nan", "1e400", "many"])
def test_a_size_that_no_card_has(vram: str) -> None:
    for command in (("recommend",), ("check", "tiny.gguf")):
        output = run("models", *command, "--vram", vram)
        assert (output.code, output.text) == (2, "")
        assert f"{vram!r} is not a memory size: give GB, such as 16" in output.notes


def test_a_card_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 10**10)
    output = run("models", "recommend", "--vram", "auto")
    assert (output.code, output.text) == (2, "")
    assert "this machine has no GPU that pyh2o can use" in output.notes


def test_the_card_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        name = "NVIDIA GeForce RTX 4070"

        def free_bytes(self) -> int:
            return 11 * 2**30

    monkeypatch.setattr(recommended, "discrete_gpus", lambda: [Gpu()])
    outputs = [run("models", "recommend", *vram) for vram in ((), ("--vram", "auto"))]
    assert outputs[0] == outputs[1]
    assert outputs[0].text.startswith("11.0 GiB free on NVIDIA GeForce RTX 4070, 1.0 of it for ")
