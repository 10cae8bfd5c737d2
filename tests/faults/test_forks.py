"""What a fork tells, and how it is known that it did not get that far."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from forks import allow_seconds, in_fork

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no forks")


def test_fork_tells_what_it_found_or_what_it_ended_by() -> None:
    def dies() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def hangs() -> dict[str, Any]:
        allow_seconds(1)
        while True:
            pass

    assert in_fork(lambda: {"pid": os.getpid()})["pid"] != os.getpid()
    assert in_fork(lambda: {}["missing"]) == {"wrong": "KeyError: 'missing'"}
    assert in_fork(dies) == {"wrong": "it ended by SIGKILL, with 0 answers"}
    assert in_fork(hangs) == {"wrong": "it ended by SIGXCPU, with 0 answers"}
    assert in_fork(lambda: os._exit(3)) == {"wrong": "it ended by exit code 3, with 0 answers"}
