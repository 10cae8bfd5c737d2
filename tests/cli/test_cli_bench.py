"""`pyh2o bench`: tables and refusals, with real processes on a tiny model."""

from __future__ import annotations

import os
import re
import signal

import pytest

from cli_fakes import PATIENCE, run, run_program, start_program
from measured import rows_of
from pyh2o.bench import turns
from pyh2o.bench.process import Worker
from pyh2o.cli import bench
from tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.usefixtures("surroundings")

TRAINED = 512
SMALL = ["--rounds", "3", "-n", "4", "--threads", "1", "--recall", "0"]
CACHES = ["full", "full, flash attention", "pyh2o"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(write_tiny_gguf(path, seed=3, n_ctx_train=TRAINED))


@pytest.mark.real
def test_whole_run(model: str) -> None:
    """The program as a process."""
    output = run_program("bench", "--model", model, "--history", "300,0", "--hh", "40", *SMALL)
    assert output.code == 0, output.notes
    assert f"window {TRAINED}, 3 rounds of 4 tokens" in output.text
    assert output.text.index("**After 0 tokens") < output.text.index("**After 300 tokens")
    rows = rows_of(output.text)
    assert [row[0] for row in rows] == 2 * CACHES
    # without a text there is no speed of reading
    assert [len(row) for row in rows] == 3 * [6] + 3 * [7]
    sizes = [float(row[1].removesuffix(" MiB")) for row in rows]
    assert sizes[2] < sizes[1] == sizes[0]
    assert re.match(r"this takes about \d+ (second|minute)s?\n", output.notes)
    last = output.text.splitlines()[-1]
    figures = dict(zip(CACHES, rows[3:], strict=True))
    speed, size = figures["pyh2o"][5].split()[0], figures["pyh2o"][1]
    assert last.startswith(f"After 300 tokens, pyh2o generates {speed} tokens/s with {size} of KV")
    assert last.endswith(f"times the speed of llama.cpp's full cache, which takes {sizes[0]} MiB.")


def test_cache_is_that_of_the_options(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {}

    class Known(Worker):
        def __init__(self, cache: turns.Cache, *rest: object) -> None:
            made[cache.name] = cache.settings
            super().__init__(cache, *rest)

    monkeypatch.setattr(turns, "Worker", Known)
    arguments = ["--history", "300", *SMALL, "--recall", "16", "--policy", "snap", "--ctx", "256"]
    output = run("bench", "-m", model, *arguments)
    assert output.code == 0, output.notes
    ours = made["pyh2o"]
    assert (ours["n_ctx"], ours["recall"], str(ours["policy"])) == (256, 16, "snap")
    # the text is longer than the window
    assert made["full"]["n_ctx"] == 512
    assert "| archive |" in output.text
    output = run("bench", "-m", model, "--history", "5", *SMALL, "--no-evict")
    assert [row[0] for row in rows_of(output.text)] == CACHES[:2]
    assert re.search(r"\n\nAfter 5 tokens, full[^|]* MiB of KV memory\.\n$", output.text)


def test_cache_that_dies_is_left_out(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(Worker):
        def ask(self, action: turns.Action, n: int = 0) -> turns.Done:
            if self.ready.use.cells < TRAINED:
                os.kill(self.pid, signal.SIGKILL)
            return super().ask(action, n)

    monkeypatch.setattr(turns, "Worker", Dying)
    output = run("bench", "-m", model, "--history", "0,30", *SMALL, "--hh", "40")
    assert output.code == 0
    assert [row[0] for row in rows_of(output.text)] == 2 * CACHES[:2]
    assert "pyh2o: its process was ended by signal 9 (out of memory?)\n" in output.notes


@pytest.mark.real
def test_ctrl_c_keeps_what_was_measured(model: str) -> None:
    program = start_program(
        *("bench", "-m", model, "--ctx", "4096", "--history", "0,100000", "--rounds", "1"),
        *("-n", "2", "--threads", "1", "--hh", "64", "--recent", "64"),
    )
    try:
        assert program.stdout is not None
        shown = b""
        while b"| pyh2o |" not in shown:
            shown += program.stdout.readline()
        program.send_signal(signal.SIGINT)
        _, notes = program.communicate(timeout=PATIENCE)
    finally:
        program.kill()
    assert program.returncode == 130, notes.decode()
    assert b"stopped by Ctrl-C" in notes


REFUSALS = [
    (["--history", "1,x"], "--history '1,x' is not a list of counts"),
    (["--history", "4,9"], "--history 4,9: give counts of 0 or more, at least 12 "),
    (["--history", "-1"], "--history -1: give counts of 0 or more"),
    (["--hh", "600"], "the budget of "),
    (["--model", "none.gguf"], "there is no model file none.gguf"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS)
def test_refusals(model: str, arguments: list[str], message: str) -> None:
    output = run("bench", "-m", model, *SMALL, *arguments)
    assert output.code == 1
    assert output.notes.startswith(f"error: {message}")
    assert (output.notes.count("\n"), output.text) == (1, "")


def test_model_that_cannot_evict() -> None:
    write_tiny_gguf("alibi.gguf", seed=1, arch_variant="alibi", n_ctx_train=TRAINED)
    output = run("bench", "-m", "alibi.gguf", "--history", "5", *SMALL)
    assert output.code == 1
    assert output.notes.endswith(": give another --model, or --no-evict\n")


def test_too_little_memory(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "available_bytes", lambda: 2**20)
    output = run("bench", "-m", model, *SMALL)
    assert output.code == 1
    assert "MiB, but only 1.0 MiB are available: lower --ctx" in output.notes


def test_default_histories_fit_the_window() -> None:
    assert bench.parse_histories(None, 131072, 160) == [0, 4096, 8192]
    assert bench.parse_histories(None, 2048, 160) == [0, 1024, 2048]
    assert bench.parse_histories(None, 256, 160) == [0, 256]
