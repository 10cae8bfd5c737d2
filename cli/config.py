"""The configuration file: defaults of the options, for all commands or for one."""

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
"""The section for all commands that have an option."""

DOCTOR = "doctor"
"""The command that says what is wrong with the file, among others."""

Sections = dict[str, dict[str, Any]]
"""The tables of the file by their names, those for more commands first: values by option names."""


class ProgramWithDefaults(Group):
    """The program's commands, with what the configuration file says in the place of defaults."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """As any command's, but the file is read first; completion in a shell does without it."""
        if not extra.get("resilient_parsing"):
            with reported_errors():
                try:
                    extra["default_map"] = default_map(self, read_sections(config_path()))
                except (InputError, OSError):
                    if args[:1] != [DOCTOR]:
                        raise
        return super().make_context(info_name, args, parent=parent, **extra)


def config_path() -> Path:
    """The file: PYH2O_CONFIG, or one in the user's folder for settings; there may be none."""
    return user_folder(VARIABLE, platformdirs.user_config_dir, "config.toml")


def read_sections(path: Path) -> Sections:
    """The tables of the file.

    Raises:
        InputError: no TOML, a value outside of a table, or no file where PYH2O_CONFIG says.
        OSError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        if os.environ.get(VARIABLE):
            raise InputError(f"{VARIABLE} names {path}, which is not there: unset it") from None
        return {}
    except NotADirectoryError:
        if os.environ.get(VARIABLE):
            raise
        return {}  # HOME is /dev/null, as services have it
    try:
        tables = tomllib.loads(data.decode("utf-8-sig"))
        sections = list(_sections(path, tables, ""))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # also of a number with too many digits
        raise InputError(f"{path} is no TOML: {error}") from None
    return dict(sorted(sections, key=lambda section: (section[0] != ALL, section[0].count("."))))


def _sections(
    path: Path, table: Mapping[str, Any], name: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What stands in a table itself, and the tables in it."""
    values = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if values and not name:
        raise InputError(
            f"{path}: {next(iter(values))} stands in no section: put it below [{ALL}] or a command"
        )
    if values:
        yield name, values
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _sections(path, value, f"{name}.{key}" if name else key)


def default_map(program: Any, sections: Sections) -> dict[str, Any]:
    """What the sections say, as `default_map` of the context of the program, all commands' group.

    Raises:
        InputError: no such command or option, or a value that the option does not take.
    """
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
                raise _unknown(f"{key} in [{section}]", key, known)
            for path, option in having:
                table = defaults
                for name in path:
                    table = table.setdefault(name, {})
                table[option.name] = _value(f"{key} in [{section}]", value, option)
    return defaults


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The commands that do something."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
    for name, child in (children or {}).items():
        yield from _commands(child, (*path, name))


def _value(key: str, value: Any, option: Any) -> Any:
    """A value as the command line would have it, which the option takes; `key` for a message."""
    where = f"{config_path()}: {key}"
    is_flag = bool(getattr(option, "is_flag", False))
    items = value if isinstance(value, list) and option.multiple else [value]
    right = bool if is_flag else (str, int, float)
    if not all(isinstance(item, right) and is_flag == isinstance(item, bool) for item in items):
        wanted = "true or false" if is_flag else "a text or a number"
        raise InputError(f"{where} is {value!r}: give {wanted}")
    # As texts, so that what is refused there is refused here.
    texts = items if is_flag else [str(item) for item in items]
    given = texts if option.multiple else texts[0]
    try:
        option.process_value(typer.Context(typer.core.TyperCommand(None)), given)
    except typer.BadParameter as error:
        raise InputError(f"{where} is {value!r}: {error.message}") from None
    return given


def _unknown(what: str, name: str, known: set[str]) -> InputError:
    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
    return InputError(f"{config_path()}: there is no {what}: did you mean {nearest[0]}?")
