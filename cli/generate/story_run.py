"""One run of `generate`: write the text and a summary."""

from __future__ import annotations

import shlex
import time
from collections.abc import Generator
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

import typer

from pyh2o.writing.finish import FINISH_INTERRUPTED, FINISH_LENGTH, FINISH_UNTIL

from ..errors import EXIT_INTERRUPTED
from ..loading import ModelRun
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from ..terminal.wording import count, per_second, why_ended
from .story_file import StoryFile

if TYPE_CHECKING:
    from pyh2o.sessions.story import Story

# Value of -n for a story that continues until the model ends it.
NO_LIMIT = 0
# Name of the CRC-32 of the file in the notes of a story.
CRC = "crc"
# Maximum time until new text is in the database and in the file.
SECONDS = 1.0
# Tokens of a passage; the last passage is stored again with each change.
PASSAGE = 500


class StoryRun(ModelRun):
    """Writes a story to a file or standard output; Ctrl-C stops it between two tokens.

    Args:
        bars: progress bars.
        file: file of the story; None for standard output.
    """

    def __init__(self, bars: Bars, file: StoryFile | None) -> None:
        super().__init__(bars)
        self._file = file
        self._new = ""  # text that is not in the file yet
        self._due = 0.0

    def write(self, story: Story, max_tokens: int) -> None:
        """Write the story to a maximum of tokens, or NO_LIMIT, and print a summary."""
        file = self._file
        most = None if max_tokens == NO_LIMIT else max(0, max_tokens - story.written)
        if most == 0:
            terminal.say(
                f"the story has {count(story.written, 'token')}, and --max-tokens is "
                f"{max_tokens:,}: increase it to continue, or give 0 for no limit"
            )
            return
        self._story, self._loops_before = story, story.loops
        self._written_before, self._seconds_before = story.written, story.seconds
        try:
            with closing(file) if file else nullcontext(), self.interrupts:
                self._write(most)
        except KeyboardInterrupt:
            self._say_how_to_resume()
            raise
        if file is not None and story.written:
            terminal.say(f"the text is in {file.path}")
        terminal.say(self._report())
        if story.finish == FINISH_INTERRUPTED:
            self._say_how_to_resume()
            raise typer.Exit(EXIT_INTERRUPTED)

    @property
    def _written(self) -> int:
        """Number of tokens generated in this run."""
        return self._story.written - self._written_before

    @property
    def _seconds(self) -> float:
        """Generation time of this run, without prompt processing."""
        return self._story.seconds - self._seconds_before

    def _write(self, most: int | None) -> None:
        def write(text: str) -> None:
            if self._file is None:
                terminal.show(text)
                return
            self._new += text
            if time.monotonic() >= self._due:
                self._store(self._file)
            self.bars.show("writing", self._written, most, "tokens")

        story, file = self._story, self._file
        try:
            self.write_all(_passages(story, most), write)
        finally:
            if file is not None and self._written:
                self._store(file)
        if story.finish == FINISH_INTERRUPTED and not self._written:
            return
        if file is None:
            terminal.show(end_of(story))
            return
        file.write(end_of(story))
        story.notes[CRC] = file.sync()
        if story.place is not None:
            story.store(leaving=True)

    def _store(self, file: StoryFile) -> None:
        """Store the story, then write its new text to the file.

        It is stored as unfinished until the file has all its text. If the program is killed, the
        file may lack text, but has none that the database lacks.
        """
        story, finish = self._story, self._story.finish
        story.finish = None
        try:
            if story.place is not None:
                story.store()
        finally:
            story.finish = finish
            new, self._new = self._new, ""
            file.write(new)
            self._due = time.monotonic() + SECONDS

    def _say_how_to_resume(self) -> None:
        if self._file is not None and self._story.place is not None and self._story.written:
            name = shlex.quote(str(self._file.name))
            terminal.say(f"to resume: pyh2o generate --resume --output {name}")

    def _report(self) -> str:
        """Return a summary of the run as one line."""
        story, kv = self._story, self._story.llm.kv
        n_read = story.n_read or kv.position  # n_read is 0 if reading was interrupted
        parts = [
            _with_speed("read", n_read, n_read, story.read_seconds),
            _with_speed("wrote", self._written, self._written - bool(story.n_read), self._seconds),
            why_ended(str(story.finish), kv),
        ]
        if self._written_before and not story.n_read:
            parts[0] = f"continued after {count(self._written_before, 'token')}"
        if loops := story.loops - self._loops_before:
            parts.append(f"broke {count(loops, 'loop')}")
        return " · ".join([*parts, f"seed {story.sampling.seed}", kv.summary()])


def end_of(story: Story) -> str:
    """Return the end of the file after the text of a story that is not being generated."""
    held_back = "" if story.finish == FINISH_UNTIL else story.held_back
    text = story.text() + held_back
    is_closed = story.finish == FINISH_INTERRUPTED or not text or text.endswith("\n")
    return held_back if is_closed else f"{held_back}\n"


def _passages(story: Story, most: int | None) -> Generator[str]:
    """Generate at most `most` tokens, in passages."""
    while most is None or most > 0:
        before, length = story.written, PASSAGE if most is None else min(PASSAGE, most)
        yield from story.write(length)
        is_full = len(story.tokens) > story.llm.position_limit
        if story.finish != FINISH_LENGTH or story.written - before < length or is_full:
            break
        most = most and most - length


def _with_speed(verb: str, tokens: int, timed: int, seconds: float) -> str:
    speed = per_second(timed, seconds)
    return f"{verb} {count(tokens, 'token')}" + (f" at {speed}" if speed else "")
