"""`pyh2o models check`: what it prints, its file and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_fakes import Output, run
from tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.usefixtures("surroundings")


def tiny(tmp_path: Path, arch_variant: str, n_layer: int = 3) -> Path:
    path = tmp_path / "tiny.gguf"
    return write_tiny_gguf(path, seed=1, arch_variant=arch_variant, n_layer=n_layer)


def test_model_that_can_be_evicted(tmp_path: Path) -> None:
    path = tiny(tmp_path, "gemma3n", n_layer=22)
    assert run("models", "check", str(path), "--recall", "0") == Output(
        0,
        f"{path}\n"
        """\
  eviction      yes: each KV head keeps 818 rows (409 heavy + 409 recent)
  architecture  gemma3n, 22 layers, 2 KV heads of 32 (K) and 32 (V)
  layers        10 seeing a window of 64 tokens
                10 growing with the text
                2 using the rows of another layer
  positions     rotary; trained on 4,096 tokens, and a text can be longer
  memory        for a window of 4,096 tokens, rows of f16
                full cache: 20.0 MiB (4,096 cells; growing 10.0 + window 10.0)
                with eviction: 3.8 MiB (1,024 cells; growing 2.5 + window 1.2 + scores 0.1)
""",
        "",
    )


def test_recurrent_layers_and_settings(tmp_path: Path) -> None:
    path = tiny(tmp_path, "falcon-h1", n_layer=4)
    options = "--ctx 2048 --hh 100 --recent 50 --pinned 4 --recall 40 --slack 300"
    options += " --kv-type q8_0"
    output = run("models", "check", str(path), *options.split())
    for line in (
        "yes: each KV head keeps 114 rows (4 pinned + 60 heavy + 50 recent), and each token "
        "retrieves 40 more\n",
        "4 keeping a recurrent state\n",
        "with eviction: 0.3 MiB (512 cells; growing 0.3 + recurrent 0.0 + scores 0.0)\n",
    ):
        assert line in output.text


def test_model_that_is_refused(tmp_path: Path) -> None:
    output = run("models", "check", str(tiny(tmp_path, "alibi")))
    assert output.code == 1
    assert (
        "  eviction      no: ALiBi is not supported: its bias depends on the position of the cell"
        in output.text
    )
    assert "with eviction" not in output.text


@pytest.mark.parametrize(
    ("window", "positions"),
    [
        (1024, ", of which this window uses 1,024 (LongRoPE), and a text can be longer\n"),
        (1025, ", and a text can be longer\n"),
    ],
)
def test_positions_of_longrope(tmp_path: Path, window: int, positions: str) -> None:
    path = tiny(tmp_path, "longrope")
    output = run("models", "check", str(path), "--ctx", str(window))
    assert output.code == 0
    assert f"  positions     rotary; trained on 4,096 tokens{positions}" in output.text


def test_model_whose_memory_is_not_known(tmp_path: Path) -> None:
    output = run("models", "check", str(tiny(tmp_path, "encoder")))
    assert output.code == 1
    assert output.text.endswith(
        "  architecture  bert, 3 layers\n"
        "  layers        unknown kinds of memory\n"
        "  positions     learned; trained on 4,096 tokens\n"
    )


def test_check_writes_json(tmp_path: Path) -> None:
    path, file = tiny(tmp_path, "sliding_window", n_layer=2), tmp_path / "found.json"
    assert run("models", "check", str(path), "--json", str(file)).code == 0
    record = json.loads(file.read_text())
    assert record["path"] == str(path)
    assert record["refused"] is None
    assert [layer["window"] for layer in record["layers"]] == [64, None]
    again = run("models", "check", str(path), "--json", str(file))
    assert (again.code, again.text) == (1, "")
    assert "found.json exists" in again.notes


def test_what_fits_on_a_card(tmp_path: Path) -> None:
    path, file = tiny(tmp_path, "sliding_window", n_layer=2), tmp_path / "found.json"
    options = ("--vram", "1.006", "--hh", "0.02", "--recent", "0.02", "--json", str(file))
    output = run("models", "check", str(path), *options)
    card = output.text.partition("  card          ")[2]
    assert output.code == 0
    assert card.startswith(
        "1.0 GiB on a card of 1.006 GB, 1.0 of it for compute buffers, 0.0 for weights; "
        "GiB for a text of\n"
        "                32,768 tokens: full cache 0.0 (too large), in q8_0 0.0 (fits), "
        "ours 0.0 (fits), archive 0.0 in main memory\n"
        "                131,072 tokens: the budget of 4986 rows"
    )
    record = json.loads(file.read_text())["card"]
    assert record["file_bytes"] == path.stat().st_size
    options = ("--vram", "8", "--ctx", "20000", "--recall-mib", "1")
    limited = run("models", "check", str(path), *options)
    assert ", archive 0.0 in main memory, of which --recall-mib keeps 0.0\n" in limited.text
    assert [text["n_tokens"] for text in record["texts"]] == [32_768]


def test_a_card_and_a_model_that_is_refused(tmp_path: Path) -> None:
    output = run("models", "check", str(tiny(tmp_path, "alibi")), "--vram", "8", "--ctx", "4000")
    assert output.code == 1
    assert output.text.endswith("4,000 tokens: full cache 0.0 (fits), in q8_0 0.0 (fits)\n")


def test_check_of_a_file_that_is_no_model(tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    assert run("models", "check", str(text)) == Output(
        1, "", f"error: {text} is not a GGUF file: convert the model to GGUF first\n"
    )
    assert run("models", "check").notes.startswith("error: the demo model is not here yet")
    output = run("models", "check", str(tiny(tmp_path, "llama")), "--ctx", "8")
    assert (output.code, output.text) == (1, "")
    assert "a window of 8 tokens is too small" in output.notes
