"""One run of `generate`: the text goes where it belongs, with checkpoints, and an end."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from pyh2o.generation.finish import FINISH_INTERRUPTED

from ..archive import restore_archive
from ..errors import EXIT_INTERRUPTED
from ..terminal.interrupts import Interrupts
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from .pen import Pen, length_note, loop_note, opened
from .plan import Plan
from .story_file import StoryFile

if TYPE_CHECKING:
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
        self.check()

    def check(self) -> None:
        """To be called while a piece of a prompt is read.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed meanwhile.
        """
        self._interrupts.check()

    def on_loop(self, loop: Loop) -> None:
        """To be called with each loop that is noticed."""
        self._note(loop_note(loop))

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
            terminal.say(length_note(story.written, plan))
            return
        self._writes_file = file is not None
        story.notes = asdict(plan)
        pen = Pen(story, file)
        try:
            with opened(file), self._interrupts:
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

    def _write(self, story: Story, pen: Pen, plan: Plan) -> None:
        most = plan.left(story.written)

        def after_each() -> None:
            if self._writes_file:
                self.bars.writing(pen.written, most, pen.seconds)
            self._interrupts.check()

        try:
            pen.write(plan, after_each)
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
