"""`pyh2o serve`: sessions that a client begins, goes on with and changes."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from faulty_process import NO_TROUBLE, PATIENCE, Program, Trouble
from pyh2o.sessions.headers import CONVERSATION
from pyh2o.sessions.session_file import read_session
from saved_states import State, conversation_state, steps_done
from subject import CACHE, Found, check_end, emptied

STEPS: list[tuple[str, str, Any]] = [
    ("POST", "", {"name": "talk", "sampling": {"seed": 5}}),
    ("POST", "/talk/answers", {"message": "There was a keeper called Orsovane.", "max_tokens": 9}),
    ("POST", "/talk/answers", {"message": "Go on.", "max_tokens": 9}),
    ("POST", "/talk/pins", {"start": 8, "end": 12}),
    ("POST", "/talk/answers", {"regenerate": True, "max_tokens": 9}),
    ("POST", "/talk/undo", {}),
    ("PATCH", "/talk", {"system": "Be brief."}),
    ("POST", "/talk/answers", {"edit": "Somebody lived there, who never slept.", "max_tokens": 9}),
    ("PATCH", "/talk", {"sampling": {"temperature": 0.5}}),
    ("POST", "/talk/answers", {"message": "Why?", "max_tokens": 9}),
]


class ServerError(Exception):
    """The server has gone, or says that it could not do it."""


class Server:
    """`pyh2o serve`, and a client of its sessions."""

    name = "server"

    def __init__(self, model: Path) -> None:
        self._arguments = ["serve", "--port=0", "--texts=2", "-m", str(model), *CACHE]
        self.n_operations = 0
        self.states: list[State] = []

    def prepare(self, folder: Path) -> None:
        """Find out what is saved after each step."""
        self.states = []
        with self._running(emptied(folder)) as (_, ask):
            for step in STEPS:
                ask(*step)
                self.states.append(self._state(folder))
        self.n_operations = self._ended.n_operations

    def check(self, folder: Path, trouble: Trouble) -> Found:
        """As `Subject` says."""
        n_said = 0
        with self._running(folder, trouble) as (_, ask), suppress(ServerError, OSError):
            for n, step in enumerate(STEPS, start=1):
                ask(*step)
                n_said = n
        ended = self._ended
        check_end(ended, trouble)
        state = self._state(folder) if (folder / "talk.h2o").exists() else None
        n_done = steps_done(self.states, state, n_said)
        with self._running(folder) as (_, ask):
            for step in STEPS[n_done:]:
                ask(*step)
        assert self._state(folder) == self.states[-1]
        return Found(ended, n_said == len(STEPS))

    def _state(self, folder: Path) -> State:
        path = folder / "talk.h2o"
        header = read_session(path, CONVERSATION).header
        return *conversation_state(path), header["system"], header["sampling"]["temperature"]

    @contextmanager
    def _running(
        self, folder: Path, trouble: Trouble = NO_TROUBLE
    ) -> Iterator[tuple[Program, Callable[[str, str, Any], None]]]:
        """The server while it runs; how it ended is in `_ended` then."""
        program = Program(folder, self._arguments, trouble)
        try:
            port = self._port(program)
            yield program, lambda method, route, body: ask(port, method, route, body)
        finally:
            if program.is_running():
                program.interrupt()
            self._ended = program.wait()

    @staticmethod
    def _port(program: Program) -> int:
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", program.notes())):
            assert program.is_running(), program.notes()
            assert time.monotonic() < deadline, program.notes()
            time.sleep(0.005)
        return int(found[1])


def ask(port: int, method: str, route: str, body: Any) -> None:
    """Ask for a change, and wait until it is said to be done.

    Raises:
        ServerError: it was not.
        OSError: the server has gone.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, "/v1/sessions" + route, json.dumps(body), headers)
        response = connection.getresponse()
        answer = response.read().decode()
    except http.client.HTTPException as error:
        raise ServerError(repr(error)) from None
    finally:
        connection.close()
    is_done = '"type": "done"' in answer and "[DONE]" in answer if "/answers" in route else True
    if response.status != 200 or not is_done:
        raise ServerError(answer)
