"""`pyh2o doctor`: the report of a machine, and that it is made where something is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pyh2o
from cli_fakes import PATIENCE, Output, run
from healthy_machine import RIGHT, make_healthy
from pyh2o.cli import doctor as doctor_module
from pyh2o.cli.doctor import without_home
from pyh2o.cli.doctor_text import report_text
from pyh2o.library import LIBRARY_FOLDER
from pyh2o.system.report import Report

pytestmark = pytest.mark.usefixtures("surroundings", "healthy_machine")


@pytest.fixture
def healthy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    make_healthy(monkeypatch)


def report() -> Any:
    """What it says of this machine, for programs."""
    output = run("doctor", "--json", "-")
    assert (output.code, output.notes) == (0, "")
    return json.loads(output.text)


def test_a_machine_without_problems(tmp_path: Path) -> None:
    output = run("doctor")
    assert (output.code, output.notes) == (0, "")
    labels = [line[2:15].strip() for line in output.text.splitlines() if line[2] != " "]
    assert labels == [
        "pyh2o",
        "python",
        "extras",
        "system",
        "processor",
        "instructions",
        "attention",
        "products",
        "memory",
        "gpus",
        "models",
        "sessions",
        "configuration",
        "problems",
    ]
    assert output.text.endswith("  problems      none found\n")
    assert pyh2o.__version__ in output.text
    assert str(pyh2o.build_info()["llama_cpp_commit"])[:10] in output.text
    shown = " ".join(output.text.split())
    assert str(tmp_path / "models") in shown
    assert "products 2 types of weights, as NumPy has them: F32 Q4_0" in shown
    assert "busy" not in shown


def test_json(tmp_path: Path) -> None:
    assert run("doctor", "--json", "report.json").code == 0
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["problems"] == []
    assert data["program"]["build"] == pyh2o.build_info()
    assert data["machine"]["cores"]["used"] >= 1
    assert [folder["keeps"] for folder in data["folders"]] == ["models", "sessions"]
    again = run("doctor", "--json", "report.json")
    assert again == Output(1, "", "error: report.json exists: give another --json, or remove it\n")


def test_models_are_named_and_sessions_counted(tmp_path: Path) -> None:
    for folder, name in (("models", "some-model.gguf"), ("chats", "my secret.h2o")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(bytes(1000))
    data = report()
    models, sessions = data["folders"]
    assert (models["names"], models["n_items"], models["n_bytes"]) == (["some-model"], 1, 1000)
    assert (sessions["names"], sessions["n_items"], sessions["n_bytes"]) == ([], 1, 1000)
    assert "secret" not in json.dumps(data)
    assert "1 model, 0.0 MB" in run("doctor").text


@pytest.mark.parametrize("variable", ["PYH2O_MODELS", "PYH2O_CHATS", "PYH2O_CONFIG"])
def test_a_folder_that_cannot_be_looked_into(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may not; nobody may look behind a name that is too long."""
    monkeypatch.setenv(variable, f"{tmp_path}/{'n' * 300}/mine")
    output = run("doctor")
    assert (output.notes, output.text.count("\n  problem ")) == ("", variable == "PYH2O_CONFIG")


def test_keys_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYH2O_API_KEY", "sesame")
    monkeypatch.setenv("PYH2O_THREADS", "3")
    output = run("doctor")
    assert "PYH2O_THREADS = 3\n" in output.text
    assert "PYH2O_API_KEY = ...\n" in output.text
    assert "sesame" not in output.text + json.dumps(report())


def test_the_home_folder_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "of jane"  # where a line may end
    home.mkdir()
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PYH2O_MODELS", str(home / "models"))
    monkeypatch.setenv("PYH2O_CHATS", str(home / "file"))
    output = run("doctor", "--json", "report.json")
    assert output.code == 1
    said = " ".join(output.text.split())
    assert "~/models" in said
    assert "the folder of the sessions, ~/file, cannot be written to" in said
    assert "jane" not in output.text
    assert "jane" not in (tmp_path / "report.json").read_text()


def test_paths_that_only_begin_like_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/jo")
    text = "/home/jo /home/jo/x '/home/jo' /home/john /home/jo-x /data/home/jo"
    assert without_home(text) == "~ ~/x '~' /home/john /home/jo-x /data/home/jo"
    monkeypatch.setenv("HOME", "/")
    assert without_home("/lib") == "/lib"


def test_a_home_folder_behind_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("HOME", str(tmp_path / "link"))
    assert without_home(f"{tmp_path}/real/a {tmp_path}/link/b") == "~/a ~/b"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[defaults\n", "my.toml is no TOML: "),
        ("[defaults]\nthread = 2\n", "there is no thread in [defaults]: did you mean threads?"),
        (None, "which is not there: unset it"),
    ],
)
def test_a_wrong_configuration_is_a_problem_among_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, problem: str
) -> None:
    """Other commands refuse to begin."""
    file = tmp_path / "my.toml"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("PYH2O_CONFIG", str(file))
    monkeypatch.setenv("PYH2O_CHATS", "/dev/null/chats")
    output = run("doctor")
    assert (output.code, output.notes) == (1, "")
    sessions, configuration = [
        line for line in output.text.splitlines() if line.startswith("  problem  ")
    ]
    assert "/dev/null/chats, cannot be written to" in sessions
    assert problem in configuration
    assert run("models", "path").code == 1


def test_defaults_of_the_file_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.toml").write_text('[doctor]\njson = "-"\n')
    monkeypatch.setenv("PYH2O_CONFIG", str(tmp_path / "my.toml"))
    assert json.loads(run("doctor").text)["problems"] == []


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> Report:
    """The report of this machine."""
    found: list[Report] = []

    def keep(report: Report) -> str:
        found.append(report)
        return ""

    monkeypatch.setattr(doctor_module, "report_text", keep)
    run("doctor")
    return found[0]


def test_what_is_not_known_is_said(healthy: Report) -> None:
    sizes = dict.fromkeys(("total_bytes", "available_bytes", "limit_bytes"))
    machine = replace(healthy.machine, instructions=(), attention=None, nvidia_driver="5", **sizes)
    text = report_text(replace(healthy, machine=machine))
    for label in ("instructions", "attention", "memory"):
        assert f"  {label:14}not known\n" in text
    assert "driver of NVIDIA 5\n" in text
    cores = replace(machine.cores, physical=4, logical=8, allowed=2, quota=1.5, used=1)
    text = " ".join(report_text(replace(healthy, machine=replace(machine, cores=cores))).split())
    assert (
        "4 cores, 8 threads, of which this process may use 2, a container's limit of 1.5 CPUs: 1 "
        "used by default"
    ) in text


def test_products_of_a_gpu_and_a_busy_machine(healthy: Report) -> None:
    assert "  products      not known\n" in report_text(replace(healthy, products=()))
    on_card = replace(RIGHT, gpus="card", right=(), unknown=("F32", "Q4_0"))
    text = " ".join(report_text(replace(healthy, products=(RIGHT, on_card))).split())
    assert "card: 0 types of weights, as NumPy has them: none card: not tried: F32 Q4_0 " in text
    machine = replace(healthy.machine, busy=1.6)
    busy = replace(machine, cores=replace(machine.cores, logical=8))
    text = report_text(replace(healthy, machine=busy))
    assert " other programs keep 2 of 8 CPUs busy: generation will be slower\n" in text


# -------------------------------------------------------------------------------------------------
# Where the library cannot be loaded
# -------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder with pyh2o as it is installed, but for the library and what is compiled over it."""
    installed = LIBRARY_FOLDER.parent
    package = tmp_path / "broken" / "pyh2o"
    package.mkdir(parents=True)
    for path in installed.iterdir():
        if path.name not in ("lib", "_native"):
            (package / path.name).symlink_to(path)
    shutil.copytree(installed / "_native", package / "_native")
    (package / "lib").mkdir()
    shutil.copy(LIBRARY_FOLDER / "build.json", package / "lib")
    return package


def problem_with(package: Path) -> str:
    """What a process says of the library of this package."""
    done = subprocess.run(
        [sys.executable, "-m", "pyh2o.cli", "doctor"],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert f"{package / 'lib'}, which cannot be loaded python " in " ".join(done.stdout.split())
    assert "  gpus          not known\n" in done.stdout
    (problem,) = [line for line in done.stdout.splitlines() if "install pyh2o again" in line]
    return problem


@pytest.mark.real
def test_a_library_that_is_not_there(broken: Path) -> None:
    problem = problem_with(broken)
    assert problem.startswith("  problem       pyh2o's library cannot be loaded: ")
    assert problem.endswith("; install pyh2o again, on this machine")


@pytest.mark.real
def test_a_library_that_ends_the_program(broken: Path) -> None:
    """As one that was built for another processor does; the report is made all the same."""
    for path in (broken / "_native").glob("_ffi*"):
        path.unlink()
    ending = "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n"
    (broken / "_native" / "_ffi.py").write_text(ending)
    assert "ends the program that loads it (SIGILL): install pyh2o" in problem_with(broken)


@pytest.mark.real
def test_llama_cpp_that_is_not_installed(broken: Path) -> None:
    shutil.rmtree(broken / "_native")
    (broken / "_native").symlink_to(LIBRARY_FOLDER.parent / "_native")
    (broken.parent / "llama_cpp.py").write_text("raise ModuleNotFoundError('no llama_cpp')\n")
    assert "llama_cpp cannot be loaded (no llama_cpp): install pyh2o" in problem_with(broken)
