"""`pyh2o doctor`: the report of a machine, and what is wrong with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pyh2o
from cli_fakes import PATIENCE, run
from pyh2o import _native  # noqa: F401  # loads the library
from pyh2o.cli import doctor
from pyh2o.cli.doctor import without_home
from pyh2o.library import LIBRARY_FOLDER, devices, machine, products
from pyh2o.library.products import Products
from pyh2o.library.verdicts import Verdicts
from pyh2o.system.threads import physical_cores

RIGHT = Products("", right=("F32", "Q4_0"), plain={}, wrong={}, unknown=())
CARD = SimpleNamespace(name="card", free_bytes=lambda: 2**30)
NO_GPU = "this build has no GPU backend: install another"
BUILD = {
    "llama_cpp_python": "0.3",
    "llama_cpp_commit": "c" * 40,
    "ggml": "1",
    "patches": "p" * 40,
    "backends": ["cpu", "rpc"],
}

pytestmark = pytest.mark.usefixtures("surroundings", "has")


def returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def installed(version: str | None) -> Callable[[str], str]:
    def find(package: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(package)
        return version

    return find


# What the report looks at, and what stands there for a value that a test gives.
FAKES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "instructions": (machine, "instruction_sets", returning),
    "built_for": (machine, "built_for", returning),
    "products": (products, "find_products", lambda found: lambda *_, on_gpus, anew: found[on_gpus]),
    "devices": (doctor, "_devices", returning),
    "build": (pyh2o, "build_info", returning),
    "llama_cpp_python": (metadata, "version", installed),
    "free": (shutil, "disk_usage", lambda size: returning(SimpleNamespace(free=size))),
    "passed_over": (doctor, "read_verdicts", lambda found: returning(Verdicts(passed_over=found))),
    "driver": (
        doctor,
        "_NVIDIA",
        lambda version: SimpleNamespace(exists=returning(version), read_text=returning(version)),
    ),
}
Has = Callable[..., None]


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Has:
    """Sets what this machine has; nothing is wrong with it until a test changes that."""

    def change(**changes: Any) -> None:
        for name, value in changes.items():
            where, attribute, fake = FAKES[name]
            monkeypatch.setattr(where, attribute, fake(value))

    change(instructions=("avx2", "fma", "f16c"), built_for="CPU : AVX2 = 1 | ", driver=None)
    change(products=[RIGHT], devices=[], build=BUILD, llama_cpp_python="0.3")
    change(free=doctor.MIN_FREE)
    monkeypatch.setattr(devices, "why_no_gpu", lambda: NO_GPU)
    return change


def said() -> str:
    """What it says, on one line."""
    return " ".join(run("doctor").text.split())


def problems() -> list[str]:
    """The problems that it finds, of which its exit code tells, too."""
    output = run("doctor")
    assert output.notes == ""
    found = [line for line in output.text.splitlines() if line.startswith("  problem  ")]
    assert output.code == bool(found)
    assert output.text.endswith("  problems      none found\n") != bool(found)
    return [line.removeprefix("  problem").strip() for line in found]


def test_a_machine_without_problems(tmp_path: Path) -> None:
    output = run("doctor")
    assert (output.code, output.notes) == (0, "")
    shown = " ".join(output.text.split())
    assert f"pyh2o {pyh2o.__version__} llama_cpp_python 0.3 llama_cpp_commit {'c' * 40} " in shown
    assert "for the processor" in shown
    assert f"{physical_cores()} used by default instructions avx2 fma f16c" in shown
    assert "weights 2 types give correct products: F32 Q4_0" in shown
    assert "backends cpu rpc" in shown
    assert "gpus none that this build can use models" in shown
    assert f"models {tmp_path / 'models'}, does not exist yet, 2.0 GiB free" in shown


def test_a_gpu(has: Has) -> None:
    on_card = replace(RIGHT, gpus="card", right=(), unknown=("F32", "Q4_0"))
    has(devices=[CARD], products=[RIGHT, on_card], driver="580.1")
    text = said()
    assert "card: 0 types give correct products: none card: not tested: F32 Q4_0 " in text
    assert "gpus card, 1.0 GiB free driver of NVIDIA 580.1 " in text


def test_what_is_not_known_is_said(has: Has) -> None:
    has(instructions=(), llama_cpp_python=None, build={})
    text = said()
    assert "instructions unknown" in text
    assert "llama-cpp-python is not installed " in text


def test_models_are_named_and_sessions_are_not(tmp_path: Path) -> None:
    for folder, name in (("models", "some-model.gguf"), ("chats", "my secret.h2o")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(b"GGUF")
    text = said()
    assert "2.0 GiB free some-model sessions" in text
    assert "secret" not in text


def test_keys_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYH2O_API_KEY", "sesame")
    monkeypatch.setenv("PYH2O_THREADS", "3")
    output = run("doctor")
    assert "PYH2O_THREADS = 3\n" in output.text
    assert "PYH2O_API_KEY = ...\n" in output.text
    assert "sesame" not in output.text


def test_the_home_folder_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "of jane"
    home.mkdir()
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PYH2O_MODELS", str(home / "models"))
    monkeypatch.setenv("PYH2O_CHATS", str(home / "file"))
    text = said()
    assert "~/models" in text
    assert "the sessions folder ~/file is not writable" in text
    assert "jane" not in text


def test_paths_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that only begin like it; those behind a link, too."""
    (tmp_path / "real").mkdir()
    (tmp_path / "jo").symlink_to("real")
    monkeypatch.setenv("HOME", home := str(tmp_path / "jo"))
    text = f"{home} {home}/x '{home}' {home}hn {home}-x /data{home} {tmp_path}/real/a"
    assert without_home(text) == f"~ ~/x '~' {home}hn {home}-x /data{home} ~/a"
    monkeypatch.setenv("HOME", "/")
    assert without_home("/lib") == "/lib"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"llama_cpp_python": None},
        {"build": {}},
        {"instructions": ()},
        {"build": {**BUILD, "backends": ["cpu", "cuda"]}, "devices": [CARD], "driver": "580.1"},
    ],
)
def test_nothing_is_wrong(has: Has, changes: dict[str, Any]) -> None:
    has(products=[RIGHT, replace(RIGHT, gpus="card")], **changes)
    assert problems() == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"llama_cpp_python": "0.4"},
            "llama-cpp-python 0.4 is installed, but pyh2o was built for 0.3: SKBUILD_WHEEL_CMAKE="
            "false pip install --no-cache-dir llama-cpp-python==0.3",
        ),
        (
            {"built_for": "CPU : AVX2 = 1 | AVX512 = 1 | "},
            "the library was built for a processor with avx512f, which this one lacks",
        ),
        (
            {"passed_over": {"libggml-cpu-x.so": "Q4_0 (SIGSEGV)"}},
            "libggml-cpu-x.so is skipped because it fails on this processor with weights in Q4_0 "
            "(SIGSEGV): install pyh2o again with a newer compiler",
        ),
        (
            {"products": [replace(RIGHT, plain={"Q4_0": "SIGSEGV"})]},
            "the library fails on this processor with weights that it rearranges, in Q4_0 (SIG",
        ),
        (
            {"products": [RIGHT, replace(RIGHT, gpus="X", wrong={"F32": "no"})], "devices": [CARD]},
            "the library fails on X with weights in F32 (no): give n_gpu_layers=0 (--gpu",
        ),
        ({"driver": "580.1"}, NO_GPU),
        ({"build": {**BUILD, "backends": ["cpu", "vulkan"]}}, NO_GPU),
    ],
)
def test_what_is_wrong(has: Has, changes: dict[str, Any], problem: str) -> None:
    has(**changes)
    (line,) = problems()
    assert line.startswith(problem)
    assert ": " in line  # a cure


def test_disks_that_are_nearly_full(has: Has) -> None:
    has(free=doctor.MIN_FREE - 2**30)
    models, sessions = problems()
    assert "has only 1.0 GiB free: free some space, or set PYH2O_MODELS to " in models
    assert "set PYH2O_CHATS to" in sessions


@pytest.mark.parametrize("name", ["file", "file/below", "owned", "owned/below"])
def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nobody keeps root out, who may run the tests."""
    (tmp_path / "file").touch()
    owned = tmp_path / "owned"
    owned.mkdir()
    monkeypatch.setenv("PYH2O_MODELS", str(tmp_path / name))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != owned)
    (line,) = problems()
    assert line == (
        f"the models folder {tmp_path / name} is not writable: make it writable, or "
        "set PYH2O_MODELS to another folder"
    )


@pytest.mark.parametrize("variable", ["PYH2O_MODELS", "PYH2O_CHATS", "PYH2O_CONFIG"])
def test_a_folder_that_cannot_be_looked_into(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may not; nobody may look behind a name that is too long."""
    monkeypatch.setenv(variable, f"{tmp_path}/{'n' * 300}/mine")
    assert len(problems()) == (variable == "PYH2O_CONFIG")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[defaults\n", "my.toml is not valid TOML: "),
        ("[defaults]\nthread = 2\n", "unknown option thread in [defaults]: did you mean threads?"),
        (None, "which does not exist: unset it"),
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
    sessions, configuration = problems()
    assert "/dev/null/chats is not writable" in sessions
    assert problem in configuration
    assert run("models", "list").code == 1


def test_a_library_that_is_loaded_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("another process"))
    assert doctor.why_not_loaded() is None


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
    folders = [str(package.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "pyh2o.cli", "doctor"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert f"{package / 'lib'}, which cannot be loaded python " in " ".join(done.stdout.split())
    assert "\n  weights " not in done.stdout
    (problem,) = [line for line in done.stdout.splitlines() if "install pyh2o again" in line]
    assert problem.startswith("  problem       llama.cpp's library cannot be loaded (")
    return problem


@pytest.mark.real
def test_a_library_that_ends_the_program(broken: Path) -> None:
    """As one that was built for another processor does; the report is made all the same."""
    for path in (broken / "_native").glob("_ffi*"):
        path.unlink()
    ending = "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n"
    (broken / "_native" / "_ffi.py").write_text(ending)
    assert "(SIGILL): install pyh2o" in problem_with(broken)


@pytest.mark.real
def test_llama_cpp_that_is_not_installed(broken: Path) -> None:
    shutil.rmtree(broken / "_native")
    (broken / "_native").symlink_to(LIBRARY_FOLDER.parent / "_native")
    (broken.parent / "llama_cpp.py").write_text("raise ModuleNotFoundError('no llama_cpp')\n")
    assert "no llama_cpp): install pyh2o" in problem_with(broken)
