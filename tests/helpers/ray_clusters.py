"""A Ray cluster for the tests, which always ends with them."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

_PROGRAM = """
import sys
import ray

ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[1])
print("at", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def two_workers() -> Iterator[int]:
    """Start a cluster with two CPUs, which RAY_ADDRESS names. Yield the parent of its processes."""
    with (
        pytest.MonkeyPatch.context() as patch,
        # in /tmp because socket paths must be short
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder,
    ):
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.delenv("RAY_ADDRESS", raising=False)
        command = [sys.executable, "-P", "-c", _PROGRAM, folder]
        if sys.version_info < (3, 11):
            command.remove("-P")
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            try:
                said = next(line for line in process.stdout if line.startswith(b"at "))
                patch.setenv("RAY_ADDRESS", said.split()[1].decode())
                yield process.pid
            finally:
                process.communicate(timeout=60)


def processes_below(pid: int, name: str) -> list[int]:
    """Return the descendants of a process whose command starts with this."""
    found = []
    for each in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if " ".join(each.cmdline()).startswith(name):
                found.append(each.pid)
    return found
