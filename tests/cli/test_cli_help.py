"""The help: a dozen options that people use, all on demand, and the same ones everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from cli_fakes import run
from pyh2o.cli.app import app
from pyh2o.cli.config import default_map
from pyh2o.cli.help import A_DOZEN, USED

pytestmark = pytest.mark.usefixtures("surroundings")

# Names that are not the same in all commands that have them, and why.
DIFFERENT = {
    "-f": "a text to read: --prompt-file is how a story begins, --file what is asked about",
    "--max-tokens": "a window ends an answer, and a story has no window",
    "--output": "a story can go to standard output, and a batch is gone on with from its file",
    "--port": "both servers can run on one machine",
    "--texts": "a file of requests wants many at once, a person at a server one soon",
}


def commands_of(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
    for name, child in (children or {}).items():
        yield from commands_of(child, (*path, name))


COMMANDS = dict(commands_of(typer.main.get_command(app)))


def options_of(path: tuple[str, ...]) -> list[Any]:
    return [param for param in COMMANDS[path].params if param.param_type_name == "option"]


MANY = [path for path in COMMANDS if len(options_of(path)) > A_DOZEN]


def default_as_read(option: Any) -> Any:
    if isinstance(option.show_default, str):
        return option.show_default
    return "drawn" if callable(option.default) else option.default


def test_an_option_is_the_same_in_all_commands() -> None:
    of_name: dict[str, dict[str, Any]] = {}
    for path in COMMANDS:
        for option in options_of(path):
            names = (*option.opts, *option.secondary_opts)
            what = (*names, option.envvar, default_as_read(option))
            for name in option.opts:
                is_short = not name.startswith("--")
                of_name.setdefault(name, {})[" ".join(path)] = names[0] if is_short else what
    different = {name for name, found in of_name.items() if len(set(found.values())) > 1}
    assert different == DIFFERENT.keys(), {name: of_name[name] for name in different}
    assert of_name.keys() >= USED


def listed(shown: str) -> list[str]:
    """The options that have a row in the help."""
    return re.findall(r"^│ \*? *(--[\w-]+)", shown, re.MULTILINE)


@pytest.mark.parametrize("path", MANY, ids=" ".join)
def test_a_dozen_is_shown_and_the_rest_on_demand(path: tuple[str, ...]) -> None:
    names = [max(option.opts, key=len) for option in options_of(path)]
    short, full = run(*path, "--help"), run(*path, "--help-all")
    assert (full.code, full.notes) == (0, "")
    assert sorted(listed(full.text)) == sorted([*names, "--help", "--help-all"])
    shown = listed(short.text)
    assert set(shown) == (USED & set(names)) | {"--help"}
    assert 2 <= len(shown) <= A_DOZEN + 1
    n_more = len(names) - len(shown) + 1
    closing = short.text.rstrip().rpartition("\n")[2]
    assert closing.startswith(f" {n_more} more options: pyh2o {' '.join(path)} --help-all.")
    assert "more options" not in full.text


def test_a_command_with_few_options_shows_them_all() -> None:
    shown = run("rpc-server", "--help").text
    assert listed(shown) == ["--host", "--port", "--threads", "--help"]
    assert run("rpc-server", "--help-all").code == 2


def test_the_configuration_file_takes_every_option() -> None:
    values = {"hh": 0.3, "recall-type": "f16", "top-k": 7}
    found = default_map(typer.main.get_command(app), {"chat": values})["chat"]
    assert found == {"hh": "0.3", "recall_type": "f16", "top_k": "7"}
