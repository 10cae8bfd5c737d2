"""One run of `generate`: the text goes where it belongs, with checkpoints, and an end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from pyh2o.generation.finish import FINISH_INTERRUPTED, FINISH_UNTIL

from ..archive import restore_archive
from ..endings import why_ended
from ..errors import EXIT_INTERRUPTED
from ..terminal.interrupts import Interrupts
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from ..terminal.wording import count, per_second
from .plan import Plan
from .story_file import StoryFile

if TYPE_CHECKING:
    from pyh2o.cache.statistics import KVStatistics
    from pyh2o.generation.repetition import Loop
    from pyh2o.sessions.story import Story


class StoryRun:
    """Writes a story to a file, or to standard output; Ctrl-C ends it between two tokens."""

    def __init__(self, bars: Bars, how_to_go_on: str) -> None:
        """Nothing is written yet.

        Args:
            bars: for the progress.
            how_to_go_on: the command line that goes on with the story, or "".
        """
        self.bars = bars
        self._how_to_go_on = how_to_go_on
        self._interrupts = Interrupts()
        self._writes_file = False
        self._notes: list[str] = []

    def on_read(self, done: int, total: int) -> None:
        """To be called after each piece of a prompt is read: `done` of `total` tokens.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed meanwhile.
        """
        self.bars.reading(done, total)
        self._interrupts.check()

    def on_loop(self, loop: Loop) -> None:
        """To be called with each loop that is noticed."""
        self._note(
            f"a loop of {count(loop.period, 'token')} at token {loop.position:,}: the model has to "
            "write something else"
        )

    def restore_archive(self, story: Story) -> None:
        """Make good what the archive of a saved story has lost.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed twice.
        """
        restore_archive(story.llm, self.bars, self._interrupts)

    def write(self, story: Story, file: StoryFile | None, plan: Plan) -> None:
        """Write as much of the story as is planned, and say how it went.

        Raises:
            PyH2OError: the library refused, or a file cannot be written.
            KeyboardInterrupt: Ctrl-C was pressed twice.
            typer.Exit: Ctrl-C was pressed; what was written stays.
        """
        if plan.left(story.written) == 0:
            tokens = count(story.written, "token")
            terminal.say(
                f"the story has {tokens}, and --max-tokens is {plan.max_tokens:,}: give a larger "
                "one, or 0 for no limit, to go on with it"
            )
            return
        self._writes_file = file is not None
        story.notes = asdict(plan)
        pen = _Pen(story, file)
        try:
            with _opened(file), self._interrupts:
                pen.begin()
                self._write(story, pen, plan)
                pen.end()
        except KeyboardInterrupt:
            self._say_how_to_go_on(file)
            raise
        for note in self._notes:
            terminal.say(note)
        if story.llm.archive_trouble:
            terminal.say(f"warning: {story.llm.archive_trouble}", style="yellow")
        if file is not None and file.written:
            terminal.say(f"the text is in {file.path}")
        terminal.say(pen.report())
        if story.finish == FINISH_INTERRUPTED:
            self._say_how_to_go_on(file)
            raise typer.Exit(EXIT_INTERRUPTED)

    def _write(self, story: Story, pen: _Pen, plan: Plan) -> None:
        most = plan.left(story.written)
        try:
            with closing(story.write(most)) as texts:
                for text in texts:
                    pen.put(text)
                    if pen.is_due(plan.checkpoint_every):
                        pen.checkpoint()
                    if self._writes_file:
                        self.bars.writing(pen.written, most, pen.seconds)
                    self._interrupts.check()
        except KeyboardInterrupt:
            if self._interrupts.presses != 1:
                raise
        finally:
            self.bars.clear()

    def _say_how_to_go_on(self, file: StoryFile | None) -> None:
        if file is not None and file.written and self._how_to_go_on:
            terminal.say(f"to go on: {self._how_to_go_on}")

    def _note(self, note: str) -> None:
        # A note amid the text on stdout would begin a new line in it.
        if self._writes_file:
            terminal.say(note)
        else:
            self._notes.append(note)


class _Pen:
    """Puts the text of a story where it belongs, and knows what this run has added to it."""

    def __init__(self, story: Story, file: StoryFile | None) -> None:
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
        story, kv = self._story, self._story.llm.kv
        parts = [
            self._reading(kv),
            _with_speed("wrote", self.written, self.written - bool(story.n_read), self.seconds),
            why_ended(str(story.finish), kv),
        ]
        if loops := story.loops - self._loops_before:
            parts.append(f"broke {count(loops, 'loop')}")
        return " · ".join([*parts, f"seed {story.sampling.seed}", kv.summary()])

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
def _opened(file: StoryFile | None) -> Iterator[None]:
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


def _with_speed(verb: str, tokens: int, timed: int, seconds: float) -> str:
    speed = per_second(timed, seconds)
    return f"{verb} {count(tokens, 'token')}" + (f" at {speed}" if speed else "")
