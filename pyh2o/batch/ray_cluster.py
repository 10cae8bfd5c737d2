"""A Ray cluster: joined if there is one, else started on this machine, and shared out."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import MissingPackageError, ServerError, SettingsError
from .running import TICK

# The variable that names a cluster, and its value for one of one's own.
ADDRESS, OWN = "RAY_ADDRESS", "local"
# For the one that Ray finds on this machine.
RUNNING = ""

# Paths of sockets have 107 signs at most, and Ray adds some sixty to its folder.
_LONGEST_FOLDER = 30
# Seconds for a cluster to answer, and for the process to end with what it has started.
_PATIENCE = 10
_END_PATIENCE = 30
_CURE = "see with --verbose what it says, and give the same command again to go on"
_DEATH = f"Ray has ended, or lost its cluster: {_CURE}"

# The process finds pyh2o where this one has found it.
_PROGRAM = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from pyh2o.batch.ray_driver import serve
serve(connection)
"""


@dataclass(frozen=True)
class Start:
    """What the process of Ray is told first.

    Attributes:
        address: of the cluster, `OWN` or `RUNNING`.
        folder: for the files of one of its own.
        verbose: show what Ray and its workers say.
    """

    address: str
    folder: str
    verbose: bool


@dataclass(frozen=True)
class Failed:
    """What the process of Ray says last if that fails: why, in one line."""

    reason: str


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


class Cluster:
    """The cluster that RAY_ADDRESS names or that runs on this machine, or else one of its own.

    Ray is in another process (`ray_driver`): it writes where it likes, ends its process if it loses
    the cluster, and breaks nothing off. So that process can be ended at any time, and a cluster of
    its own with it.

    Attributes:
        machines: of the cluster.
    """

    def __init__(self, *, verbose: bool, check: Callable[[], None]) -> None:
        """Join the cluster, or start one.

        Args:
            verbose: show what Ray and its workers say.
            check: called during the wait; what it raises ends it.

        Raises:
            MissingPackageError: Ray is not installed.
            ServerError: the cluster cannot be joined or started.
            BaseException: what `check` raises.
        """
        check_packages()
        address = _address()
        self._folder = tempfile.TemporaryDirectory(
            prefix="pyh2o-ray-", dir=_short_folder(), ignore_cleanup_errors=True
        )
        self._connection, child = Pipe()
        try:
            with child:
                self._process = _spawn(child, self._folder.name, address, verbose=verbose)
        except BaseException:
            self._connection.close()
            self._folder.cleanup()
            raise
        try:
            self.send(sys.path)
            self.send(Start(address, self._folder.name, verbose))
            machines = None
            while machines is None:
                check()
                machines = self.receive()
            self.machines: list[Machine] = machines
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs on the cluster, and a cluster of its own."""
        self._connection.close()
        self._process.terminate()
        try:
            self._process.wait(_END_PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()

    def send(self, message: Any) -> None:
        """Tell the process something.

        Raises:
            ServerError: it has ended.
        """
        try:
            self._connection.send(message)
        except OSError:
            raise ServerError(_DEATH) from None

    def receive(self) -> Any:
        """What the process says next, or None if that is nothing for a while.

        Raises:
            ServerError: it has ended, or Ray has failed.
        """
        try:
            if not self._connection.poll(TICK):
                return None
            message = self._connection.recv()
        except (EOFError, OSError):
            raise ServerError(_DEATH) from None
        if isinstance(message, Failed):
            raise ServerError(f"Ray failed ({message.reason}): {_CURE}")
        return message


def _spawn(
    connection: Connection, folder: str, address: str, *, verbose: bool
) -> subprocess.Popen[bytes]:
    number = connection.fileno()
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(number)],
        pass_fds=[number],
        stdin=subprocess.DEVNULL,
        stdout=2 if verbose else subprocess.DEVNULL,
        stderr=None if verbose else subprocess.DEVNULL,
        # Ray's workers import from the current folder first, which may be a checkout of pyh2o
        cwd=folder,
        env={**os.environ, **_variables(own=address == OWN)},
        # Ctrl-C is for this process, which then ends that one
        start_new_session=True,
    )


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


def _variables(*, own: bool) -> dict[str, str]:
    """What Ray reads of its environment, and its workers of theirs."""
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",  # they would be reported over the network
        # what Ray Data still does when a run is broken off would enter a cluster again
        "RAY_ENABLE_AUTO_CONNECT": "0",
        # leave the variables of CUDA as they are where no GPU is asked for
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    if own:
        # Ray listens on all addresses of the machine and runs what it is told: let nobody in. The
        # token is of this run; without one Ray would leave one in the user's home.
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return variables


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
