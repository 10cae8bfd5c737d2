"""`pyh2o doctor`: what this machine has, what is used of it, and what is wrong."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.style import Style

from pyh2o.models import list_models, models_folder
from pyh2o.sessions.saved import chats_folder, saved_chats
from pyh2o.system.folders import Folder, look_at_folder
from pyh2o.system.home import expanded
from pyh2o.system.problems import problems_of
from pyh2o.system.report import Configuration, make_report

from .defaults import config_path, default_map, read_sections, variables_set
from .doctor_text import report_text
from .errors import EXIT_ERROR, InputError, one_line, reported_errors
from .terminal.entries import entry
from .terminal.terminal import paint, terminal
from .text_files import new_file, write_file

STDOUT = Path("-")


def doctor(
    context: typer.Context,
    json: Annotated[
        Path | None,
        typer.Option(
            help="New file for the same, for programs; - is standard output, without the text."
        ),
    ] = None,
) -> None:
    """Say what this machine has, what pyh2o uses of it, and what is wrong: for the report of a bug.

    Your home folder is shown as ~; keys, and the names of conversations, are not shown. The exit
    code is 1 if there are problems, each with what to do about it.
    """
    with reported_errors():
        target = None if json in (None, STDOUT) else new_file("--json", json)
        report = make_report([_models(), _sessions()], _configuration(context.find_root().command))
        problems = problems_of(report)
        record = dumps({**report.record(), "problems": problems}, indent=2, ensure_ascii=False)
        if json == STDOUT:
            terminal.write(f"{without_home(record)}\n")
        else:
            terminal.write(without_home(report_text(report)))
            if not problems:
                terminal.write("".join(entry("problems", ["none found"])))
            for problem in problems:
                line = f"  problem       {without_home(problem)}"
                terminal.write(f"{paint(line, Style(color='yellow'))}\n")
        if target is not None:
            write_file(target, f"{without_home(record)}\n".encode())
    if problems:
        raise typer.Exit(EXIT_ERROR)


def _models() -> Folder:
    fetched = []
    with suppress(OSError):  # what cannot be read cannot be written to, which is a problem
        fetched = [model for model in list_models() if model.fetched]
    return look_at_folder(
        "models",
        models_folder(),
        "PYH2O_MODELS",
        sizes=[model.bytes for model in fetched],
        names=[model.name for model in fetched],
    )


def _sessions() -> Folder:
    saved = []
    with suppress(OSError):
        saved = [chat.path.stat().st_size + chat.archive_bytes for chat in saved_chats()]
    # What people call their conversations is not for others.
    return look_at_folder(
        "sessions",
        chats_folder(),
        "PYH2O_CHATS",
        sizes=saved,
    )


def _configuration(program: Any) -> Configuration:
    path, wrong = config_path(), None
    try:
        default_map(program, read_sections(path))
    except (InputError, OSError) as error:
        wrong = one_line(error)
    return Configuration(str(path), os.path.lexists(path), wrong, variables_set())


def without_home(text: str) -> str:
    """The text with ~ for the user's home folder, whose path has the user's name."""
    home = expanded("~")
    for path in {str(home), str(home.resolve())} - {"/"}:
        shown = r"\s+".join(map(re.escape, path.split(" ")))  # also where a line ends amid it
        text = re.sub(rf"(?<![\w.~-]){shown}(?![\w.-])", "~", text)
    return text
