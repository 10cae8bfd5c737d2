"""`pyh2o bench`: tables, files and refusals, with real processes on a tiny model."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from cli_fakes import (
    PATIENCE,
    Screen,
    press_ctrl_c,
    run,
    run_program,
    start_program,
    wait_until,
)
from needed import needed
from research.eval import pictures
from research.eval.output import MeasuringBars
from research.speed import (
    bandwidth,
    comparison,
    openvino_worker,
    process,
    transformers_worker,
)
from research.speed.messages import Start
from research.speed.process import WorkerProcess
from tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.usefixtures("surroundings")

TRAINED = 512
SMALL = ["--budget", "0.2", "--kv-type", "f16", "--rounds", "3", "-n", "4", "--threads", "1"]
CACHES = ["full", "full, flash attention", "20 %", "sinks + window, 20 %"]
AT_EQUAL_CELLS = ["full at 102 rows", "full at 102 rows, flash attention"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(write_tiny_gguf(path, seed=3, n_ctx_train=TRAINED))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of this machine is not read."""
    monkeypatch.setattr(bandwidth, "bytes_per_second", lambda threads: 10e9)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> dict[str, WorkerProcess]:
    """The workers that a run starts, by the name of their cache."""
    started: dict[str, WorkerProcess] = {}

    class Known(process.WorkerProcess):
        def __init__(self, start: Start) -> None:
            super().__init__(start)
            started[start.cache.name] = self

    monkeypatch.setattr(comparison, "WorkerProcess", Known)
    return started


def on_turns(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Call `action(number of the turn)` after each turn, from 1."""
    seen: list[str] = []
    original = MeasuringBars.advance

    def advance(self: Any, cache: str, amount: int) -> None:
        original(self, cache, amount)
        seen.append(cache)
        action(len(seen))

    monkeypatch.setattr(MeasuringBars, "advance", advance)


def files_here() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def tables(text: str) -> dict[int, dict[str, list[str]]]:
    """The cells of each row by history and cache."""
    found: dict[int, dict[str, list[str]]] = {}
    for part in text.split("**After ")[1:]:
        history = int(part.split(" ")[0].replace(",", ""))
        lines = [line for line in part.splitlines() if line.startswith("| ")][1:]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        found[history] = {row[0]: row[1:] for row in cells}
    return found


# -------------------------------------------------------------------------------------------------
# A whole run
# -------------------------------------------------------------------------------------------------


def test_whole_run(model: str, tmp_path: Path) -> None:
    """The program as a process: its tables, JSON and CSV tell the same, and it adds up."""
    output = run_program(
        *("bench", "--model", model, "--history", "300,0", *SMALL),
        *("--json", "b.json", "--csv", "b.csv"),
    )
    assert output.code == 0, output.notes
    data = json.loads(Path("b.json").read_text())
    assert data["complete"]
    assert data["failures"] == {}
    assert str(tmp_path) not in Path("b.json").read_text()
    assert data["machine"]["model"] == "tiny.gguf"
    assert (data["settings"]["histories"], data["settings"]["window"]) == ([0, 300], TRAINED)

    shown = tables(output.text)
    assert {history: list(rows) for history, rows in shown.items()} == {
        0: CACHES,
        300: CACHES + AT_EQUAL_CELLS,
    }
    table = csv.DictReader(Path("b.csv").read_text().splitlines())
    lines = {(int(line["history"]), line["cache"]): line for line in table}
    assert len(lines) == sum(map(len, shown.values()))
    for result in data["histories"]:
        history, all_figures = result["history"], result["figures"]
        stock = max(all_figures[:2], key=lambda one: one["generated_per_second"]["median"])
        for figures in all_figures:
            check_figures(figures, stock, data["basis"], history)
            line = lines[history, figures["cache"]]
            speed = figures["generated_per_second"]
            assert float(line["generated_per_second"]) == speed["median"]
            assert int(line["kv_bytes"]) == figures["kv_bytes"]
            cells = shown[history][figures["cache"]]
            assert cells[0] == f"{figures['kv_bytes'] / 2**20:.1f} MiB"
            # behind memory, archive, what is found, the speed of reading and the first token
            assert cells[7].startswith(f"{speed['median']:.1f} (")
            assert cells[8].startswith(f"{figures['ratio']['median']:.2f} (")

    by_name = {figures["cache"]: figures for figures in data["histories"][1]["figures"]}
    assert by_name["20 %"]["kv_bytes"] < by_name["full"]["kv_bytes"]
    for name in ("full", "full, flash attention"):
        assert by_name[name]["share_of_full"] == 1.0  # 512 cells, and a window of 512
    assert by_name["full at 102 rows"]["position"] == 102


def check_figures(
    figures: dict[str, Any], stock: dict[str, Any], basis: dict[str, Any], history: int
) -> None:
    """What is told of a cache follows from its rounds."""
    rounds = figures["rounds"]
    assert [one["tokens"] for one in rounds] == [4, 4, 4]
    speeds = [one["tokens"] / one["seconds"] for one in rounds]
    told = figures["generated_per_second"]
    assert (told["median"], told["low"], told["high"]) == (median(speeds), min(speeds), max(speeds))
    ratios = [
        own["tokens"] / own["seconds"] * other["seconds"] / other["tokens"]
        for own, other in zip(rounds, stock["rounds"], strict=True)
    ]
    assert figures["ratio"]["median"] == pytest.approx(median(ratios))
    assert figures["ratio"]["low"] == pytest.approx(min(ratios))
    assert figures["share_of_full"] == figures["kv_bytes"] / basis["full_bytes"]
    assert figures["peak_bytes"] > figures["kv_bytes"]
    assert (figures["read_per_second"] is None) == (history == 0)
    assert figures["roofline_per_second"] == pytest.approx(
        basis["bytes_per_second"] / figures["bytes_per_token"]
    )
    assert basis["weight_bytes"] < figures["bytes_per_token"]
    assert figures["compactions"] == sum(one["compactions"] for one in rounds)


def test_caches_that_recall(model: str, quick: None) -> None:
    """With their archive and what it brings, beside one with as many rows that has none."""
    arguments = ["--history", "0,300", *SMALL, "--recall", "0,32", "--json", "b.json"]
    output = run("bench", "-m", model, *arguments)
    assert output.code == 0, output.notes
    data = json.loads(Path("b.json").read_text())
    assert data["settings"]["recalls"] == [0, 32]
    for result in data["histories"]:
        figures = {one["cache"]: one for one in result["figures"]}
        assert list(figures)[2:4] == ["20 %, no recall", "20 %, recall 32 rows"]
        finding = figures["20 %, recall 32 rows"]
        if result["history"] == 0:
            assert finding["found_share"] == 0
            continue
        assert 0 < finding["found_share"] < 1
        cells = tables(output.text)[300]["20 %, recall 32 rows"]
        assert cells[3] == f"{finding['archive_bytes'] / 2**20:.1f} MiB"
        assert cells[4] == f"{finding['found_share']:.1%}"
        assert tables(output.text)[300]["20 %, no recall"][3:5] == ["", ""]


def test_picture_and_text_of_ones_own(model: str, quick: None) -> None:
    needed("matplotlib")
    Path("my.txt").write_text("A short text of my own.")
    arguments = ["--history", "20", *SMALL, "--text", "my.txt", "--plot", "b.svg"]
    assert run("bench", "-m", model, *arguments).code == 0
    picture = Path("b.svg").read_text()
    assert all(picture.count(f"<!-- {name} -->") == 2 for name in CACHES)
    assert files_here() == ["b.svg", "my.txt"]


def test_short_history_compares_caches_for_the_same_window(model: str, quick: None) -> None:
    output = run("bench", "-m", model, "--history", "5", *SMALL, "--json", "b.json")
    assert output.code == 0
    assert "window 512, which every full cache has room for, however short the text" in output.text
    data = json.loads(Path("b.json").read_text())
    shares = {one["cache"]: one["share_of_full"] for one in data["histories"][0]["figures"]}
    assert shares["full"] == 1.0
    assert shares["20 %"] < 0.6 > shares["sinks + window, 20 %"]


@pytest.mark.real
def test_table_on_a_terminal(model: str) -> None:
    screen = Screen("bench", "-m", model, "--history", "5", *SMALL)
    screen.wait_for("After 5 tokens of text")
    assert screen.end() == 0
    assert "sinks + window" in screen.shown
    assert "|--" not in screen.shown


# -------------------------------------------------------------------------------------------------
# What goes wrong
# -------------------------------------------------------------------------------------------------


def test_worker_that_dies_leaves_its_cells_empty(
    model: str,
    quick: None,
    workers: dict[str, WorkerProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kill_one(turn: int) -> None:
        if turn == 2:
            os.kill(workers["20 %"].pid, signal.SIGKILL)

    on_turns(monkeypatch, kill_one)
    output = run("bench", "-m", model, "--history", "0,30", *SMALL, "--json", "b.json")
    reason = "its process was ended by signal 9 (too little memory?)"
    assert output.code == 0
    for rows in tables(output.text).values():
        assert list(rows) == CACHES
        for name, cells in rows.items():
            assert any(cells) == (name != "20 %")
    assert output.text.count(f"\n20 %: {reason}\n") == 2
    assert "1 cache could not be measured" in output.notes
    assert json.loads(Path("b.json").read_text())["failures"] == {"20 %": reason}


def test_model_that_cannot_evict_shows_the_full_caches(quick: None) -> None:
    write_tiny_gguf("alibi.gguf", seed=1, arch_variant="alibi", n_ctx_train=TRAINED)
    output = run("bench", "-m", "alibi.gguf", "--history", "5", *SMALL)
    assert output.code == 0
    rows = tables(output.text)[5]
    assert [name for name in CACHES if any(rows[name])] == CACHES[:2]
    assert output.text.count("eviction cannot be used with this model") == 2


@pytest.mark.parametrize(
    ("variant", "size"), [("sliding_window", r"0\.1 to 0\.2 MiB"), ("lfm2", r"0\.\d MiB")]
)
def test_what_does_not_grow_is_told_apart(quick: None, variant: str, size: str) -> None:
    """A window has room for a batch, too, which is smaller where rows are evicted."""
    write_tiny_gguf("tiny.gguf", seed=1, arch_variant=variant, n_ctx_train=TRAINED)
    output = run("bench", "-m", "tiny.gguf", "--history", "5", *SMALL)
    assert output.code == 0, output.notes
    rows = tables(output.text)[5]
    assert all(any(rows[name]) for name in CACHES)
    assert re.search(f"windows and recurrent states take {size} beside it", output.text)


def test_model_without_rows_is_refused(quick: None) -> None:
    write_tiny_gguf("tiny.gguf", seed=1, arch_variant="recurrent", n_ctx_train=TRAINED)
    output = run("bench", "-m", "tiny.gguf", "--history", "5", *SMALL)
    assert (output.code, output.text) == (1, "")
    assert output.notes.startswith("error: no layer of this model has keys and values of the whole")


def test_model_that_cannot_be_loaded(quick: None) -> None:
    path = write_tiny_gguf("tiny.gguf", seed=1, n_ctx_train=TRAINED)
    path.write_bytes(path.read_bytes()[:-1000])
    output = run("bench", "-m", "tiny.gguf", "--history", "5", *SMALL)
    assert (output.code, output.text) == (1, "")
    assert output.notes.startswith("error: ")
    assert "tiny.gguf is damaged: it has " in output.notes
    assert output.notes.count("\n") == 1


def test_nothing_is_left_to_measure(
    model: str,
    quick: None,
    workers: dict[str, WorkerProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kill_all(turn: int) -> None:
        if turn == 1:
            for worker in workers.values():
                os.kill(worker.pid, signal.SIGKILL)

    on_turns(monkeypatch, kill_all)
    output = run("bench", "-m", model, "--history", "5", *SMALL)
    assert output.code == 1
    last = output.notes.splitlines()[-1]
    assert last.startswith("error: no cache is left to measure; ")
    assert "its process was ended by signal 9" in last


def test_ctrl_c_shows_and_keeps_what_was_measured(
    model: str, quick: None, monkeypatch: pytest.MonkeyPatch, workers: dict[str, WorkerProcess]
) -> None:
    def press(turn: int) -> None:
        # In the second round after 30 tokens: 12 turns at 0 tokens, then 12 of reading
        if turn == 12 + 12 + 6:
            press_ctrl_c()

    on_turns(monkeypatch, press)
    arguments = ["--history", "0,30,60", *SMALL, "--json", "b.json", "--csv", "b.csv"]
    output = run("bench", "-m", model, *arguments)
    assert output.code == 130
    assert "stopped by Ctrl-C" in output.notes
    assert "**After 30 tokens of text, stopped after 1 of 3 rounds**" in output.text
    assert list(tables(output.text)) == [0, 30]
    data = json.loads(Path("b.json").read_text())
    assert not data["complete"]
    n_rounds = [[len(one["rounds"]) for one in h["figures"]] for h in data["histories"]]
    assert n_rounds == [[3] * 4, [1] * 4]
    assert len(Path("b.csv").read_text().splitlines()) == 1 + 8
    for worker in workers.values():
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)


@pytest.mark.real
def test_ctrl_c_during_a_long_turn_of_the_program(model: str) -> None:
    small = ["--budget", "64", "--kv-type", "f16", "--rounds", "1", "--threads", "1"]
    program = start_program(
        *("bench", "-m", model, "--ctx", "4096", "--history", "0,100000", "-n", "2"),
        *(*small, "--json", "b.json"),
    )
    try:
        wait_until(lambda: Path("b.json").exists() or program.poll() is not None)
        program.send_signal(signal.SIGINT)
        text, notes = program.communicate(timeout=PATIENCE)
    finally:
        program.kill()
    assert program.returncode == 130, notes.decode()
    assert list(tables(text.decode())) == [0]
    assert [one["history"] for one in json.loads(Path("b.json").read_text())["histories"]] == [0]


REFUSALS = [
    (["--history", "1,x"], "--history '1,x' is no list such as 0,4096,8192"),
    (["--history", "4,9"], "--history 4 and 9 are too close: 12 tokens (--rounds x -n) are"),
    (["--budget", "a"], "--budget 'a' is no list such as 0.2,512"),
    (["--budget", "0.2,0"], "--budget 0: give more than 0 rows"),
    (["--budget", "1.5"], "--budget 1.5 is more than the window of 512 tokens"),
    (["--recall", "-1"], "--recall -1: give 0 or more rows"),
    (["--recall", "a"], "--recall 'a' is no list such as 0,256"),
    (["--recall", "0.9"], "--recall 0.9 is 460 of the 102 rows of --budget 0.2, which leaves none"),
    (["--kv-type", "q3"], "there is no KV type 'q3': give one of f32, f16, q8_0, q4_0"),
    (["--text", "none.txt"], "there is no text file none.txt"),
    (["--text", "empty.txt"], "empty.txt is empty"),
    (["--json", "there.json"], "there.json exists: give another --json, or remove it"),
    (["--csv", "no/b.csv"], "there is no folder"),
    (["--csv", "b.x", "--json", "b.x"], "need a file each"),
    (["--plot", "b.pdf"], "--plot b.pdf: give a name that ends in .png or .svg"),
    (["--model", "none.gguf"], "there is no model file none.gguf"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS)
def test_refusals(model: str, arguments: list[str], message: str) -> None:
    Path("empty.txt").touch()
    Path("there.json").write_text("mine")
    output = run("bench", "-m", model, *SMALL, *arguments)
    assert output.code == 1
    assert output.notes.startswith(f"error: {message}") or message in output.notes
    assert output.notes.count("\n") == 1
    assert output.text == ""
    assert files_here() == ["empty.txt", "there.json"]
    assert Path("there.json").read_text() == "mine"


def test_missing_packages(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pictures, transformers_worker, openvino_worker):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    options = {
        "plot": ["--plot", "b.png"],
        "compare": ["--compare", "transformers"],
        "openvino": ["--compare", "openvino"],
    }
    for extra, arguments in options.items():
        output = run("bench", "-m", model, *arguments)
        assert output.code == 1
        assert output.notes.count("\n") == 1
        assert f"pip install 'pyh2o-llm[{extra}]'" in output.notes


def test_too_little_memory(model: str, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "available_bytes", lambda: 2**20)
    output = run("bench", "-m", model, *SMALL)
    assert output.code == 1
    said = r"^the caches take [\d.]+ MiB, and .*; 0\.00 GiB are available$"
    assert re.search(said, output.notes, re.MULTILINE)
    assert output.notes.splitlines()[-1].startswith("error: the caches need about 0.")
