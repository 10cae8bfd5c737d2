"""The `pyh2o` program: its commands and its entry point."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer

import pyh2o

from . import ask, batch, bench, doctor, models, rpc_server, serve, sessions
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
    help="Long dialogues and stories on small machines: llama.cpp with a KV cache of fixed size "
    "that keeps recent tokens and heavy hitters (H2O).",
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
for commands in (app, models.app, sessions.app):
    for command in commands.registered_commands:
        command.cls = Command


def show_version(wanted: bool) -> None:
    if wanted:
        with reported_errors():
            terminal.write(f"pyh2o {pyh2o.__version__}\n")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=show_version,
            is_eager=True,
            help="Show the version and exit; `pyh2o doctor` shows more about the build.",
        ),
    ] = False,
) -> None:
    """Options of the program; each command has its own."""


def main() -> None:
    open_missing_streams()
    replace_unprintable()
    warnings.showwarning = lambda message, *_, **__: terminal.say(str(message))
    try:
        app(prog_name="pyh2o")
    except OSError as error:  # while printing --help; commands report their own errors
        say_error(stdout_failed(error))
        sys.exit(EXIT_ERROR)
    finally:
        drop_unwritten_notes()
