"""Forks of this process for work that may end the process.

The process must have a single thread: a fork has no others, and their locks would stay locked.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

PATIENCE = 300
"""Seconds after which a fork that uses no processor time is ended."""


class Fork:
    """A copy of this process, which sends results as lines of JSON."""

    def __init__(self) -> None:
        sys.stdout.flush()  # otherwise both write what is buffered
        sys.stderr.flush()
        read_end, write_end = os.pipe()
        self._pid = os.fork()
        os.close(read_end if self.is_here else write_end)
        self._pipe = os.fdopen(write_end, "w") if self.is_here else os.fdopen(read_end)
        if self.is_here:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    @property
    def is_here(self) -> bool:
        """Whether this process is the fork."""
        return self._pid == 0

    def send(self, answer: dict[str, Any]) -> None:
        """Send a result to the parent."""
        print(json.dumps(answer), file=self._pipe, flush=True)

    def leave(self, answer: dict[str, Any]) -> NoReturn:
        """Send a result, and end the fork."""
        self.send(answer)
        os._exit(0)

    def answers(self) -> Iterator[dict[str, Any]]:
        """Return the results that the fork sends until it ends."""
        return map(json.loads, self._pipe)

    def end(self) -> str | None:
        """Wait for the end; return the signal or exit code, or None for success."""
        self._pipe.close()
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return signal.Signals(-code).name
        return f"exit code {code}" if code else None


def answer_of(fork: Fork) -> dict[str, Any]:
    """Return the only result of a fork; `wrong` says how it ended without one."""
    answers = list(fork.answers())
    ended = fork.end()
    if ended is not None or len(answers) != 1:
        return {"wrong": f"the fork ended with {ended} and {len(answers)} results"}
    return answers[0]


def in_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a function returns in a fork; `wrong` has its exception or how it ended."""
    fork = Fork()
    if fork.is_here:
        fork.leave(returned(work))
    return answer_of(fork)


def returned(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a function returns; `wrong` has its exception."""
    try:
        return work()
    except BaseException as error:
        return {"wrong": f"{type(error).__name__}: {error}"}


def allow_seconds(seconds: int) -> None:
    """Let the kernel end this process after this much more processor time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    until = int(usage.ru_utime + usage.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
    signal.alarm(PATIENCE)
