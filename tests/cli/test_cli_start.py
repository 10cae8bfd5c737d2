"""`pyh2o` as it starts: Ctrl-C before it is there, streams that are closed, homes of nobody."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli_fakes import PATIENCE, program_environment, pyh2o_command, run
from tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.usefixtures("surroundings")

PRESS_CTRL_C = """
import os, signal, sys
from importlib.abc import MetaPathFinder

signal.signal(signal.SIGINT, signal.default_int_handler)

class Press(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Press())
from pyh2o.cli.__main__ import main
main()
"""


@pytest.mark.real
@pytest.mark.parametrize("module", ["numpy", "typer", "pyh2o.cli.app"])
def test_ctrl_c_while_the_program_loads(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PRESS_CTRL_C, module],
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def run_without(stream: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """The program with a stream closed, as by `>&-` in a shell."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {stream}>&-', "sh", *pyh2o_command(*arguments)],
        env=program_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.real
@pytest.mark.parametrize(
    ("closed", "arguments", "code", "shown"),
    [
        ("0", ["generate", "-f", "-"], 1, "error: the prompt is empty: "),
        ("0", ["chat", "-m", "none.gguf"], 1, "error: there is no model file none.gguf"),
        ("1", ["sessions", "path"], 1, "error: standard output: Bad file descriptor\n"),
        ("2", ["sessions", "path"], 0, "/chats\n"),
        ("2", ["generate", "-p", ""], 1, ""),
    ],
)
def test_stream_that_is_closed(closed: str, arguments: list[str], code: int, shown: str) -> None:
    """Text that nobody can get is an error."""
    done = run_without(closed, *arguments)
    text = (done.stdout + done.stderr).decode()
    assert (done.returncode, text.count("\n")) == (code, bool(shown))
    assert shown in text


@pytest.mark.real
def test_story_without_a_place_for_notes(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", seed=17)
    done = run_without("2", "generate", "-m", str(model), "-p", "Once", "-n", "5")
    assert done.returncode == 0
    assert done.stdout.startswith(b"Once")


NOBODY = "~nobody-here/x.txt"


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "-f", NOBODY],
        ["generate", "-p", "x", "-o", NOBODY],
        ["generate", "-p", "x", "-m", NOBODY],
        ["eval", "fidelity", "--text", NOBODY],
        ["bench", "--json", NOBODY],
        ["bench", "--csv", NOBODY],
    ],
)
def test_home_of_nobody(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    output = run(*arguments)
    assert (output.code, output.text) == (1, "")
    assert output.notes == (
        f"error: {NOBODY} begins with the home of a user that there is none of: put ./ before it "
        "if it is the name of a file\n"
    )


@pytest.mark.parametrize(
    ("variable", "arguments"),
    [("PYH2O_CHATS", ["sessions", "path"]), ("PYH2O_MODELS", ["models", "list"])],
)
def test_folder_in_the_home_of_nobody(
    variable: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, NOBODY)
    output = run(*arguments)
    assert output.code == 1
    assert output.notes.startswith(f"error: {NOBODY} begins with the home of a user ")
