"""The `pyh2o` program: its commands and its entry point."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, Any

import typer

import pyh2o

from . import ask, batch, bench, config, doctor, models, rpc_server, serve, sessions
from .chat.command import chat
from .config import DOCTOR, ProgramWithDefaults
from .errors import EXIT_ERROR, reported_errors, say_error
from .generate.command import generate
from .help import Command
from .terminal.terminal import (
    drop_unwritten_notes,
    open_missing_streams,
    replace_unprintable,
    stdout_failed,
    terminal,
)

app = typer.Typer(
    name="pyh2o",
    cls=ProgramWithDefaults,
    help="Long dialogues and long stories on a small machine: llama.cpp with a KV cache of fixed "
    "size that keeps the recent tokens and the heavy hitters (H2O).",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("chat")(chat)
app.command("ask")(ask.ask)
app.command("generate")(generate)
app.command("batch")(batch.batch)
app.command("serve")(serve.serve)
app.command("rpc-server")(rpc_server.rpc_server)
app.command("bench")(bench.bench)
app.command(DOCTOR)(doctor.doctor)
app.add_typer(models.app, name="models")
app.add_typer(sessions.app, name="sessions")
app.add_typer(config.app, name="config")
for commands in (app, models.app, sessions.app, config.app):
    for command in commands.registered_commands:
        command.cls = Command


def show_version(wanted: bool) -> None:
    """Print the version and what it was built from, as far as that is known, and leave."""
    if not wanted:
        return
    build: dict[str, Any] = pyh2o.build_info()
    parts = {
        "pyh2o": pyh2o.__version__,
        "llama.cpp": build.get("llama_cpp_commit"),
        "llama-cpp-python": build.get("llama_cpp_python"),
        "patches": build.get("patches"),
        "backends": ", ".join(build.get("backends", [])),
    }
    with reported_errors():
        terminal.write("".join(f"{name} {value}\n" for name, value in parts.items() if value))
    raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=show_version,
            is_eager=True,
            help="Show the version and the llama.cpp it was built from.",
        ),
    ] = False,
) -> None:
    """Options of the program itself; each command has its own."""


def main() -> None:
    """Entry point of the program."""
    open_missing_streams()
    replace_unprintable()
    warnings.showwarning = lambda message, *_, **__: terminal.say(str(message))
    try:
        app(prog_name="pyh2o")
    except OSError as error:  # of the text of --help: commands report their own
        say_error(stdout_failed(error))
        sys.exit(EXIT_ERROR)
    finally:
        drop_unwritten_notes()
