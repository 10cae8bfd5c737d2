"""`pyh2o eval`: tables, files, resuming and refusals, on tiny models."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
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
from pyh2o import Llama, llama
from pyh2o.cache.settings import DEFAULT_POLICY
from pyh2o.cli.errors import InputError
from pyh2o.system import devices
from research.eval import pictures
from research.eval.arguments import split_policies
from research.eval.output import MeasuringBars
from tiny_chat import CHATML, GEMMA, write_chat_gguf
from tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.usefixtures("surroundings")

TRAINED = 1024
COMMANDS = {
    "fidelity": ["--text", "a.txt", "--tokens", "400", "--budget", "100"],
    "recall": ["--task", "fwe", "--tokens", "700", "--samples", "1", "--budget", "100"],
    "dialogue": ["--tokens", "4090", "--budget", "200"],
    "instructions": [
        *("--turns", "1", "--samples", "1", "--budget", "1100", "--recent-share", "0.2"),
    ],
    "story": ["--tokens", "40", "--samples", "2", "--budget", "30"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(write_tiny_gguf(path, seed=3, n_ctx_train=TRAINED))


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "chat.gguf"
    return str(write_chat_gguf(path, CHATML, seed=4, n_ctx_train=4096))


@pytest.fixture(autouse=True)
def text(surroundings: None) -> None:
    sentences = [f"Sentence {i} speaks of {i * 7919 % 97} birds." for i in range(200)]
    Path("a.txt").write_text("\n\n".join(sentences))


def arguments(command: str, model: str, chat_model: str) -> list[str]:
    given = chat_model if command in ("dialogue", "instructions") else model
    return ["eval", command, "-m", given, "--threads", "1", *COMMANDS[command]]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables, without their headings."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] not in ("cache", "text and cache")]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key != "seconds"}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def files_here() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


# -------------------------------------------------------------------------------------------------
# Whole runs
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "layers"), [(["a GPU"], 7), ([], 0)], ids=["a GPU", "no GPU"])
def test_layers_on_the_gpu(
    model: str,
    chat_model: str,
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[str],
    layers: int,
) -> None:
    asked = []

    class Recording(Llama):
        def __init__(self, *args: Any, n_gpu_layers: int, **settings: Any) -> None:
            asked.append(n_gpu_layers)
            super().__init__(*args, **settings)

    monkeypatch.setattr(devices, "gpu_names", lambda: gpus)
    monkeypatch.setattr(llama, "Llama", Recording)
    given = arguments("fidelity", model, chat_model)
    output = run(*given, "--gpu-layers", "7", "--json", "b.json")
    assert output.code == 0, output.notes
    assert ("running on the CPU" in output.notes) == (not gpus)
    assert set(asked[1:]) == {layers}, "all but the one that only tells tokens"
    data = json.loads(Path("b.json").read_text())
    assert data["machine"]["gpus"] == (gpus if layers else [])
    assert data["basis"]["--gpu-layers"] == layers


@pytest.mark.parametrize("command", COMMANDS)
def test_whole_run_and_the_same_again(
    model: str, chat_model: str, tmp_path: Path, command: str
) -> None:
    given = arguments(command, model, chat_model)
    output = run(*given, "--json", "b.json")
    assert output.code == 0, output.notes
    data = json.loads(Path("b.json").read_text())
    assert data["complete"]
    assert data["kind"] == command
    assert str(tmp_path) not in Path("b.json").read_text()
    assert data["basis"]["--model"].startswith("chat.gguf (" if "chat" in given[3] else "tiny.gguf")
    shown = rows(output.text)
    assert [row[0] for row in shown][: len(data["summary"])] == [
        one["cache"] for one in data["summary"]
    ]
    caches = {unit["cache"] for unit in data["units"].values()}
    assert {name.split(",")[0] for name in caches} == {"full", DEFAULT_POLICY, "streaming"}
    for note in data["notes"]:
        assert note in output.text
    # nothing is left to measure, and the same is shown
    written = Path("b.json").stat().st_mtime_ns
    again = run(*given, "--json", "b.json")
    assert (again.code, again.text) == (0, output.text)
    assert json.loads(Path("b.json").read_text()) == data
    assert Path("b.json").stat().st_mtime_ns > written
    # and in another file there are the same numbers
    assert run(*given, "--json", "c.json").code == 0
    assert without_times(json.loads(Path("c.json").read_text())) == without_times(data)
    extra = ["b.npz", "c.npz"] if command == "fidelity" else []
    assert files_here() == sorted(["a.txt", "b.json", "c.json", *extra])


# Dialogues take a while, and have the picture of recall.
@pytest.mark.parametrize("command", [one for one in COMMANDS if one != "dialogue"])
def test_pictures(model: str, chat_model: str, command: str) -> None:
    needed("matplotlib")
    given = arguments(command, model, chat_model)
    assert run(*given, "--plot", "b.svg").code == 0
    picture = Path("b.svg").read_text()
    assert "<!-- full" in picture
    assert "<!-- h2o" in picture
    assert files_here() == ["a.txt", "b.svg"]


def test_fidelity_of_several_texts_and_what_its_options_change(model: str) -> None:
    Path("c.txt").write_text(Path("a.txt").read_text().replace("birds", "boats"))
    output = run(
        *("eval", "fidelity", "-m", model, "--threads", "1", "--text", "a.txt", "--text", "c.txt"),
        *(
            "--tokens",
            "300,400",
            "--budget",
            "0.3",
            "--policy",
            "h2o-mean",
            "--policy",
            "streaming",
        ),
        *("--positions", "original,dense", "--start", "5", "--from", "200", "--stretch", "150"),
        *("--recent-share", "0.25", "--pinned", "8", "--json", "b.json"),
    )
    assert output.code == 0, output.notes
    titles = [line for line in output.text.splitlines() if line.startswith("**")]
    assert titles == [
        f"**2 texts{rest}**"
        for tokens in (300, 400)
        for rest in (
            f", {tokens} tokens, over those from 200 on",
            f", {tokens} tokens, perplexity up to token",
            f" together, {tokens} tokens",
        )
    ]
    names = ["full", "h2o-mean, 30 %", "h2o-mean, 30 %, dense"]
    names += ["streaming, 30 %", "streaming, 30 %, dense"]
    of_texts = [f"{text}.txt, {name}" for text in "ac" for name in names]
    shown = [row[0] for row in rows(output.text)]
    assert shown == 2 * [*of_texts, *of_texts, *names]
    assert output.notes.count("the full cache's predictions take") == 2
    units = json.loads(Path("b.json").read_text())["units"]
    unit = next(one for one in units.values() if one["tokens"] == 400 and one["rows"])
    assert (unit["rows"], unit["pinned"], unit["recent"]) == (120, 8, 28)
    with np.load("b.npz") as arrays:
        assert {len(arrays[name]) for name in arrays.files} == {299, 399}


def test_lines_of_a_text_are_joined_or_kept(model: str) -> None:
    Path("a.txt").write_text("one\ntwo\n" * 100)
    given = ["eval", "fidelity", "-m", model, "--threads", "1", "--text", "a.txt"]
    given += ["--tokens", "300", "--budget", "100", "--policy", "h2o"]
    for name, more in (("joined", []), ("kept", ["--keep-lines"])):
        assert run(*given, *more, "--json", f"{name}.json").code == 0
    digests = [
        json.loads(Path(f"{name}.json").read_text())["settings"]["texts"][0]["sha256"]
        for name in ("joined", "kept")
    ]
    texts = (" ".join(["one two"] * 100), "one\ntwo\n" * 100)
    assert digests == [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def test_caches_that_recall(model: str, chat_model: str) -> None:
    for command in ("fidelity", "recall"):
        given = [*arguments(command, model, chat_model), "--policy", "h2o", "--recall", "0,64"]
        output = run(*given, "--json", f"{command}.json")
        assert output.code == 0, output.notes
        names = list(dict.fromkeys(row[0] for row in rows(output.text)))
        assert names == ["full", "h2o, 100 rows, no recall", "h2o, 100 rows, recall 64 rows"]
        summary = json.loads(Path(f"{command}.json").read_text())["summary"]
        losses = {one["cache"]: one["nll"] for one in summary}
        assert len(set(losses.values())) == 3


def test_later_runs_may_ask_for_more(model: str, chat_model: str) -> None:
    given = [*arguments("recall", model, chat_model), "--json", "b.json"]
    assert run(*given, "--policy", "h2o", "--question", "after").code == 0
    before = json.loads(Path("b.json").read_text())["units"]
    output = run(*given, "--policy", "h2o,tova", "--samples", "2", "--budget", "100,0.2")
    assert output.code == 0, output.notes
    data = json.loads(Path("b.json").read_text())
    assert len(before) == 2
    assert len(data["units"]) == 2 * (1 + 2 * 2 * 2)
    assert {name: data["units"][name] for name in before} == before
    assert data["settings"]["caches"]["policies"] == ["h2o", "tova"]


@pytest.mark.real
def test_program_and_its_table_on_a_terminal(model: str, chat_model: str) -> None:
    given = arguments("story", model, chat_model)
    output = run_program(*given)
    assert output.code == 0, output.notes
    screen = Screen(*given)
    screen.wait_for("2 stories of 40 tokens")
    assert screen.end() == 0
    assert "self-BLEU" in screen.shown
    assert "|--" not in screen.shown


@pytest.mark.real
def test_tables_at_80_columns(model: str, chat_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is longer, and of no figure anything is missing."""
    given = arguments("fidelity", model, chat_model)
    output = run(*given)
    monkeypatch.setenv("COLUMNS", "80")
    screen = Screen(*given)
    screen.wait_for(r"over those from 100 on")
    assert screen.end() == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", screen.shown).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in screen.shown
    shown = {name: [] for name, *_ in rows(output.text)}
    for line in lines:
        for name, cells in shown.items():
            if line.startswith(f" {name}  "):
                cells += re.split(r"\s{2,}", line.removeprefix(f" {name}").strip())
    expected = {name: [cell for cell in cells if cell] for name, *cells in rows(output.text)}
    assert {name: [cell for cell in cells if cell] for name, cells in shown.items()} == expected


# -------------------------------------------------------------------------------------------------
# What goes wrong
# -------------------------------------------------------------------------------------------------


def test_ctrl_c_shows_and_keeps_what_was_measured(
    model: str, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = MeasuringBars.advance

    def press(self: Any, label: str, amount: int) -> None:
        advance(self, label, amount)
        if "h2o" in label and self._done > 400:
            press_ctrl_c()

    given = [*arguments("fidelity", model, chat_model), "--json", "b.json"]
    monkeypatch.setattr(MeasuringBars, "advance", press)
    output = run(*given)
    assert output.code == 130
    assert "stopped by Ctrl-C" in output.notes
    assert {row[0] for row in rows(output.text)} == {"full"}
    data = json.loads(Path("b.json").read_text())
    assert not data["complete"]
    assert files_here() == ["a.txt", "b.json", "b.npz"]
    monkeypatch.setattr(MeasuringBars, "advance", advance)
    assert run(*given).code == 0
    assert json.loads(Path("b.json").read_text())["complete"]


@pytest.mark.real
def test_killed_program_leaves_no_large_file(model: str, chat_model: str) -> None:
    Path("long.txt").write_text("a b c d " * 5000)
    given = arguments("fidelity", model, chat_model)
    given += ["--text", "long.txt", "--tokens", "1000", "--json", "b.json", "--budget"]
    program = start_program(*given, ",".join(str(rows) for rows in range(20, 200)))
    try:
        wait_until(lambda: Path("b.npz").exists() or program.poll() is not None)
        program.send_signal(signal.SIGKILL)
        program.communicate(timeout=PATIENCE)
    finally:
        program.kill()
    assert program.returncode == -signal.SIGKILL
    left = [name for name in files_here() if not name.endswith(".tmp")]
    assert set(left) <= {"a.txt", "long.txt", "b.json", "b.npz"}
    assert sum(Path(name).stat().st_size for name in files_here()) < 1_000_000


REFUSALS = [
    ("fidelity", ["--tokens", "1,x"], "--tokens '1,x' is no list such as 4096,8192"),
    ("fidelity", ["--tokens", "90000"], "a.txt has "),
    ("fidelity", ["--from", "400"], "--tokens 400 with --from 400 leaves no token"),
    ("fidelity", ["--text", "none.txt"], "there is no text file none.txt"),
    ("fidelity", ["--text", "a.txt"], "two texts have the same name"),
    ("fidelity", ["--positions", "x"], "--positions 'x' is no list such as original,dense"),
    ("fidelity", ["--budget", "0"], "--budget 0: give more than 0 rows"),
    ("fidelity", ["--budget", "1.5"], "--budget 1.5 is more than the whole text"),
    ("fidelity", ["--budget", "2000"], "more positions than the 1024 the model was trained on"),
    ("recall", ["--budget", "2000"], "more positions than the 1024 the model was trained on"),
    ("story", ["--budget", "2000"], "more positions than the 1024 the model was trained on"),
    ("fidelity", ["--policy", "h3o"], "there is no policy 'h3o'"),
    ("fidelity", ["--policy", "h2o,"], "--policy 'h2o,' is no list such as h2o,streaming"),
    ("fidelity", ["--policy", "snap:q=1"], "snap has no parameter 'q'"),
    ("fidelity", ["--recent-share", "2"], "--recent-share 2: give more than 0"),
    ("fidelity", ["--json", "mine.json"], "mine.json exists and is no file of pyh2o eval"),
    ("fidelity", ["--json", "no/b.json"], "there is no folder"),
    ("fidelity", ["--plot", "b.pdf"], "--plot b.pdf: give a name that ends in .png or .svg"),
    ("fidelity", ["--plot", "mine.svg"], "mine.svg exists: give another --plot"),
    ("fidelity", ["--model", "none.gguf"], "there is no model file none.gguf"),
    ("fidelity", ["--recall", "-1"], "--recall -1: give 0 or more rows"),
    ("fidelity", ["--recall", "1.5"], "--recall 1.5 is more than the whole text"),
    ("fidelity", ["--recall", "100"], "--recall 100 is 100 of the 100 rows of --budget 100"),
    ("recall", ["--task", "qa_1"], "there is no task 'qa_1': give one of niah_single_1"),
    ("recall", ["--question", "x"], "--question 'x' is no list such as before,after"),
    ("recall", ["--tokens", "2000"], "--tokens 2000 is more than the 1024"),
    ("recall", ["--tokens", "100"], "--tokens 100 has no room for a sample of fwe"),
    ("dialogue", ["--tokens", "500"], "--tokens 500 has no room for a sample of dialogue"),
    ("dialogue", ["--text", "none.txt"], "there is no text file none.txt"),
    ("instructions", ["--budget", "100"], "the system prompt takes up to "),
    ("instructions", ["--turns", "99"], "--turns 99 may come to "),
    ("story", ["--temp", "inf"], "temperature is inf: give 0 for the likeliest token"),
]


@pytest.mark.parametrize(("command", "more", "message"), REFUSALS)
def test_refusals(model: str, chat_model: str, command: str, more: list[str], message: str) -> None:
    for name in ("mine.json", "mine.svg"):
        Path(name).write_text("mine")
    if "--plot" in more:
        needed("matplotlib")
    output = run(*arguments(command, model, chat_model), *more)
    assert output.code == 1
    assert output.notes.startswith("error: ")
    assert message in output.notes
    assert output.notes.count("\n") == 1
    assert output.text == ""
    assert files_here() == ["a.txt", "mine.json", "mine.svg"]
    assert Path("mine.json").read_text() == Path("mine.svg").read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "more", "message"),
    [
        ("fidelity", ["--start", "9"], "was measured with --start 0, and this run has 9"),
        ("fidelity", ["--pinned", "2"], "was measured with --pinned 0, and this run has 2"),
        ("recall", ["--seed", "5"], "was measured with --seed 0, and this run has 5"),
        ("recall", ["--text", "a.txt"], "was measured with --text , and this run has "),
        ("fidelity", ["--at-once", "1"], "was measured with --at-once 128, and this run has 1"),
        ("instructions", ["--turns", "2"], "was measured with --turns 1, and this run has 2"),
        ("story", ["--temp", "0.5"], "was measured with --temp 0.8, and this run has 0.5"),
        ("story", ["--prompt", "x"], "was measured with --prompt Once upon a time"),
    ],
)
def test_settings_that_do_not_fit_the_file(
    model: str, chat_model: str, command: str, more: list[str], message: str
) -> None:
    given = [*arguments(command, model, chat_model), "--policy", "h2o", "--json", "b.json"]
    assert run(*given).code == 0
    before = Path("b.json").read_bytes()
    output = run(*given, *more)
    assert (output.code, output.text) == (1, "")
    assert message in output.notes
    assert output.notes.count("\n") == 1
    assert Path("b.json").read_bytes() == before


def test_model_that_cannot_evict() -> None:
    write_tiny_gguf("alibi.gguf", seed=1, arch_variant="alibi", n_ctx_train=TRAINED)
    output = run(*arguments("fidelity", "alibi.gguf", ""))
    assert output.code == 1
    assert "eviction cannot be used with this model" in output.notes


def test_template_without_a_system_prompt(model: str) -> None:
    path = str(write_chat_gguf(Path("gemma.gguf"), GEMMA, n_ctx_train=4096))
    output = run(*arguments("instructions", model, path))
    assert (output.code, output.text) == (1, "")
    assert "chat template refuses a system prompt" in output.notes
    assert output.notes.count("\n") == 1


def test_missing_package(model: str, chat_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    output = run(*arguments("story", model, chat_model), "--plot", "b.png")
    assert output.code == 1
    assert output.notes.count("\n") == 1
    assert "pip install 'pyh2o-llm[plot]'" in output.notes


@pytest.mark.parametrize(
    ("given", "policies"),
    [
        (["h2o"], ["h2o"]),
        (["h2o, streaming", "tova"], ["h2o", "streaming", "tova"]),
        (["snap:queries=64,pool=5,h2o"], ["snap:queries=64,pool=5", "h2o"]),
        (["h2o,snap:pool=3,streaming:sinks=8"], ["h2o", "snap:pool=3", "streaming:sinks=8"]),
    ],
)
def test_lists_of_policies(given: list[str], policies: list[str]) -> None:
    assert split_policies(given) == policies


@pytest.mark.parametrize("given", ["", "h2o,,tova", ","])
def test_lists_that_are_none(given: str) -> None:
    with pytest.raises(InputError, match="is no list such as h2o,streaming"):
        split_policies([given])
