"""A Ray cluster: joined if there is one, else started on this machine, and shared out."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from logging import CRITICAL, getLogger
from pathlib import Path
from typing import Any

from ..errors import MissingPackageError, ServerError, SettingsError
from ..openai.server.refusals import one_line
from ..system.stderr import silenced_stderr

# The variable that names a cluster, and its value for one of one's own.
ADDRESS, OWN = "RAY_ADDRESS", "local"
# For the one that Ray finds on this machine.
RUNNING = ""
# Paths of sockets have 107 signs at most, and Ray adds some sixty to its folder.
_LONGEST_FOLDER = 30
# Seconds for a cluster to answer.
_PATIENCE = 5


@dataclass(frozen=True)
class Machine:
    """What Ray has to give of a machine.

    Attributes:
        cpus: as Ray counts them: threads of the processor, unless it was told otherwise.
        gpus: whole ones.
    """

    cpus: int
    gpus: int = 0


@dataclass(frozen=True)
class Share:
    """What each worker gets.

    Attributes:
        workers: how many there are.
        cpus: of each.
        gpus: of each.
    """

    workers: int
    cpus: int
    gpus: int = 0


def check_packages() -> None:
    """Refuse to start without what is needed.

    Raises:
        MissingPackageError: names what is missing, and the extra that brings it.
    """
    missing = [name for name in ("ray", "pyarrow", "pandas") if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"--ray needs the package {', '.join(missing)}: pip install 'pyh2o-llm[ray]'"
        )


@contextmanager
def cluster(*, verbose: bool) -> Iterator[list[Machine]]:
    """The cluster that RAY_ADDRESS names or that runs on this machine, or else one of its own.

    One of its own ends with the context, and its files with it.

    Args:
        verbose: show what Ray and its workers say.

    Yields:
        Its machines.

    Raises:
        MissingPackageError: Ray is not installed.
        ServerError: the cluster cannot be joined or started.
    """
    check_packages()
    address = _address()
    _set_up(own=address == OWN, verbose=verbose)
    ray = import_module("ray")
    with (
        tempfile.TemporaryDirectory(
            prefix="pyh2o-ray-", dir=_short_folder(), ignore_cleanup_errors=True
        ) as folder,
        Path(os.devnull).open("w") as nowhere,
        # where Ray says that a worker has died, whatever it was told to show
        redirect_stdout(sys.stderr if verbose else nowhere),
    ):
        try:
            with _working_in(folder), nullcontext() if verbose else silenced_stderr():
                _enter(ray, address, folder, verbose=verbose)
            yield [
                Machine(int(each["Resources"].get("CPU", 0)), int(each["Resources"].get("GPU", 0)))
                for each in ray.nodes()
                if each["Alive"]
            ]
        finally:
            ray.shutdown()


def share_out(
    machines: Sequence[Machine],
    *,
    workers: int | None = None,
    threads: int | None = None,
    on_gpu: bool = False,
) -> Share:
    """Decide how many workers there are, and what each gets.

    One engine that has all of a machine is faster than several that share it, and takes the memory
    of one. So the default is a worker for each machine, or for each GPU; machines with less than
    half of the largest one's CPUs are left out. More workers than that get fewer CPUs each.

    Args:
        machines: of the cluster.
        workers: how many; None for as many as there is room for.
        threads: CPUs of each; None to decide.
        on_gpu: whether each takes a GPU.

    Raises:
        SettingsError: there is no room for so many.
    """
    usable = [each for each in machines if each.cpus and (each.gpus or not on_gpu)]
    if not usable:
        missing = "GPU: leave --gpu-layers out" if on_gpu else "CPU for work: add machines to it"
        raise SettingsError(f"the Ray cluster has no {missing}")

    def room(cpus: int) -> int:
        fitting = [each.cpus // cpus for each in usable]
        return sum(map(min, fitting, [each.gpus for each in usable]) if on_gpu else fitting)

    cpus = threads
    if cpus is None:
        fair = [max(1, each.cpus // each.gpus) if on_gpu else each.cpus for each in usable]
        cpus = min(each for each in fair if 2 * each >= max(fair))
        while cpus > 1 and room(cpus) < (workers or 1):
            cpus -= 1
    most = room(cpus)
    if most < (workers or 1):
        size = f"{cpus} CPU{'s' * (cpus > 1)}"
        if not most:
            raise SettingsError(
                f"the Ray cluster has room for no worker of {size}: give fewer --threads"
            )
        raise SettingsError(
            f"the Ray cluster has room for {most} worker{'s' * (most > 1)} of {size}, not for "
            f"{workers}: give fewer --workers"
        )
    return Share(workers or most, cpus, int(on_gpu))


def _set_up(*, own: bool, verbose: bool) -> None:
    """Set what Ray reads when it is imported."""
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",  # they would be reported over the network
        # what Ray Data still does when a run is broken off would enter another cluster
        "RAY_ENABLE_AUTO_CONNECT": "0",
        # leave the variables of CUDA as they are where no GPU is asked for
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    if not verbose:
        variables["RAY_BACKEND_LOG_LEVEL"] = "fatal"
    if own:
        # Ray listens on all addresses of the machine and runs what it is told: let nobody in. The
        # token is of this run; without one Ray would leave one in the user's home.
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.update(variables)


def _enter(ray: Any, address: str, folder: str, *, verbose: bool) -> None:
    shown: dict[str, Any] = {"log_to_driver": verbose}
    if not verbose:
        import_module("ray.data")
        getLogger("ray.data").setLevel(CRITICAL)
        shown["logging_level"] = CRITICAL
    started = {"include_dashboard": False, "_temp_dir": folder} if address == OWN else {}
    try:
        ray.init(address or None, **started, **shown)
    except (OSError, RuntimeError, ValueError) as error:
        raise ServerError(
            f"cannot {'start a' if address == OWN else 'join the'} Ray cluster "
            f"({one_line(str(error))}): see with --verbose what Ray says"
        ) from error


def _address() -> str:
    """The cluster to join, or `OWN`.

    Raises:
        ServerError: nobody answers where RAY_ADDRESS says; Ray would try for minutes.
    """
    named = os.environ.get(ADDRESS)
    if not named:
        folder = "/tmp" if sys.platform == "darwin" else tempfile.gettempdir()
        with suppress(OSError):  # `ray start` has written it, on this machine
            if _answers(Path(folder, "ray", "ray_current_cluster").read_text().strip()):
                return RUNNING
        return OWN
    if named != OWN and not _answers(named):
        raise ServerError(
            f"no Ray cluster answers at {named!r} ({ADDRESS}): give host:port of one that runs, on "
            f"a machine of it, or {OWN} for one of this machine alone"
        )
    return named


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_PATIENCE):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _short_folder() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder) <= _LONGEST_FOLDER else "/tmp"


@contextmanager
def _working_in(folder: str) -> Iterator[None]:
    """Ray has its workers import from the current folder first, which may be a checkout."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
