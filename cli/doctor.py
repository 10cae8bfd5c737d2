"""`pyh2o doctor`: report the machine, what pyh2o uses of it, and problems.

It works even if llama.cpp's library cannot be loaded, and reports the reason.
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
from pyh2o.sessions.chats import chats_folder
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
"""Minimum free bytes of a disk: a small model, or some long conversations."""
PATIENCE = 120
"""Timeout for loading the library and detecting GPUs, in seconds."""

_NVIDIA = Path("/sys/module/nvidia/version")


@dataclass
class Report:
    """A report: lines by label, and a line for each problem with cause and remedy."""

    entries: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def doctor(context: typer.Context) -> None:
    """Report this machine, what pyh2o uses of it, and problems, for example for a bug report.

    Your home folder is shown as ~. Keys and the names of conversations are not shown. The exit code
    is 1 if there are problems; each has a remedy.
    """
    with reported_errors():
        report = Report()
        not_loaded = why_not_loaded()
        _report_program(report, not_loaded)
        _report_machine(report, "" if not_loaded else machine.built_for())
        if not_loaded is None:
            devices = _devices()
            _report_products(report, on_gpus=bool(devices))
            _report_gpus(report, devices)
        _report_folders(report)
        _report_configuration(report, context.find_root().command)
        lines = [entry(label, said) for label, said in report.entries.items()]
        lines += [entry("problem", [problem]) for problem in report.problems]
        if not report.problems:
            lines.append(entry("problems", ["none found"]))
        terminal.write(without_home(harmless("".join(lines))))
    if report.problems:
        raise typer.Exit(EXIT_ERROR)


def without_home(text: str) -> str:
    """Replace the user's home folder by ~, as its path contains the user's name."""
    home = expanded("~")
    for path in {str(home), str(home.resolve())} - {"/"}:
        text = re.sub(rf"(?<![\w.~-]){re.escape(path)}(?![\w.-])", "~", text)
    return text


def why_not_loaded() -> str | None:
    """Return why llama.cpp's library cannot be loaded, with a remedy; None if it can.

    Another process tries it, as a library for another processor or a GPU driver may crash.
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
        reason = f"it took more than {PATIENCE} seconds"
    else:
        if done.returncode == 0:
            return None
        killed_by = signal.Signals(-done.returncode).name if done.returncode < 0 else ""
        reason = killed_by or done.stderr.strip().rpartition("\n")[2]
    return f"llama.cpp's library cannot be loaded ({reason}): {REINSTALL}"


def _devices() -> list[Device]:
    # imported here because it loads llama.cpp, which may fail
    from pyh2o.library.backends import local_devices

    return local_devices()


def _report_program(report: Report, not_loaded: str | None) -> None:
    build, installed = _build_info(), None
    with suppress(metadata.PackageNotFoundError):
        installed = metadata.version("llama-cpp-python")
    parts = [
        f"{name} {' '.join(value) if isinstance(value, list) else value}"
        for name, value in build.items()
    ]
    if not_loaded is None:
        from pyh2o.library.backends import cpu_library

        libraries = f"with {Path(cpu_library()).name} for the processor"
    else:
        libraries = "which cannot be loaded"
        report.problems.append(not_loaded)
    report.entries["pyh2o"] = [pyh2o.__version__, *parts, f"{LIBRARY_FOLDER}, {libraries}"]
    python = f"{platform.python_version()}, {sys.executable}"
    report.entries["python"] = [python, f"llama-cpp-python {installed or 'is not installed'}"]
    built_with = build.get("llama_cpp_python")
    if built_with and installed not in (None, built_with):
        report.problems.append(
            f"llama-cpp-python {installed} is installed, but pyh2o was built for {built_with}: "
            "SKBUILD_WHEEL_CMAKE=false pip install --no-cache-dir "
            f"llama-cpp-python=={built_with}"
        )


def _build_info() -> dict[str, Any]:
    try:
        return pyh2o.build_info()
    except (OSError, ValueError):
        return {}


def _report_machine(report: Report, built_for: str) -> None:
    cores = count(psutil.cpu_count(logical=False) or 1, "core")
    threads = count(psutil.cpu_count() or 1, "thread")
    quota = cpu_quota()
    limit = "" if quota is None else f", container limit of {quota:g} CPUs"
    used = f"{cores}, {threads}{limit}: {physical_cores()} used by default"
    sets = machine.instruction_sets()
    report.entries["system"] = [platform.platform()]
    report.entries["processor"] = [machine.cpu_name(), used]
    report.entries["instructions"] = [" ".join(sets) or "unknown"]
    total, available = psutil.virtual_memory().total / 2**30, available_bytes() / 2**30
    report.entries["memory"] = [f"{total:,.1f} GiB, of which {available:,.1f} are available"]
    if missing := machine.missing_sets(built_for, sets):
        report.problems.append(
            f"the library was built for a processor with {', '.join(missing)}, which this one "
            f"lacks, so the program may crash: {REINSTALL}"
        )
    for variant, types in read_verdicts().passed_over.items():
        report.problems.append(f"{passed_over_text(variant, types)}: {CURE}")


def _report_products(report: Report, *, on_gpus: bool) -> None:
    from pyh2o.library.backends import weight_types
    from pyh2o.library.products import find_products

    lines = []
    for place in sorted({False, on_gpus}):
        products = find_products(weight_types(), on_gpus=place, anew=True)
        where = f"{products.gpus}: " if products.gpus else ""
        right = " ".join(products.right) or "none"
        types = count(len(products.right), "type")
        lines.append(f"{where}{types} give correct products: {right}")
        if products.unknown:
            lines.append(f"{where}not tested: {' '.join(products.unknown)}")
        report.problems.extend(products.problems())
    report.entries["weights"] = lines


def _report_gpus(report: Report, devices: Sequence[Device]) -> None:
    gpus = [f"{gpu.name}, {gpu.free_bytes() / 2**30:,.1f} GiB free" for gpu in devices] or [
        "none that this build can use"
    ]
    driver = [f"driver of NVIDIA {_NVIDIA.read_text().strip()}"] if _NVIDIA.exists() else []
    report.entries["gpus"] = gpus + driver
    # a CPU build without a driver is not a problem
    is_for_gpus = any(name in _build_info().get("backends", ()) for name in GPU_BACKENDS)
    if not devices and (is_for_gpus or driver):
        from pyh2o.library.devices import why_no_gpu

        report.problems.append(str(why_no_gpu()))


def _report_folders(report: Report) -> None:
    """Report the folders, and check their free space and permissions."""
    for keeps, folder, variable in (
        ("models", models_folder(), "PYH2O_MODELS"),
        ("sessions", chats_folder(), "PYH2O_CHATS"),  # without their names, which are private
    ):
        # Path.exists() raises for folders without permission
        nearest = next(p for p in (folder, *folder.parents) if os.path.exists(p))  # noqa: PTH110
        free = shutil.disk_usage(nearest).free
        state = "" if nearest == folder else ", does not exist yet"
        report.entries[keeps] = [f"{folder}{state}, {free / 2**30:,.1f} GiB free"]
        if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
            report.problems.append(
                f"the {keeps} folder {folder} is not writable: make it writable, or set {variable} "
                "to another folder"
            )
        elif free < MIN_FREE:
            report.problems.append(
                f"the disk of the {keeps} folder {folder} has only {free / 2**30:.1f} GiB free: "
                f"free some space, or set {variable} to a folder on another disk"
            )
    with suppress(OSError):  # an unreadable folder is reported above
        report.entries["models"] += [model.name for model in list_models() if model.fetched]


def _report_configuration(report: Report, program: Any) -> None:
    path = config_path()
    state = "" if os.path.lexists(path) else ", does not exist: all options have their defaults"
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
