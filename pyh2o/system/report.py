"""What this machine has and what pyh2o uses of it, for the report of a bug.

It is made where llama.cpp's library cannot be loaded, too, and says why it cannot.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyh2o

from ..library import LIBRARY_FOLDER
from .cgroup import memory_limits
from .folders import Folder
from .machine import available_bytes, built_for, cpu_name, total_bytes
from .processor import attention_kernel, instruction_sets
from .threads import Cores, busy_cpus, count_cores
from .trial import why_not_loaded
from .verdicts import read_verdicts

if TYPE_CHECKING:
    from .products import Products

_DISTRIBUTION = "pyh2o-llm"
# Requirements of an extra that hold everywhere: name, version, extra.
_OF_EXTRA = re.compile(r"""([\w.-]+)[^;]*; extra == ["']([\w.-]+)["']""")
_NVIDIA = Path("/sys/module/nvidia/version")


@dataclass(frozen=True)
class Program:
    """pyh2o and what it was built from.

    Attributes:
        version: of pyh2o.
        build: `pyh2o.build_info()`; empty where nothing was built.
        llama_cpp_python: the version that is installed, None for none.
        library: the folder of the libraries.
        cpu_library: the one of them that computes on the CPU; "" if they cannot be loaded.
        not_loaded: why they cannot be loaded; None if they can.
        built_for: what llama.cpp says of its build, "CPU : AVX2 = 1 | ...".
        extras: of pyh2o, whose packages are all installed.
        passed_over: variants of ggml's code that are not loaded, because they are wrong on this
            processor, and why.
    """

    version: str
    build: Mapping[str, Any]
    llama_cpp_python: str | None
    library: str
    cpu_library: str
    not_loaded: str | None
    built_for: str
    extras: tuple[str, ...]
    passed_over: Mapping[str, str]


@dataclass(frozen=True)
class GpuMemory:
    """A GPU, by its name, and its bytes."""

    name: str
    free: int
    total: int


@dataclass(frozen=True)
class Machine:
    """The system, the processor and the memory.

    Attributes:
        system: with its version and its kind of processor.
        libc: the C library; "" where it is not known.
        python: its version, with which Python it is.
        cpu: the model of the processor.
        cores: of it.
        busy: CPUs that other programs keep busy; None where the system does not tell.
        instructions: that ggml or our kernels use; none where the system does not tell.
        attention: the kernel that attends on the CPU; None where it is not known.
        total_bytes, available_bytes: of memory; None where the system does not tell.
        limit_bytes: what a container may take of it; None for no limit.
        gpus: that the build can use.
        no_gpu: why there are none, and what to do about it; None if there are some, or if the
            library cannot be loaded.
        nvidia_driver: its version; None if there is none, or none that is known.
    """

    system: str
    libc: str
    python: str
    cpu: str
    cores: Cores
    busy: float | None
    instructions: tuple[str, ...]
    attention: str | None
    total_bytes: int | None
    available_bytes: int | None
    limit_bytes: int | None
    gpus: tuple[GpuMemory, ...]
    no_gpu: str | None
    nvidia_driver: str | None


@dataclass(frozen=True)
class Configuration:
    """The file with the user's defaults, and the variables that are set.

    Attributes:
        path: of the file.
        is_there: whether it exists.
        wrong: what is wrong with it; None for nothing.
        variables: those of pyh2o by their names, without keys.
    """

    path: str
    is_there: bool
    wrong: str | None
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """What a person who looks into a bug asks for.

    Attributes:
        products: of all types of weights, on the CPU and on the GPUs; none where the library cannot
            be loaded.
    """

    program: Program
    machine: Machine
    products: tuple[Products, ...]
    folders: tuple[Folder, ...]
    configuration: Configuration

    def record(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def make_report(folders: Sequence[Folder], configuration: Configuration) -> Report:
    """The report of this machine.

    Args:
        folders: that pyh2o keeps files in.
        configuration: the user's.
    """
    program = _program()
    gpus, no_gpu = ((), None) if program.not_loaded else _gpus()
    machine = _machine(gpus, no_gpu)  # before anything here keeps it busy
    products = () if program.not_loaded else _products(on_gpus=bool(gpus))
    return Report(program, machine, products, tuple(folders), configuration)


def _program() -> Program:
    not_loaded = why_not_loaded()
    return Program(
        version=pyh2o.__version__,
        build=_build_info(),
        llama_cpp_python=_installed("llama-cpp-python"),
        library=str(LIBRARY_FOLDER),
        cpu_library="" if not_loaded else _cpu_library(),
        not_loaded=not_loaded,
        built_for="" if not_loaded else built_for(),
        extras=installed_extras(),
        passed_over=read_verdicts().passed_over,
    )


def _products(*, on_gpus: bool) -> tuple[Products, ...]:
    # imported here because they load llama.cpp, which may not be possible
    from .backends import weight_types
    from .products import find_products

    places = sorted({False, on_gpus})
    return tuple(find_products(weight_types(), on_gpus=each, anew=True) for each in places)


def _build_info() -> Mapping[str, Any]:
    try:
        return pyh2o.build_info()
    except (OSError, ValueError):
        return {}


def _cpu_library() -> str:
    # imported here because it loads llama.cpp, which may not be possible
    from .backends import cpu_library

    return Path(cpu_library()).name


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed_extras(distribution: str = _DISTRIBUTION) -> tuple[str, ...]:
    """The extras of a package whose own packages are all there, whatever their versions."""
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return ()
    needed: dict[str, list[str]] = {}
    for requirement in requirements:
        if found := _OF_EXTRA.fullmatch(requirement):
            needed.setdefault(found[2], []).append(found[1])
    return tuple(extra for extra, packages in needed.items() if all(map(_installed, packages)))


def _machine(gpus: tuple[GpuMemory, ...], no_gpu: str | None) -> Machine:
    sets = instruction_sets()
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        libc=" ".join(platform.libc_ver()).strip(),
        python=f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}",
        cpu=cpu_name(),
        cores=count_cores(),
        busy=busy_cpus(),
        instructions=sets,
        attention=attention_kernel(sets),
        total_bytes=total_bytes(),
        available_bytes=available_bytes(),
        limit_bytes=min((limit.bytes for limit in memory_limits()), default=None),
        gpus=gpus,
        no_gpu=no_gpu,
        nvidia_driver=_NVIDIA.read_text().strip() if _NVIDIA.exists() else None,
    )


def _gpus() -> tuple[tuple[GpuMemory, ...], str | None]:
    """The GPUs, and why there are none."""
    # Imported here because they load llama.cpp, which may not be possible.
    from .backends import local_devices
    from .devices import why_no_gpu

    devices = local_devices()
    return (
        tuple(GpuMemory(each.name, each.free_bytes(), each.total_bytes()) for each in devices),
        None if devices else why_no_gpu(),
    )
