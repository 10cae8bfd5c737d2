"""Kill programs at random moments and check what they have saved.

    python tests/faults/kills.py --kills 1000

`chat`, `generate -o`, `batch` and `serve` are killed, their files are read, and they are started
again. Nothing that was typed, or printed more than two seconds before the kill, may be lost.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parents[1] / "helpers"
CACHE = ["--ctx=512", "--hh=80", "--recent=32", "--slack=8", "--recall=16"]
SAMPLING = ["--seed=7", "--temp=1", "--top-k=40"]
MESSAGES = ["There was a keeper called Orsovane.", "Tell me more.", "Who was it?"]
LAST_MESSAGE = "And then?"
PROMPTS = [f"Chapter {n}. It was a {word}" for n, word in enumerate("abcdefgh")]
# Programs of a test record an answer more often than every two seconds. A loaded machine is slow.
SECONDS, DELAY = 0.1, 0.4
PATIENCE = 120


class Program:
    """A command of `pyh2o` in a fork, as starting Python takes longer than a tiny model's answer.

    Args:
        folder: working folder, which also has the chats.
        arguments: arguments of the command.
        lines: standard input.
        kill_after: seconds until it is killed; None to let it end.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        lines: Sequence[str] = (),
        kill_after: float | None = None,
    ) -> None:
        self._out, self._notes = folder.with_name("out"), folder.with_name("notes")
        typed = folder.with_name("in")
        typed.write_text("".join(f"{line}\n" for line in lines))
        for path in (self._out, self._notes):
            path.write_bytes(b"")
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for number, path in enumerate((typed, self._out, self._notes)):
                    os.dup2(os.open(path, os.O_RDWR), number)
                os.chdir(folder)
                _run(folder, arguments)
            finally:
                os._exit(70)
        self.killed_at = float("inf")
        self._killer = 0
        if kill_after is not None:
            self.killed_at = time.monotonic() + kill_after
            self._killer = os.fork()
            if self._killer == 0:
                time.sleep(kill_after)
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                os._exit(0)

    @property
    def out(self) -> str:
        """Standard output so far."""
        return self._out.read_bytes().decode(errors="ignore")

    @property
    def notes(self) -> str:
        """Standard error so far."""
        return self._notes.read_text(errors="replace")

    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait(self) -> str:
        """Wait for the end; return what was printed early enough that it must be saved."""
        saved, deadline = "", time.monotonic() + PATIENCE
        while self.is_running():
            if time.monotonic() < self.killed_at - SECONDS - DELAY:
                saved = self.out
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.005)
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if self._killer:
            os.kill(self._killer, signal.SIGKILL)
            os.waitpid(self._killer, 0)
        expected = (0, -signal.SIGKILL) if self._killer else (0,)
        assert code in expected, f"exit code {code}: {self.notes}"
        return self.out if code == 0 else saved


def _run(folder: Path, arguments: Sequence[str]) -> None:
    # also where the tests run in the background and ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["PYH2O_CHATS"] = str(folder)
    from pyh2o.cli.app import app
    from pyh2o.sessions import text_session

    text_session.SECONDS = SECONDS
    try:
        app(list(arguments), prog_name="pyh2o")
    except SystemExit as ended:
        sys.stdout.flush()
        os._exit(int(ended.code or 0))


def messages_in(folder: Path) -> list[tuple[str, str]]:
    """Return the messages and answers of the saved conversation."""
    from pyh2o.sessions.database import Database

    if not (folder / "chats.db").exists():
        return []
    with Database(folder / "chats.db") as database:
        assert database._db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return [
            (message.user, message.answer)
            for text in database.texts()
            for message in database.read(text.id).messages
        ]


def check_messages(found: Sequence[tuple[str, str]], printed: str) -> None:
    """Check the saved conversation, of which these answers were printed."""
    assert [user for user, _ in found] == MESSAGES[: len(found)], found
    saved, shown = ("".join(each.split()) for each in ("".join(pair[1] for pair in found), printed))
    assert saved.startswith(shown), f"{len(shown)} characters were printed, {len(saved)} are saved"


class Chat:
    """`pyh2o chat`."""

    def __init__(self, model: Path) -> None:
        self._arguments = ["chat", "--session=talk", "--max-tokens=2000", "-m", str(model), *CACHE]

    def run(self, folder: Path, kill_after: float | None) -> None:
        """Run it, check what is saved, and continue."""
        program = Program(folder, [*self._arguments, *SAMPLING], MESSAGES, kill_after)
        printed = program.wait()
        found = messages_in(folder)
        check_messages(found, printed)
        Program(folder, self._arguments, [LAST_MESSAGE]).wait()
        kept = [each for each in found if each[1]]  # a message without an answer was never sent
        after = messages_in(folder)
        assert after[:-1] in (kept, found), (found, after)
        assert after[-1][0] == LAST_MESSAGE


class Story:
    """`pyh2o generate -o`."""

    def __init__(self, model: Path) -> None:
        self._model = ["-m", str(model)]

    def run(self, folder: Path, kill_after: float | None) -> None:
        """Run it, and resume."""
        start = ["generate", "--prompt=Once upon a time", "-n", "8000", "-o", "a.txt"]
        start += [*self._model, *CACHE, *SAMPLING, "--ignore-eos", "--no-loop-guard"]
        program = Program(folder, start, (), kill_after)
        program.wait()
        text = folder / "a.txt"
        written = text.read_bytes() if text.exists() else b""
        resumed = Program(folder, ["generate", "--resume", "-o", "a.txt", *self._model])
        try:
            resumed.wait()
        except AssertionError:
            assert not written, resumed.notes
            Program(folder, start).wait()
        whole = text.read_bytes()
        assert whole.startswith(written), (written, whole)
        assert len(whole) > 4000, f"{len(whole)} bytes, not the whole story: {program.notes}"


class Batch:
    """`pyh2o batch`."""

    def __init__(self, model: Path) -> None:
        self._arguments = ["batch", "../prompts.txt", "-o", "out.jsonl", "-n", "500", "--texts=3"]
        self._arguments += ["-m", str(model), *CACHE, *SAMPLING]

    def run(self, folder: Path, kill_after: float | None) -> None:
        """Run it, and run it again: each request is answered once."""
        folder.with_name("prompts.txt").write_text("".join(f"{each}\n" for each in PROMPTS))
        results = folder / "out.jsonl"
        Program(folder, self._arguments, (), kill_after).wait()
        before = results_in(results) or results_in(folder / "out.jsonl.partial")
        if not results.exists():
            Program(folder, self._arguments).wait()
        after = results_in(results)
        assert before.items() <= after.items(), "a request was answered twice"
        assert len(after) == len(PROMPTS)


def results_in(path: Path) -> dict[str, Any]:
    """Return the responses by request; the last line may be incomplete."""
    found: dict[str, Any] = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        result = json.loads(line) if line.endswith("\n") else None
        if isinstance(result, list):  # of the journal: the number of the request comes first
            result = result[1]
        if isinstance(result, dict) and "response" in result:
            found[result["custom_id"]] = result["response"]["body"]
    return found


class Server:
    """`pyh2o serve`."""

    def __init__(self, model: Path) -> None:
        self._arguments = ["serve", "--port=0", "--texts=2", "-m", str(model), *CACHE]

    def run(self, folder: Path, kill_after: float | None) -> None:
        """Run it, check what is saved, and continue."""
        program = Program(folder, self._arguments, (), kill_after)
        answers: list[str] = []
        with suppress(OSError, http.client.HTTPException):
            made = ask(program, "", {"name": "talk", "sampling": {"seed": 5}})
            for message in MESSAGES:
                answer(program, made, message, answers)
        stop(program)
        found = messages_in(folder)
        check_messages(found, "".join(answers))
        program = Program(folder, self._arguments)
        listed = ask(program, "")["data"]
        made = listed[0] if listed else ask(program, "", {"name": "talk"})
        answer(program, made, LAST_MESSAGE, [])
        stop(program)
        assert messages_in(folder)[-1][0] == LAST_MESSAGE


def ask(program: Program, route: str, body: Any = None) -> Any:
    """Return the JSON of a response."""
    with send(program, route, body) as response:
        content = json.loads(response.read())
    assert response.status == 200, content
    return content


def answer(program: Program, made: Any, message: str, answers: list[str]) -> None:
    """Stream an answer; append what was received early enough that it must be saved."""
    route = f"/{made.get('id', made['name'])}/answers"
    with send(program, route, {"message": message, "max_tokens": 2000}) as response:
        for line in response:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            assert "error" not in event, event
            if time.monotonic() < program.killed_at - SECONDS - DELAY:
                answers.append(event.get("text", ""))


def send(program: Program, route: str, body: Any) -> http.client.HTTPResponse:
    """Send a request to the server's sessions."""
    deadline = time.monotonic() + PATIENCE
    while not (found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", program.notes)):
        if not program.is_running():
            raise ConnectionError(program.notes)
        assert time.monotonic() < deadline, program.notes
        time.sleep(0.005)
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=PATIENCE)
    method = "GET" if body is None else "POST"
    headers = {"Content-Type": "application/json"}
    connection.request(method, f"/v1/sessions{route}", json.dumps(body), headers)
    return connection.getresponse()


def stop(program: Program) -> None:
    """Press Ctrl-C, unless the server was killed."""
    with suppress(ProcessLookupError):
        os.kill(program.pid, signal.SIGINT)
    program.wait()


def main() -> int:
    """Run the trials; return 1 if any of them found something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("subjects", nargs="*", help="chat, story, batch, server; default: all")
    parser.add_argument("--kills", type=int, default=25, help="kills of each program (default 25)")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    os.environ |= {"PYH2O_THREADS": "1", "PYH2O_CONFIG": os.devnull, "PYH2O_GPU_LAYERS": "0"}
    sys.path.insert(0, str(HELPERS))
    # imported before the first fork
    import uvicorn  # noqa: F401

    import pyh2o.cli.app
    import pyh2o.server
    import pyh2o.sessions.conversation
    import pyh2o.sessions.story  # noqa: F401
    from fake_story import tiny_model
    from tiny_gguf import CHAT_TEMPLATE

    with tempfile.TemporaryDirectory(prefix="pyh2o-kills-") as name:
        work = Path(name).resolve()
        model = tiny_model(work, chat_template=CHAT_TEMPLATE)
        kinds = {"chat": Chat, "story": Story, "batch": Batch, "server": Server}
        n_wrong = 0
        for each in options.subjects or kinds:
            n_wrong += kill_often(each, kinds[each](model), work / "files", options)
    return n_wrong > 0


def kill_often(name: str, subject: Any, folder: Path, options: argparse.Namespace) -> int:
    """Kill one program at random moments; return how many trials found something."""
    rng = random.Random(options.seed)
    n_wrong, started, longest = 0, time.monotonic(), None
    for number in range(options.kills + 1):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        at = None if longest is None else rng.uniform(0, longest)
        begun = time.monotonic()
        try:
            subject.run(folder, at)
        except Exception as error:
            n_wrong += 1
            print(f"{name} {number}, killed after {at} s: {error!r:.2000}", flush=True)
        longest = longest or time.monotonic() - begun
    seconds = time.monotonic() - started
    print(f"{name}: {options.kills} kills, {n_wrong} wrong; {seconds:.0f} s", flush=True)
    return n_wrong


if __name__ == "__main__":
    sys.exit(main())
