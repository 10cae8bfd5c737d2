"""What shells offer while a command line is typed, and `-h`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli_fakes import PATIENCE, program_environment, run
from pyh2o.cli.app import app
from pyh2o.sessions.chats import open_chats

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture(autouse=True)
def saved(tmp_path: Path, surroundings: None) -> None:
    """Save the names of two models and two conversations."""
    (tmp_path / "models").mkdir()
    for name in ("Qwen3-4B-Q4_K_M", "big-00001-of-00002", "big-00002-of-00002"):
        (tmp_path / "models" / f"{name}.gguf").write_bytes(b"GGUF")
    with open_chats() as database:
        for name in ("sea", "sailor"):
            database.create("conversation", name)


def offered(monkeypatch: pytest.MonkeyPatch, line: str, shell: str = "zsh") -> str:
    """What the program prints for a shell, the cursor at the end of the line."""
    monkeypatch.setenv("_PYH2O_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    words = line.split(" ")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    return CliRunner().invoke(app, [], prog_name="pyh2o").stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pyh2o chat -m Q", ["Qwen3-4B-Q4_K_M"]),
        ("pyh2o chat --model ", ["Qwen3-4B-Q4_K_M", "big"]),
        ("pyh2o serve -m big -m Qw", ["Qwen3-4B-Q4_K_M"]),
        ("pyh2o bench --model b", ["big"]),
        ("pyh2o models check b", ["big"]),
        ("pyh2o models fetch ge", ["gemma3-270m"]),
        ("pyh2o chat --session s", ["sea", "sailor"]),
        ("pyh2o sessions remove sai", ["sailor"]),
        ("pyh2o sessi", ["sessions"]),
    ],
)
def test_models_sessions_and_commands_are_completed(
    monkeypatch: pytest.MonkeyPatch, line: str, expected: list[str]
) -> None:
    everything = {"Qwen3-4B-Q4_K_M", "big", "gemma3-270m", "sea", "sailor", "sessions"}
    for shell in ("bash", "zsh", "fish"):
        shown = offered(monkeypatch, line, shell)
        assert {name for name in everything if name in shown} == set(expected)


def test_options_that_the_help_leaves_out_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--recall-type" in offered(monkeypatch, "pyh2o chat --rec")


def test_names_with_spaces_are_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bash inserts completions unquoted: `sessions remove my trip` would name two sessions."""
    with open_chats() as database:
        database.create("conversation", "my trip")
    line = "pyh2o sessions remove m"
    assert offered(monkeypatch, line, "bash") == "my\\ trip\n"
    assert "my trip" in offered(monkeypatch, line, "zsh")
    assert offered(monkeypatch, 'pyh2o sessions remove "m', "bash") == "my trip\n"


def test_files_where_no_name_begins_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered(monkeypatch, "pyh2o chat -m folder/") == "_files\n"


def test_wrong_configuration_is_not_in_the_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYH2O_CONFIG", str(tmp_path / "none.toml"))
    assert "big" in offered(monkeypatch, "pyh2o chat -m b")


COMPLETE = """
import sys
from pyh2o.cli.app import main
try:
    main()
finally:
    print("llama_cpp" in sys.modules or "pyh2o._native" in sys.modules, file=sys.stderr)
"""


@pytest.mark.real
def test_completion_does_not_load_llama_cpp() -> None:
    asked = {"_PYH2O_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "pyh2o chat -m b"}
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE],
        env={**program_environment(), **asked},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert "big" in done.stdout
    assert done.stderr == "False\n"


@pytest.mark.parametrize("command", ["", "chat", "models", "models fetch"])
def test_short_option_for_help(command: str) -> None:
    short, long = (run(*command.split(), option) for option in ("-h", "--help"))
    assert (short.code, short.notes) == (0, "")
    assert short == long
