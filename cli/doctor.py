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

import pyh2o
from pyh2o.library import GPU_BACKENDS, LIBRARY_FOLDER, machine
from pyh2o.library.verdicts import CURE, passed_over_text, read_verdicts
from pyh2o.models import list_models, models_folder
from pyh2o.sessions.saved import chats_folder
from pyh2o.system.home import expanded
from pyh2o.system.memory import available_bytes
from pyh2o.system.threads import cpu_quota, physical_cores

from .config import config_path, default_map, read_sections
from .errors import EXIT_ERROR, InputError, one_line, reported_errors
from .terminal.terminal import harmless, terminal
from .terminal.wording import count, entry

if TYPE_CHECKING:
    from pyh2o.library.backends import Device

REINSTALL = "install pyh2o again, on this machine"
MIN_FREE = 2 * 2**30
"""Bytes that a disk should have left: a small model, or some long conversations."""
PATIENCE = 120
"""Seconds that loading the library may take, and looking for GPUs."""

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
        _look_at_machine(report, "" if not_loaded else machine.built_for())
        if not_loaded is None:
            devices = _devices()
            _look_at_products(report, on_gpus=bool(devices))
            _look_at_gpus(report, devices)
        _look_at_folders(report)
        _look_at_configuration(report, context.find_root().command)
        lines = [entry(label, said) for label, said in report.entries.items()]
        lines += [entry("problem", [problem]) for problem in report.problems]
        if not report.problems:
            lines.append(entry("problems", ["none found"]))
        terminal.write(without_home(harmless("".join(lines))))
    if report.problems:
        raise typer.Exit(EXIT_ERROR)


def without_home(text: str) -> str:
    """The text with ~ for the user's home folder, whose path has the user's name."""
    home = expanded("~")
    for path in {str(home), str(home.resolve())} - {"/"}:
        text = re.sub(rf"(?<![\w.~-]){re.escape(path)}(?![\w.-])", "~", text)
    return text


def why_not_loaded() -> str | None:
    """Why llama.cpp's library cannot be loaded, and what to do about it; None where it can.

    A library that was built for another processor, or the driver of a GPU, may end the program. So
    another process tries it, unless it is loaded here already.
    """
    if "pyh2o._native._ffi" in sys.modules:
        return None
    load = "from pyh2o.library.backends import local_devices; local_devices()"
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {load}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        reason = f"it takes more than {PATIENCE} seconds"
    else:
        if done.returncode == 0:
            return None
        killed_by = signal.Signals(-done.returncode).name if done.returncode < 0 else ""
        reason = killed_by or done.stderr.strip().rpartition("\n")[2]
    return f"llama.cpp's library cannot be loaded ({reason}): {REINSTALL}"


def _devices() -> list[Device]:
    # Imported here because it loads llama.cpp, which may not be possible.
    from pyh2o.library.backends import local_devices

    return local_devices()


def _look_at_program(report: Report, not_loaded: str | None) -> None:
    build, installed = _build_info(), None
    with suppress(metadata.PackageNotFoundError):
        installed = metadata.version("llama-cpp-python")
    parts = [
        f"{name} {' '.join(value) if isinstance(value, list) else value}"
        for name, value in build.items()
    ]
    if not_loaded is None:
        from pyh2o.library.backends import cpu_library

        libraries = f"of which {Path(cpu_library()).name} computes on the processor"
    else:
        libraries = "which cannot be loaded"
        report.problems.append(not_loaded)
    report.entries["pyh2o"] = [pyh2o.__version__, *parts, f"{LIBRARY_FOLDER}, {libraries}"]
    python = f"{platform.python_version()}, {sys.executable}"
    report.entries["python"] = [python, f"llama-cpp-python {installed or 'is not installed'}"]
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


def _look_at_machine(report: Report, built_for: str) -> None:
    cores = count(psutil.cpu_count(logical=False) or 1, "core")
    threads = count(psutil.cpu_count() or 1, "thread")
    quota = cpu_quota()
    limit = "" if quota is None else f", a container's limit of {quota:g} CPUs"
    used = f"{cores}, {threads}{limit}: {physical_cores()} used by default"
    sets = machine.instruction_sets()
    report.entries["system"] = [platform.platform()]
    report.entries["processor"] = [machine.cpu_name(), used]
    report.entries["instructions"] = [" ".join(sets) or "not known"]
    total, available = psutil.virtual_memory().total / 2**30, available_bytes() / 2**30
    report.entries["memory"] = [f"{total:,.1f} GiB, of which {available:,.1f} are available"]
    if missing := machine.missing_sets(built_for, sets):
        report.problems.append(
            f"the library was built for a processor with {', '.join(missing)}, which this one "
            f"lacks, so it may end the program: {REINSTALL}"
        )
    for variant, types in read_verdicts().passed_over.items():
        report.problems.append(f"{passed_over_text(variant, types)}: {CURE}")


def _look_at_products(report: Report, *, on_gpus: bool) -> None:
    from pyh2o.library.backends import weight_types
    from pyh2o.library.products import find_products

    lines = []
    for place in sorted({False, on_gpus}):
        products = find_products(weight_types(), on_gpus=place, anew=True)
        where = f"{products.gpus}: " if products.gpus else ""
        right = " ".join(products.right) or "none"
        types = count(len(products.right), "type")
        lines.append(f"{where}{types} multiplied as NumPy does: {right}")
        if products.unknown:
            lines.append(f"{where}not tried: {' '.join(products.unknown)}")
        report.problems.extend(products.problems())
    report.entries["weights"] = lines


def _look_at_gpus(report: Report, devices: Sequence[Device]) -> None:
    gpus = [f"{gpu.name}, {gpu.free_bytes() / 2**30:,.1f} GiB free" for gpu in devices] or [
        "none that this build can use"
    ]
    driver = [f"driver of NVIDIA {_NVIDIA.read_text().strip()}"] if _NVIDIA.exists() else []
    report.entries["gpus"] = gpus + driver
    # Without a driver a build for the CPU alone has nothing that it could use.
    is_for_gpus = any(name in _build_info().get("backends", ()) for name in GPU_BACKENDS)
    if not devices and (is_for_gpus or driver):
        from pyh2o.library.devices import why_no_gpu

        report.problems.append(str(why_no_gpu()))


def _look_at_folders(report: Report) -> None:
    """Whether there is room in them, and whether they, which need not exist, can be written to."""
    for keeps, folder, variable in (
        ("models", models_folder(), "PYH2O_MODELS"),
        ("sessions", chats_folder(), "PYH2O_CHATS"),  # whose names are not for others
    ):
        # exists() of a path raises where it cannot be looked at
        nearest = next(p for p in (folder, *folder.parents) if os.path.exists(p))  # noqa: PTH110
        free = shutil.disk_usage(nearest).free
        state = "" if nearest == folder else ", not there yet"
        report.entries[keeps] = [f"{folder}{state}, {free / 2**30:,.1f} GiB free"]
        if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
            report.problems.append(
                f"the folder of the {keeps}, {folder}, cannot be written to: make it writable, or "
                f"set {variable} to another folder"
            )
        elif free < MIN_FREE:
            report.problems.append(
                f"the disk of the {keeps}, {folder}, has {free / 2**30:.1f} GiB free: free some, "
                f"or set {variable} to a folder on another disk"
            )
    with suppress(OSError):  # what cannot be read cannot be written to, which is a problem
        report.entries["models"] += [model.name for model in list_models() if model.fetched]


def _look_at_configuration(report: Report, program: Any) -> None:
    path = config_path()
    state = "" if os.path.lexists(path) else ", not there: all options have their defaults"
    variables = [
        f"{name} = {'...' if name.endswith('_KEY') else os.environ[name]}"
        for name in sorted(os.environ)
        if name.startswith("PYH2O_")
    ]
    report.entries["configuration"] = [f"{path}{state}", *variables]
    try:
        default_map(program, read_sections(path))
    except (InputError, OSError) as error:
        report.problems.append(one_line(error))
