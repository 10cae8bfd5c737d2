"""Puts the text of a story where it belongs, with checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from pyh2o.generation.finish import FINISH_INTERRUPTED, FINISH_UNTIL

from ..endings import why_ended
from ..terminal.terminal import terminal
from ..terminal.wording import count, per_second
from .plan import Plan
from .story_file import StoryFile

if TYPE_CHECKING:
    from pyh2o.cache.statistics import KVStatistics
    from pyh2o.generation.repetition import Loop
    from pyh2o.sessions.story import Story


class Pen:
    """Puts the text of a story where it belongs, and knows what this run has added to it."""

    def __init__(self, story: Story, file: StoryFile | None) -> None:
        """`file` is None for standard output."""
        self._story = story
        self._file = file
        self._finish_before = story.finish
        self._written_before = story.written
        self._seconds_before = story.seconds
        self._loops_before = story.loops
        self._is_read = story.llm.n_tokens > 0

    @property
    def written(self) -> int:
        """Tokens written in this run."""
        return self._story.written - self._written_before

    @property
    def seconds(self) -> float:
        """How long that took, without the reading."""
        return self._story.seconds - self._seconds_before

    def begin(self) -> None:
        """Have a checkpoint to go on from, even if the first token is never written."""
        file = self._file
        if file is None or file.special:
            return
        # That of a story that was ended has to say that more may come after its end.
        if self._finish_before is not None or not file.checkpoint.exists():
            self._story.finish = None
            self._save()

    def write(self, plan: Plan, after_each: Callable[[], None]) -> None:
        """Write as much of the story as is planned, and a checkpoint every so often.

        Args:
            plan: of the story.
            after_each: called after each token; what it raises ends the story between two tokens.

        Raises:
            PyH2OError: the library refused, or a file cannot be written.
            BaseException: what `after_each` raises.
        """
        with closing(self._story.write(plan.left(self._story.written))) as texts:
            for text in texts:
                self.put(text)
                if self.is_due(plan.checkpoint_every):
                    self.checkpoint()
                after_each()

    def put(self, text: str) -> None:
        """Write a piece of the text."""
        if self._file is None:
            terminal.write(text)
        else:
            self._file.write(text)

    def is_due(self, every: int) -> bool:
        """Whether it is time for a checkpoint: after the prompt, and every so many tokens."""
        at_step = self._story.written % every == 0
        return self._story.finish is None and (at_step or not self._is_read)

    def checkpoint(self) -> None:
        """Make sure that no more than what comes after this place can be lost."""
        if self._file is None or self._file.special or not self._file.written:
            return
        self._is_read = True
        # The text comes first: a checkpoint must never know of text that is not in the file.
        self._file.sync()
        self._save()
        self._file.record(json.dumps(asdict(self._story.record())))

    def end(self) -> None:
        """End the text like any text file, with a line break, unless it was interrupted."""
        story, file = self._story, self._file
        if story.finish == FINISH_INTERRUPTED and self.written == 0:
            if self._finish_before is not None:  # its checkpoint says again that it was ended
                story.finish = self._finish_before
                self._save()
                story.finish = FINISH_INTERRUPTED
            return
        if file is not None:
            file.settle()
            self.checkpoint()
        self.put(end_of(story) or "")
        if file is not None and story.finish != FINISH_INTERRUPTED:
            file.complete()

    def report(self) -> str:
        """What was read and written, why it ended and what the cache holds, as one line."""
        kv = self._story.llm.kv
        return " · ".join([self._reading(kv), self.outcome(), kv.summary()])

    def outcome(self) -> str:
        """What was written and why it ended."""
        story = self._story
        parts = [
            _with_speed("wrote", self.written, self.written - bool(story.n_read), self.seconds),
            why_ended(str(story.finish), story.llm.kv),
        ]
        if loops := story.loops - self._loops_before:
            parts.append(f"broke {count(loops, 'loop')}")
        return " · ".join([*parts, f"seed {story.sampling.seed}"])

    def _reading(self, kv: KVStatistics) -> str:
        story = self._story
        if self._written_before and not story.n_read:
            return f"went on after {count(self._written_before, 'token')}"
        n_read = story.n_read or kv.position  # it was interrupted
        return _with_speed("read", n_read, n_read, story.read_seconds)

    def _save(self) -> None:
        assert self._file is not None
        self._story.save(self._file.checkpoint)


def end_of(story: Story) -> str | None:
    """What a file has after the text of a story, or None while it is being written."""
    if story.finish is None:
        return None
    held_back = "" if story.finish == FINISH_UNTIL else story.held_back
    text = story.text() + held_back
    is_closed = story.finish == FINISH_INTERRUPTED or not text or text.endswith("\n")
    return held_back if is_closed else f"{held_back}\n"


@contextmanager
def opened(file: StoryFile | None) -> Iterator[None]:
    """Hold the story's file open, and say what is kept aside of what was in it."""
    if file is None:
        yield
        return
    try:
        with file:
            yield
    finally:
        if file.aside is not None:
            terminal.say(file.kept())


def loop_note(loop: Loop) -> str:
    """For a person: a loop was noticed."""
    return (
        f"a loop of {count(loop.period, 'token')} at token {loop.position:,}: the model has to "
        "write something else"
    )


def length_note(written: int, plan: Plan) -> str:
    """For a person: a story has as many tokens as were asked for."""
    return (
        f"the story has {count(written, 'token')}, and --max-tokens is {plan.max_tokens:,}: give a "
        "larger one, or 0 for no limit, to go on with it"
    )


def _with_speed(verb: str, tokens: int, timed: int, seconds: float) -> str:
    speed = per_second(timed, seconds)
    return f"{verb} {count(tokens, 'token')}" + (f" at {speed}" if speed else "")
