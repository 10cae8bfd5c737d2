"""The Dockerfile and the systemd unit name commands and options that there are."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import typer

from compiled import ROOT
from pyh2o.cli.app import app

PACKAGING = ROOT / "packaging"
DOCKERFILE = (PACKAGING / "Dockerfile").read_text(encoding="utf-8")
UNIT = (PACKAGING / "pyh2o.service").read_text(encoding="utf-8")


def instruction(name: str) -> list[str]:
    """The words of an instruction of the Dockerfile in JSON."""
    (words,) = re.findall(rf"^{name} (\[.*\])$", DOCKERFILE, re.MULTILINE)
    return list(json.loads(words))


def started() -> dict[str, list[str]]:
    """Command lines, by where they stand."""
    entry = instruction("ENTRYPOINT")
    found = {"CMD": [*entry, *instruction("CMD")]}
    for line in re.findall(r"^# +(docker run .*)$", DOCKERFILE, re.MULTILINE):
        behind = re.split(r" pyh2o(?:-cuda)?(?= |$)", line)[1]
        if behind:
            found[line] = [*entry, *shlex.split(behind)]
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    found["ExecStart"] = shlex.split(line)
    return found


@pytest.mark.parametrize("where", started())
def test_commands_are_understood(where: str) -> None:
    program, *arguments = started()[where]
    assert program.rpartition("/")[2] == "pyh2o"
    command, path = typer.main.get_command(app), []
    while hasattr(command, "commands"):
        path.append(arguments.pop(0))
        command = command.commands[path[-1]]
    context = command.make_context(" ".join(path), arguments)  # raises what the program would say
    assert path == ["models", "fetch"] or context.params["port"] == 8000


def test_the_container_is_asked_where_it_listens() -> None:
    assert instruction("CMD")[:3] == ["serve", "--host", "0.0.0.0"]
    assert ":8000/health" in DOCKERFILE
    assert re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE) == ["8000"]
    assert "--host" not in UNIT


def test_the_build_gets_what_it_reads() -> None:
    """All but a few folders is kept from the build."""
    ignored = (PACKAGING / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    sent = {name.removeprefix("!") for name in ignored if name.startswith("!")}
    assert all((ROOT / name).exists() for name in sent)
    assert {"CMakeLists.txt", "pyproject.toml", "native", "pyh2o", "cli"} <= sent
