"""Write docs/reference/ from the code: every command, every public class, every tested behaviour.

The pages are committed, to be read without an installation. `make lint` fails if they are out of
date.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperArgument

import pyh2o
from pyh2o.cli.app import app
from pyh2o.system.files import replacement

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
GENERATED = "<!-- Written by scripts/generate_reference.py: edit the code, then `make format`. -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a committed page differs")
    args = parser.parse_args()

    pages = {
        "command-line.md": command_line_page(),
        "python.md": python_page(),
        "behaviours.md": behaviours_page(),
    }
    stale = [name for name, text in pages.items() if text_of(FOLDER / name) != text]
    if args.check and stale:
        print(f"docs/reference/{stale[0]} is out of date; run: make format", file=sys.stderr)
        return 1
    for name in stale:
        with replacement(FOLDER / name, prefix=".reference-") as file:
            file.write(pages[name].encode())
        print(f"wrote docs/reference/{name}")
    return 0


def text_of(page: Path) -> str:
    """Return the text of a committed page; "" if there is none."""
    return page.read_text("utf-8") if page.exists() else ""


def behaviours_page() -> str:
    """Return the page of all tests, whose names say what must hold."""
    lines = ["# Behaviours", "", GENERATED, "", "What the tests check, by their names."]
    for folder in sorted(path for path in (ROOT / "tests").iterdir() if path.is_dir()):
        texts = (file.read_text("utf-8") for file in sorted(folder.rglob("test_*.py")))
        names = [name for text in texts for name in re.findall(r"^ *def test_(\w+)", text, re.M)]
        if names:
            lines += ["", f"## {folder.name.capitalize()}", ""]
            lines += [f"- {name.replace('_', ' ').capitalize()}." for name in names]
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------------
# The command line
# -------------------------------------------------------------------------------------------------


def command_line_page() -> str:
    """Return the page of all commands, their arguments and options."""
    root = typer.main.get_command(app)
    lines = ["# Command line", "", GENERATED, "", plain(root.help or ""), ""]
    context = typer.Context(root, info_name="pyh2o")
    for path, command in commands(root, context, ("pyh2o",)):
        lines += command_lines(path, command)
    return "\n".join(lines).rstrip() + "\n"


def commands(
    command: Any, context: typer.Context, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all commands except groups, in the order of the help."""
    if not hasattr(command, "list_commands"):
        yield path, command
        return
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        if child is not None and not child.hidden:
            yield from commands(child, context, (*path, name))


def command_lines(path: tuple[str, ...], command: Any) -> list[str]:
    lines = [f"## {' '.join(path)}", "", plain(command.help or ""), ""]
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        panel = getattr(parameter, "rich_help_panel", None) or "Options"
        panels.setdefault(panel, []).append(parameter_row(parameter))
    for panel, rows in panels.items():
        lines += [f"**{panel}**", "", "| | meaning | default |", "|---|---|---|", *rows, ""]
    return lines


def parameter_row(parameter: Any) -> str:
    typed = [*parameter.opts, *parameter.secondary_opts]
    if isinstance(parameter, TyperArgument):
        typed = [str(parameter.name).upper()]
    names = " ".join(f"`{name}`" for name in typed)
    help_text = plain(getattr(parameter, "help", None) or "")
    if variable := getattr(parameter, "envvar", None):
        help_text += f" Also from the environment: `{variable}`."
    return f"| {names} | {cell(help_text)} | {cell(default_of(parameter))} |"


def default_of(parameter: Any) -> str:
    """Return the default of a parameter as the help shows it."""
    if parameter.required:
        return "(required)"
    shown = getattr(parameter, "show_default", None)
    if isinstance(shown, str):
        return shown
    default = parameter.default
    if default is None or default is False or callable(default) or shown is False:
        return ""
    if isinstance(default, (list, tuple)):
        return ", ".join(map(str, default))
    return str(getattr(default, "value", default))


def plain(text: str) -> str:
    """Return help text with each paragraph on one line."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# -------------------------------------------------------------------------------------------------
# Python
# -------------------------------------------------------------------------------------------------


def python_page() -> str:
    """Return the page of all names of `pyh2o.__all__`, with the methods of our classes."""
    lines = ["# Python", "", GENERATED, "", "    import pyh2o", ""]
    for name in sorted(pyh2o.__all__):
        thing = getattr(pyh2o, name)
        if inspect.isclass(thing):
            lines += class_lines(name, thing)
        elif callable(thing):
            lines += [f"## {name}", "", call(name, thing), "", *doc_lines(thing)]
    return "\n".join(lines).rstrip() + "\n"


def class_lines(name: str, cls: type[Any]) -> list[str]:
    bases = [base.__qualname__ for base in cls.__bases__ if base is not object]
    under = f", a `{'`, `'.join(bases)}`" if bases else ""
    lines = [f"## {name}{under}", ""]
    is_error = issubclass(cls, BaseException)
    if not is_error:
        lines += [call(name, cls), ""]
    lines += doc_lines(cls)
    initialiser = cls.__dict__.get("__init__")
    if getattr(initialiser, "__doc__", None) and not dataclasses.is_dataclass(cls):
        lines += doc_lines(initialiser)
    for member_name, member in members(cls):
        lines += [f"### {name}.{member_name}", ""]
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if not isinstance(function, property):
            lines += [call(member_name, function), ""]
        lines += doc_lines(function)
    return lines


def members(cls: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield methods and properties with a docstring of pyh2o, in the order of the source."""
    for owner in reversed(cls.__mro__):
        if not owner.__module__.startswith("pyh2o"):
            continue
        for name, member in owner.__dict__.items():
            function = getattr(member, "__func__", getattr(member, "fget", None) or member)
            is_ours = not name.startswith("_") and inspect.isfunction(function)
            if is_ours and inspect.getdoc(function):
                yield name, member


def call(name: str, thing: Any) -> str:
    """Return a signature as an indented block, without `self` and modules of names."""
    shown = inspect.signature(thing)
    parts: list[str] = []
    for each in shown.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        if dataclasses.is_dataclass(each.default):
            each = each.replace(default=Shown(each.default))
        if each.name not in ("self", "cls"):
            parts.append(short(str(each)))
    returned = short(str(shown.replace(parameters=[])).removeprefix("()"))
    text = f"    {name}({', '.join(parts)}){returned}"
    if len(text) <= 100:
        return text
    return "\n".join([f"    {name}(", *(f"        {part}," for part in parts), f"    ){returned}"])


def short(text: str) -> str:
    return re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", text).replace("'", "")


class Shown:
    """A default that is a record, shown by the name of its class."""

    def __init__(self, record: Any) -> None:
        self._name = type(record).__name__

    def __repr__(self) -> str:
        return f"{self._name}()"


def doc_lines(thing: Any) -> list[str]:
    """Return a docstring as Markdown, with its sections as lists."""
    text = inspect.getdoc(thing) or ""
    lines: list[str] = []
    in_section = False
    for line in text.splitlines():
        if re.fullmatch(r"(Args|Attributes|Returns|Yields|Raises):", line):
            lines += [f"*{line[:-1]}*", ""]
            in_section = True
        elif in_section and re.match(r"    [\w*][\w*, ]*: ", line):
            names, meaning = line.strip().split(": ", 1)
            lines.append(f"- `{names.replace(', ', '`, `')}`: {meaning}")
        elif in_section and line.startswith("        ") and lines and lines[-1]:
            lines[-1] += f" {line.strip()}"
        else:
            in_section = in_section and (not line or line.startswith(" "))
            lines.append(line.strip() if in_section else line)
    return [*lines, ""] if lines else []


if __name__ == "__main__":
    sys.exit(main())
