"""The report of a machine, and the problems that are found in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import pyh2o
from healthy_machine import RIGHT, make_healthy
from pyh2o.system import report as report_module
from pyh2o.system.folders import Folder, look_at_folder
from pyh2o.system.problems import LEAST_FREE, problems_of
from pyh2o.system.report import (
    Configuration,
    GpuMemory,
    Machine,
    Program,
    Report,
    installed_extras,
    make_report,
)
from pyh2o.system.threads import Cores, count_cores

HEALTHY = Report(
    Program(
        version="1.0",
        build={"llama_cpp_python": "0.3", "backends": ["cpu", "rpc"]},
        llama_cpp_python="0.3",
        library="/lib",
        cpu_library="libggml-cpu.so",
        not_loaded=None,
        built_for="CPU : AVX2 = 1 | ",
        extras=(),
        passed_over={},
    ),
    Machine(
        system="Linux",
        libc="",
        python="",
        cpu="",
        cores=Cores(physical=2, logical=4, allowed=4, quota=None, used=2),
        busy=None,
        instructions=("avx2",),
        attention="avx2",
        total_bytes=None,
        available_bytes=None,
        limit_bytes=None,
        gpus=(),
        no_gpu="this build has no GPU backend: install another",
        nvidia_driver=None,
    ),
    (RIGHT,),
    (),
    Configuration("/c.toml", is_there=False, wrong=None, variables={}),
)
FOLDER = Folder(
    keeps="models",
    path="/models",
    variable="PYH2O_MODELS",
    is_there=True,
    writable=True,
    free_bytes=LEAST_FREE,
    n_items=0,
    n_bytes=0,
    names=(),
)


def with_program(**changes: Any) -> Report:
    return replace(HEALTHY, program=replace(HEALTHY.program, **changes))


def with_machine(**changes: Any) -> Report:
    return replace(HEALTHY, machine=replace(HEALTHY.machine, **changes))


def with_folder(**changes: Any) -> Report:
    return replace(HEALTHY, folders=(replace(FOLDER, **changes),))


def test_this_machine() -> None:
    report = make_report([], HEALTHY.configuration)
    assert report.program.not_loaded is None
    assert report.program.build == pyh2o.build_info()
    assert "CPU" in report.program.built_for
    machine = report.machine
    assert 1 <= machine.cores.used <= machine.cores.physical <= machine.cores.logical
    assert machine.cores.used <= machine.cores.allowed <= machine.cores.logical
    assert (machine.no_gpu is None) == bool(machine.gpus)
    record = json.loads(json.dumps(report.record()))
    assert record["machine"]["attention"] == machine.attention
    (products,) = report.products
    assert record["products"][0]["right"] == list(products.right)


def test_nothing_is_wrong_with_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    make_healthy(monkeypatch)
    assert problems_of(make_report([], HEALTHY.configuration)) == ()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinity")
def test_cores_that_a_process_may_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = count_cores()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert count_cores() == replace(everything, allowed=1, used=1)


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in it is not asked for then."""
    make_healthy(monkeypatch)
    monkeypatch.setattr(report_module, "why_not_loaded", lambda: "it is damaged: install it again")
    report = make_report([], HEALTHY.configuration)
    assert (report.program.built_for, report.machine.gpus, report.products) == ("", (), ())
    assert problems_of(report) == ("it is damaged: install it again",)


@pytest.mark.parametrize(
    "report",
    [
        HEALTHY,
        with_folder(),
        with_folder(is_there=False, free_bytes=None),
        with_program(llama_cpp_python=None),
        with_program(build={}),
        with_machine(instructions=(), attention=None),
        replace(
            with_program(build={"backends": ["cpu", "cuda"]}),
            machine=replace(
                HEALTHY.machine,
                gpus=(GpuMemory("card", 1, 2),),
                no_gpu=None,
                nvidia_driver="580.1",
            ),
        ),
    ],
)
def test_nothing_is_wrong(report: Report) -> None:
    assert problems_of(report) == ()


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (
            with_program(llama_cpp_python="0.4"),
            "llama-cpp-python 0.4 is installed, and pyh2o was built for 0.3: SKBUILD_WHEEL_CMAKE=",
        ),
        (
            with_program(built_for="CPU : AVX2 = 1 | AVX512 = 1 | "),
            "the library was built for a processor with avx512f, which this one lacks",
        ),
        (with_machine(attention="portable"), "attention runs in plain C++"),
        (
            with_program(passed_over={"libggml-cpu-x.so": "Q4_0 (SIGSEGV)"}),
            "libggml-cpu-x.so is passed over, which fails on this processor with weights in Q4_0 "
            "(SIGSEGV): install pyh2o again with a newer compiler",
        ),
        (
            replace(HEALTHY, products=(replace(RIGHT, plain={"Q4_0": "SIGSEGV"}),)),
            "the library fails on this processor with weights that it rearranges, in Q4_0 (SIG",
        ),
        (
            replace(HEALTHY, products=(RIGHT, replace(RIGHT, gpus="X", wrong={"F32": "SIGILL"}))),
            "the library fails on X with weights in F32 (SIGILL): give n_gpu_layers=0 (--gpu",
        ),
        (with_machine(nvidia_driver="580.1"), "this build has no GPU backend: install another"),
        (
            with_program(build={"backends": ["cpu", "vulkan"]}),
            "this build has no GPU backend: install another",
        ),
        (
            with_folder(writable=False, free_bytes=0),
            "the folder of the models, /models, cannot be written to: make it writable, or set "
            "PYH2O_MODELS to another folder",
        ),
        (
            with_folder(free_bytes=LEAST_FREE - 2**30),
            "the disk of the models, /models, has 1.0 GiB free: free some, or set PYH2O_MODELS",
        ),
        (
            replace(HEALTHY, configuration=replace(HEALTHY.configuration, wrong="no TOML: mend")),
            "no TOML: mend",
        ),
    ],
)
def test_what_is_wrong(report: Report, problem: str) -> None:
    (line,) = problems_of(report)
    assert line.startswith(problem)
    assert "\n" not in line
    assert ": " in line  # a cure


# -------------------------------------------------------------------------------------------------
# Folders
# -------------------------------------------------------------------------------------------------


def test_folder(tmp_path: Path) -> None:
    folder = look_at_folder("models", tmp_path, "X", sizes=[3, 4], names=["a", "b"])
    assert (folder.is_there, folder.writable) == (True, True)
    assert (folder.n_items, folder.n_bytes, folder.names) == (2, 7, ("a", "b"))
    assert folder.free_bytes is not None
    assert folder.free_bytes > 0


def test_folder_that_can_be_made(tmp_path: Path) -> None:
    folder = look_at_folder("models", tmp_path / "a" / "b", "X", sizes=[])
    assert (folder.is_there, folder.writable) == (False, True)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_where_the_folder_should_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    assert not look_at_folder("models", tmp_path / name, "X", sizes=[]).writable


def test_folder_that_others_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody keeps root out, who may run the tests."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert not look_at_folder("models", tmp_path, "X", sizes=[]).writable
    assert not look_at_folder("models", tmp_path / "new", "X", sizes=[]).writable


# -------------------------------------------------------------------------------------------------
# Packages
# -------------------------------------------------------------------------------------------------


@pytest.fixture
def requires(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what a package says it requires."""

    def set_requirements(*lines: str) -> None:
        monkeypatch.setattr(metadata, "requires", lambda _: list(lines))

    return set_requirements


def test_extras(requires: Callable[..., None]) -> None:
    requires(
        "numpy>=1.24",
        'pytest>=8; extra == "tests"',
        "rich; extra == 'tests'",
        'pytest>=8; extra == "more"',
        'no-such-package-x>=1; extra == "more"',
        'no-such-package-x>=1; python_version < "3" and extra == "tests"',
        'rich[jupyter]<99,>=1; extra == "with-extras"',
    )
    assert installed_extras() == ("tests", "with-extras")


def test_extras_of_what_is_not_installed() -> None:
    assert installed_extras("no-such-package-x") == ()
