"""`pyh2o chat` with a script of messages and commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from faulty_process import NO_TROUBLE, Ended, Trouble, run
from saved_states import State, conversation_state, everything, messages, steps_done
from subject import ARCHIVE_LOST, CACHE, SAMPLING, Found, check_end, emptied

# The line that ends a step.
STEP_ENDS = re.compile(
    r"^(\d+ tokens? · |pinned, |still pinned|nothing is pinned|removed)", re.MULTILINE
)
STEPS = [
    "The keeper was called Orsovane.",
    "Tell me more.",
    "/pin Orsovane",
    "What did she see from up there, on the night of the storm?",
    "/regen",
    "/undo",
    "Go on, please.",
    "/unpin Orsovane",
    "Who was it?",
]


class Chat:
    """`pyh2o chat --session`, with a script of messages and commands."""

    name = "chat"

    def __init__(self, model: Path) -> None:
        self._arguments = ["chat", "--session=talk", "--max-tokens=12", "-m", str(model)]
        self.n_operations = 0
        self.states: list[State] = []

    def _run(self, folder: Path, steps: Sequence[str], trouble: Trouble = NO_TROUBLE) -> Ended:
        is_new = not (folder / "talk.h2o").exists()
        arguments = [*self._arguments, *CACHE, *(SAMPLING if is_new else [])]
        return run(folder, arguments, trouble, "".join(f"{step}\n" for step in steps))

    def prepare(self, folder: Path) -> None:
        """Find out what is saved after each step."""
        self.states = []
        for n in range(1, len(STEPS) + 1):
            ended = self._run(emptied(folder), STEPS[:n])
            assert ended.code == 0, ended.notes
            self.n_operations = ended.n_operations
            self.states.append(conversation_state(folder / "talk.h2o"))

    def check(self, folder: Path, trouble: Trouble) -> Found:
        """As `Subject` says."""
        ended = self._run(folder, STEPS, trouble)
        check_end(ended, trouble)
        path = folder / "talk.h2o"
        # What a step has changed is saved before the next one begins.
        n_ended = len(STEP_ENDS.findall(ended.notes))
        n_saved = 0 if "not saved" in ended.notes else max(0, n_ended - (ended.code != 0))
        seen = messages if ARCHIVE_LOST.search(ended.notes) else everything
        states = [seen(state) for state in self.states]
        n_done = steps_done(
            states, seen(conversation_state(path)) if path.exists() else None, n_saved
        )
        if n_done < len(STEPS):
            rest = self._run(folder, STEPS[n_done:])
            assert rest.code == 0, rest.notes
        assert seen(conversation_state(path)) == states[-1]
        return Found(ended, n_done == len(STEPS))
