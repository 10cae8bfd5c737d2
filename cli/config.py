"""The configuration file: defaults of options, for all commands or for some."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import platformdirs
import typer

from pyh2o.system.home import user_folder

from .errors import InputError, reported_errors
from .help import Group

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLE = "PYH2O_CONFIG"
ALL = "defaults"
"""The section for all commands."""

DOCTOR = "doctor"
"""The command that reports errors of the file."""

Sections = dict[str, dict[str, Any]]
"""Tables of the file by name, those for more commands first: values by option names."""


class ProgramWithDefaults(Group):
    """The program's commands, with defaults from the configuration file."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        if not extra.get("resilient_parsing"):
            with reported_errors():
                try:
                    extra["default_map"] = default_map(self, read_sections(config_path()))
                except (InputError, OSError):
                    if args[:1] != [DOCTOR]:
                        raise
        return super().make_context(info_name, args, parent=parent, **extra)


def config_path() -> Path:
    """Return the path of the file: PYH2O_CONFIG, or one in the user's configuration folder."""
    return user_folder(VARIABLE, platformdirs.user_config_dir, "config.toml")


def read_sections(path: Path) -> Sections:
    """Read the tables of the file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        if os.environ.get(VARIABLE):
            raise InputError(f"{VARIABLE} is {path}, which does not exist: unset it") from None
        return {}
    except NotADirectoryError:
        if os.environ.get(VARIABLE):
            raise
        return {}  # HOME is /dev/null, as for services
    try:
        tables = tomllib.loads(data.decode("utf-8-sig"))
        sections = list(_sections(path, tables, ""))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError also for numbers of many digits
        raise InputError(f"{path} is not valid TOML: {error}") from None
    return dict(sorted(sections, key=lambda section: (section[0] != ALL, section[0].count("."))))


def _sections(
    path: Path, table: Mapping[str, Any], name: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the values of a table, then its nested tables."""
    values = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if values and not name:
        raise InputError(
            f"{path}: {next(iter(values))} is not in a section: put it below [{ALL}] or a command"
        )
    if values:
        yield name, values
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _sections(path, value, f"{name}.{key}" if name else key)


def default_map(program: Any, sections: Sections) -> dict[str, Any]:
    """Return the sections as `default_map` for the context of the program."""
    commands = dict(_commands(program, ()))
    names = {ALL, *(".".join(path[:n]) for path in commands for n in range(1, len(path) + 1))}
    defaults: dict[str, Any] = {}
    for section, values in sections.items():
        if section not in names:
            raise _unknown(f"section [{section}]", section, names)
        at = () if section == ALL else tuple(section.split("."))
        options = [
            (name.removeprefix("--"), path, option)
            for path, command in commands.items()
            if path[: len(at)] == at
            for option in command.params
            for name in option.opts
            if name.startswith("--")
        ]
        for key, value in values.items():
            having = [(path, option) for name, path, option in options if name == key]
            if not having:
                known = {name for name, _, _ in options}
                raise _unknown(f"option {key} in [{section}]", key, known)
            for path, option in having:
                table = defaults
                for name in path:
                    table = table.setdefault(name, {})
                table[option.name] = _value(f"{key} in [{section}]", value, option)
    return defaults


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all commands with their paths, without groups."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
    for name, child in (children or {}).items():
        yield from _commands(child, (*path, name))


def _value(key: str, value: Any, option: Any) -> Any:
    """Return a checked value as on the command line; `key` is for error messages."""
    where = f"{config_path()}: {key}"
    is_flag = bool(getattr(option, "is_flag", False))
    items = value if isinstance(value, list) and option.multiple else [value]
    right = bool if is_flag else (str, int, float)
    if not all(isinstance(item, right) and is_flag == isinstance(item, bool) for item in items):
        wanted = "true or false" if is_flag else "a text or a number"
        raise InputError(f"{where} is {value!r}: give {wanted}")
    # converted to text, for the same checks as on the command line
    texts = items if is_flag else [str(item) for item in items]
    given = texts if option.multiple else texts[0]
    try:
        option.process_value(typer.Context(typer.core.TyperCommand(None)), given)
    except typer.BadParameter as error:
        raise InputError(f"{where} is {value!r}: {error.message}") from None
    return given


def _unknown(what: str, name: str, known: set[str]) -> InputError:
    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
    return InputError(f"{config_path()}: unknown {what}: did you mean {nearest[0]}?")
