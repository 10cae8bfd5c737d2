"""Copies of this process that try what may end it, and tell what they find out.

Whoever makes one has a single thread: no other comes along, and a lock that it held stays locked.
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
"""Seconds after which a fork hangs that takes no time of the processor."""


class Fork:
    """A copy of this process from here on, which tells this one something: lines of JSON."""

    def __init__(self) -> None:
        sys.stdout.flush()  # or both would write what is still to be written
        sys.stderr.flush()
        get, give = os.pipe()
        self._pid = os.fork()
        os.close(get if self.is_here else give)
        self._pipe = os.fdopen(give, "w") if self.is_here else os.fdopen(get)
        if self.is_here:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    @property
    def is_here(self) -> bool:
        """Whether this process is the copy."""
        return self._pid == 0

    def tell(self, answer: dict[str, Any]) -> None:
        """Tell the process that made this one."""
        print(json.dumps(answer), file=self._pipe, flush=True)

    def leave(self, answer: dict[str, Any]) -> NoReturn:
        """Tell it, and end."""
        self.tell(answer)
        os._exit(0)

    def answers(self) -> Iterator[dict[str, Any]]:
        """What it tells until it ends."""
        return map(json.loads, self._pipe)

    def end(self) -> str | None:
        """Wait for its end; returns what it ended by, or None if it ended well."""
        self._pipe.close()
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return signal.Signals(-code).name
        return f"exit code {code}" if code else None


def answer_of(fork: Fork) -> dict[str, Any]:
    """The only answer of a fork; `wrong` says how it ended without one."""
    answers = list(fork.answers())
    ended = fork.end()
    if ended is not None or len(answers) != 1:
        return {"wrong": f"it ended by {ended}, with {len(answers)} answers"}
    return answers[0]


def in_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What something returns in a fork; `wrong` says what it raised or how it ended."""
    fork = Fork()
    if fork.is_here:
        fork.leave(returned(work))
    return answer_of(fork)


def returned(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What something returns; `wrong` says what it raised."""
    try:
        return work()
    except BaseException as error:
        return {"wrong": f"{type(error).__name__}: {error}"}


def allow_seconds(seconds: int) -> None:
    """Let the kernel end this process if what comes next takes more of the processor's time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    until = int(usage.ru_utime + usage.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
    signal.alarm(PATIENCE)
