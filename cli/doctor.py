"""`pyh2o doctor`: what this machine has, what is used of it, and what is wrong.

The report is made where llama.cpp's library cannot be loaded, too, and says why it cannot.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import typer
from rich.style import Style

import pyh2o
from pyh2o.errors import PyH2OError
from pyh2o.library import GPU_BACKENDS, LIBRARY_FOLDER, machine
from pyh2o.library.verdicts import CURE, passed_over_text, read_verdicts
from pyh2o.models import list_models, models_folder
from pyh2o.sessions.saved import chats_folder, saved_chats
from pyh2o.system.home import expanded
from pyh2o.system.memory import available_bytes, memory_limits
from pyh2o.system.threads import cpu_quota, physical_cores

from .config import config_path, default_map, read_sections, variables_set
from .errors import EXIT_ERROR, InputError, one_line, reported_errors
from .terminal.entries import entry
from .terminal.terminal import harmless, paint, terminal
from .terminal.wording import count

if TYPE_CHECKING:
    from pyh2o.library.backends import Device

REINSTALL = "install pyh2o again, on this machine"
LEAST_FREE = 2 * 2**30
"""Bytes that a disk should have left: a small model, or some long conversations."""
PATIENCE = 120
"""Seconds that loading the library may take, and looking for GPUs."""

_DIGITS = 10  # of a hash, enough to recognise it
_LOOK = 0.2  # seconds for which it is seen how busy the machine is
_NVIDIA = Path("/sys/module/nvidia/version")


@dataclass
class Report:
    """What a person who looks into a bug asks for.

    Attributes:
        entries: what is said, by its label.
        problems: a line for each, with its cause and its cure.
    """

    entries: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def doctor(context: typer.Context) -> None:
    """Say what this machine has, what pyh2o uses of it, and what is wrong: for the report of a bug.

    Your home folder is shown as ~; keys, and the names of conversations, are not shown. The exit
    code is 1 if there are problems, each with what to do about it.
    """
    with reported_errors():
        report = Report()
        not_loaded = why_not_loaded()
        _look_at_program(report, not_loaded)
        _look_at_processor(report, "" if not_loaded else machine.built_for())
        _look_at_memory(report)
        if not_loaded is None:
            devices = _devices()
            _look_at_products(report, on_gpus=bool(devices))
            _look_at_gpus(report, devices)
        _look_at_models(report)
        _look_at_sessions(report)
        _look_at_configuration(report, context.find_root().command)
        lines = [line for label, said in report.entries.items() for line in entry(label, said)]
        terminal.write(without_home(harmless("".join(lines))))
        if not report.problems:
            terminal.write("".join(entry("problems", ["none found"])))
        for problem in report.problems:
            line = f"  problem       {without_home(problem)}"
            terminal.write(f"{paint(line, Style(color='yellow'))}\n")
    if report.problems:
        raise typer.Exit(EXIT_ERROR)


def without_home(text: str) -> str:
    """The text with ~ for the user's home folder, whose path has the user's name."""
    home = expanded("~")
    for path in {str(home), str(home.resolve())} - {"/"}:
        shown = r"\s+".join(map(re.escape, path.split(" ")))  # also where a line ends amid it
        text = re.sub(rf"(?<![\w.~-]){shown}(?![\w.-])", "~", text)
    return text


# -------------------------------------------------------------------------------------------------
# The program and the machine
# -------------------------------------------------------------------------------------------------


def why_not_loaded() -> str | None:
    """Why llama.cpp's library cannot be loaded, and what to do about it; None where it can.

    A library that was built for another processor, or the driver of a GPU, may end the program. So
    another process tries it first, unless it is loaded here already.
    """
    if "pyh2o._native._ffi" not in sys.modules and (ended := _how_it_ends()):
        return f"llama.cpp's library ends the program that loads it ({ended}): {REINSTALL}"
    try:
        _devices()
    except PyH2OError as error:
        return str(error)
    except (ImportError, OSError, RuntimeError) as error:
        return f"llama_cpp cannot be loaded ({error}): {REINSTALL}"
    return None


def _how_it_ends() -> str | None:
    """Which signal ends a process that loads the library, or that it hangs; None for neither."""
    load = "from pyh2o.library.backends import local_devices; local_devices()"
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {load}"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return f"it takes more than {PATIENCE} seconds"
    return signal.Signals(-done.returncode).name if done.returncode < 0 else None


def _devices() -> list[Device]:
    # Imported here because it loads llama.cpp, which may not be possible.
    from pyh2o.library.backends import local_devices

    return local_devices()


def _look_at_program(report: Report, not_loaded: str | None) -> None:
    build, installed = _build_info(), None
    with suppress(metadata.PackageNotFoundError):
        installed = metadata.version("llama-cpp-python")
    parts = [pyh2o.__version__, f"llama-cpp-python {installed or 'is not installed'}"]
    if build:
        parts += [
            f"llama.cpp {build['llama_cpp_commit'][:_DIGITS]}",
            f"ggml {build['ggml']}",
            f"patches {build['patches'][:_DIGITS]}",
            f"backends {' '.join(build['backends'])}",
        ]
    if not_loaded is None:
        from pyh2o.library.backends import cpu_library

        libraries = f"of which {Path(cpu_library()).name} computes on the processor"
    else:
        libraries = "which cannot be loaded"
        report.problems.append(not_loaded)
    report.entries["pyh2o"] = [", ".join(parts), f"{LIBRARY_FOLDER}, {libraries}"]
    python = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    report.entries["python"] = [python]
    built_with = build.get("llama_cpp_python")
    if built_with and installed not in (None, built_with):
        report.problems.append(
            f"llama-cpp-python {installed} is installed, and pyh2o was built for {built_with}: "
            "SKBUILD_WHEEL_CMAKE=false pip install --no-cache-dir "
            f"llama-cpp-python=={built_with}"
        )


def _build_info() -> dict[str, Any]:
    try:
        return pyh2o.build_info()
    except (OSError, ValueError):
        return {}


def _look_at_processor(report: Report, built_for: str) -> None:
    busy = psutil.cpu_percent(_LOOK)
    logical = psutil.cpu_count() or 1
    cores = f"{count(psutil.cpu_count(logical=False) or logical, 'core')}, "
    cores += count(logical, "thread")
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    if allowed < logical:
        cores += f", of which this process may use {allowed}"
    if (quota := cpu_quota()) is not None:
        cores += f", a container's limit of {quota:g} CPUs"
    said = [machine.cpu_name(), f"{cores}: {physical_cores()} used by default"]
    if n_busy := round(busy / 100 * logical):
        cpus = f"{n_busy} of {count(logical, 'CPU')}"
        said.append(f"other programs keep {cpus} busy: generation will be slower")
    sets = machine.instruction_sets()
    kernel = machine.attention_kernel(sets)
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    libc = " ".join(platform.libc_ver()).strip()
    report.entries["system"] = [", ".join(filter(None, [system, libc]))]
    report.entries["processor"] = said
    report.entries["instructions"] = [" ".join(sets) or "not known"]
    name = "plain C++" if kernel == "portable" else kernel
    attention = f"{name}, for rows of f32, f16, q8_0 and q4_0 alike" if kernel else "not known"
    report.entries["attention"] = [attention]
    if missing := machine.missing_sets(built_for, sets):
        report.problems.append(
            f"the library was built for a processor with {', '.join(missing)}, which this one "
            f"lacks, so it may end the program: {REINSTALL}"
        )
    if kernel == "portable":
        report.problems.append(
            "attention runs in plain C++, because the processor shows neither AVX2, FMA and F16C "
            "nor NEON: if this is a virtual machine, let it see its host's processor"
        )
    for variant, types in read_verdicts().passed_over.items():
        report.problems.append(f"{passed_over_text(variant, types)}: {CURE}")


def _look_at_memory(report: Report) -> None:
    sizes = {"in all": psutil.virtual_memory().total, "available": available_bytes()}
    if limits := memory_limits():
        sizes["is a container's limit"] = min(limit.bytes for limit in limits)
    parts = [f"{size / 2**30:,.1f} GiB {what}" for what, size in sizes.items()]
    report.entries["memory"] = [", ".join(parts)]


def _look_at_products(report: Report, *, on_gpus: bool) -> None:
    from pyh2o.library.backends import weight_types
    from pyh2o.library.products import find_products

    lines = []
    for place in sorted({False, on_gpus}):
        products = find_products(weight_types(), on_gpus=place, anew=True)
        where = f"{products.gpus}: " if products.gpus else ""
        right = " ".join(products.right) or "none"
        types = count(len(products.right), "type")
        lines.append(f"{where}{types} of weights, as NumPy has them: {right}")
        if products.unknown:
            lines.append(f"{where}not tried: {' '.join(products.unknown)}")
        report.problems.extend(products.problems())
    report.entries["products"] = lines


def _look_at_gpus(report: Report, devices: Sequence[Device]) -> None:
    gpus = [
        f"{gpu.name}, {gpu.free_bytes() / 2**30:,.1f} of {gpu.total_bytes() / 2**30:,.1f} GiB free"
        for gpu in devices
    ] or ["none that this build can use"]
    driver = [f"driver of NVIDIA {_NVIDIA.read_text().strip()}"] if _NVIDIA.exists() else []
    report.entries["gpus"] = gpus + driver
    # Without a driver a build for the CPU alone has nothing that it could use.
    is_for_gpus = any(name in _build_info().get("backends", ()) for name in GPU_BACKENDS)
    if not devices and (is_for_gpus or driver):
        from pyh2o.library.devices import why_no_gpu

        report.problems.append(str(why_no_gpu()))


# -------------------------------------------------------------------------------------------------
# The user's folders and defaults
# -------------------------------------------------------------------------------------------------


def _look_at_models(report: Report) -> None:
    fetched = []
    with suppress(OSError):  # what cannot be read cannot be written to, which is a problem
        fetched = [model for model in list_models() if model.fetched]
    sizes, names = [model.bytes for model in fetched], ", ".join(model.name for model in fetched)
    _look_at_folder(report, "models", models_folder(), "PYH2O_MODELS", sizes)
    report.entries["models"] += filter(None, [names])


def _look_at_sessions(report: Report) -> None:
    sizes = []
    with suppress(OSError):
        sizes = [chat.n_bytes for chat in saved_chats()]
    # What people call their conversations is not for others.
    _look_at_folder(report, "sessions", chats_folder(), "PYH2O_CHATS", sizes)


def _look_at_folder(
    report: Report, keeps: str, folder: Path, variable: str, sizes: Sequence[int]
) -> None:
    """Whether there is room in a folder, which need not exist, and whether it can be written to."""
    # exists() of a path raises where it cannot be looked at
    nearest = next(p for p in (folder, *folder.parents) if os.path.exists(p))  # noqa: PTH110
    state = f"{count(len(sizes), keeps.removesuffix('s'))}, {sum(sizes) / 1e6:,.1f} MB"
    if nearest != folder:
        state = "not there yet"
    free = None
    with suppress(OSError):
        free = shutil.disk_usage(nearest).free
        state += f", {free / 2**30:,.1f} GiB free"
    report.entries[keeps] = [str(folder), state]
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        report.problems.append(
            f"the folder of the {keeps}, {folder}, cannot be written to: make it writable, or set "
            f"{variable} to another folder"
        )
    elif free is not None and free < LEAST_FREE:
        report.problems.append(
            f"the disk of the {keeps}, {folder}, has {free / 2**30:.1f} GiB free: free some, or "
            f"set {variable} to a folder on another disk"
        )


def _look_at_configuration(report: Report, program: Any) -> None:
    path = config_path()
    state = "" if os.path.lexists(path) else ", not there"
    variables = [f"{name} = {value}" for name, value in variables_set().items()]
    report.entries["configuration"] = [f"{path}{state}", *variables]
    try:
        default_map(program, read_sections(path))
    except (InputError, OSError) as error:
        report.problems.append(one_line(error))
