"""Several stories at once, each with a file, a checkpoint and records of its own.

Each is written by a thread, in a place of an engine. Ctrl-C and all that is shown are the main
thread's.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import typer

from pyh2o.cache.statistics import mib_text
from pyh2o.generation.finish import FINISH_INTERRUPTED
from pyh2o.generation.sampling import Sampling

from ..errors import EXIT_INTERRUPTED
from ..terminal.interrupts import Interrupts
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from ..terminal.wording import count, per_second
from .new_story_file import NewStoryFile
from .pen import Pen, length_note, loop_note, opened
from .plan import Plan
from .resumed_story_file import ResumedStoryFile
from .story_file import StoryFile
from .task import Task, own_sampling_note, read_edited, recompute_note

if TYPE_CHECKING:
    from pyh2o.engine import Engine
    from pyh2o.llama import Llama
    from pyh2o.sessions.story import Story

# Seconds between two looks at Ctrl-C and two states of the bar.
TICK = 0.1


@dataclass
class Progress:
    """How far a story is.

    Attributes:
        most: tokens to write in this run; None for any number.
        written: tokens of this run.
        read: tokens of the prompt that were read.
        to_read: tokens of the prompt.
    """

    most: int | None = None
    written: int = 0
    read: int = 0
    to_read: int = 0


class OneOfMany:
    """A story among others, until it has ended.

    Attributes:
        file: of the story.
        progress: in this run.
        ended: whether all that is planned was written.
    """

    def __init__(self, file: StoryFile, task: Task, most: int | None) -> None:
        self.file = file
        self.progress = Progress(most=most)
        self.ended = False
        self._task = task

    def write(self, llm: Llama, check: Callable[[], None], say: Callable[[str], None]) -> None:
        """Write as much of it as is planned.

        Args:
            llm: a place of the engine.
            check: called while a prompt is read and after each token, from any thread; a
                KeyboardInterrupt breaks the story off, as Ctrl-C does.
            say: shows a note.

        Raises:
            PyH2OError: the library refused, or a file cannot be written.
        """

        def on_read(done: int, total: int) -> None:
            self.progress.read, self.progress.to_read = done, total
            check()

        llm.prompt_progress, llm.while_reading = on_read, check
        with suppress(KeyboardInterrupt):
            self._write(llm, check, say)

    def _write(self, llm: Llama, check: Callable[[], None], say: Callable[[str], None]) -> None:
        raise NotImplementedError

    def _write_story(
        self, story: Story, plan: Plan, check: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        """Write it into its file, which is open."""
        story.notes = asdict(plan)
        pen = Pen(story, self.file)

        def after_each() -> None:
            self.progress.written = pen.written
            check()

        pen.begin()
        with suppress(KeyboardInterrupt):
            pen.write(plan, after_each)
        pen.end()
        self.ended = story.finish != FINISH_INTERRUPTED
        if story.llm.archive_trouble:
            say(f"warning: {story.llm.archive_trouble}")
        say(pen.outcome())


class NewStory(OneOfMany):
    """A story that begins."""

    def __init__(self, file: NewStoryFile, task: Task, sampling: Sampling, *, echo: bool) -> None:
        self._plan = Plan().changed(task.max_tokens, task.checkpoint_every)
        super().__init__(file, task, self._plan.left(0))
        self._new_file = file
        self._sampling = sampling
        self._echo = echo

    def begin(self, llm: Llama, stack: ExitStack) -> None:
        """Open its file until the stack is left, with a checkpoint to go on from.

        Raises:
            PyH2OError: the library refused the prompt, or the file cannot be written.
        """
        story = self._task.new_story(llm, self._sampling, lambda _loop: None, echo=self._echo)
        story.notes = asdict(self._plan)
        stack.enter_context(opened(self.file))
        story.save(self.file.checkpoint)
        self._new_file.stays = True

    def _write(self, llm: Llama, check: Callable[[], None], say: Callable[[str], None]) -> None:
        story = self._task.new_story(
            llm, self._sampling, lambda loop: say(loop_note(loop)), echo=self._echo
        )
        self._write_story(story, self._plan, check, say)


class ResumedStory(OneOfMany):
    """A story that goes on."""

    def __init__(
        self, file: ResumedStoryFile, task: Task, most: int | None, given: dict[str, float]
    ) -> None:
        super().__init__(file, task, most)
        self._resumed_file = file
        self._given = given

    def _write(self, llm: Llama, check: Callable[[], None], say: Callable[[str], None]) -> None:
        from pyh2o.sessions.saved_story import KIND
        from pyh2o.sessions.session_file import read_session

        task, file = self._task, self._resumed_file
        story = task.resumed_story(
            read_session(file.checkpoint, KIND),
            llm,
            file,
            on_loop=lambda loop: say(loop_note(loop)),
            on_recompute=lambda tokens: say(recompute_note(tokens)),
        )
        if llm.archive_lost:
            say(f"the archive's file lacks {count(llm.archive_lost, 'token')}: reading again")
            llm.restore_archive()
        plan = Plan.of(story.notes).changed(task.max_tokens, task.checkpoint_every)
        for note in (own_sampling_note(story, self._given), read_edited(story, file, "the file")):
            if note:
                say(note)
        if plan.left(story.written) == 0:
            self.ended = True
            say(length_note(story.written, plan))
            return
        with opened(file):
            self._write_story(story, plan, check, say)


class StoriesRun:
    """Writes stories at once, as many as the engine has places, until Ctrl-C ends all of them."""

    def __init__(self, engine: Engine, stories: Sequence[OneOfMany], bars: Bars) -> None:
        """Nothing is written yet."""
        self._engine = engine
        self._stories = stories
        self._bars = bars
        self._left = iter(stories)
        self._turn = threading.Lock()
        self._stopped = threading.Event()
        self._notes: queue.Queue[str] = queue.Queue()
        self._error: BaseException | None = None

    def begin(self, stack: ExitStack) -> None:
        """Have a checkpoint of every new story, so that all can be gone on with."""
        for story in self._stories:
            if isinstance(story, NewStory):
                with self._engine.text() as llm:
                    story.begin(llm, stack)

    def write(self, texts: int, how_to_go_on: str) -> None:
        """Write all of them, and say how it went.

        Args:
            texts: places of the engine.
            how_to_go_on: the command line that goes on with all.

        Raises:
            PyH2OError: the library refused, or a file cannot be written; all have ended then.
            KeyboardInterrupt: Ctrl-C was pressed twice.
            typer.Exit: Ctrl-C was pressed; what was written stays.
        """
        started = time.monotonic()
        try:
            with ExitStack() as stack:
                self.begin(stack)
                self._run(texts, started)
        except KeyboardInterrupt:
            terminal.say(f"to go on: {how_to_go_on}")
            raise
        self._say_notes()
        if self._error is not None:
            raise self._error
        terminal.say(self._report(texts, time.monotonic() - started))
        if not all(story.ended for story in self._stories):
            terminal.say(f"to go on: {how_to_go_on}")
            raise typer.Exit(EXIT_INTERRUPTED)

    def _run(self, n_threads: int, started: float) -> None:
        threads = [threading.Thread(target=self._work) for _ in range(n_threads)]
        try:
            with Interrupts() as interrupts:
                for thread in threads:
                    thread.start()
                while running := [thread for thread in threads if thread.is_alive()]:
                    running[0].join(TICK)
                    if interrupts.presses:
                        self._stopped.set()
                    self._say_notes()
                    self._show(time.monotonic() - started)
        finally:
            self._stopped.set()
            for thread in threads:
                thread.join()
            self._bars.clear()

    # ---------------------------------------------------------------------------------------------
    # In the threads of the stories
    # ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (story := self._next()) is not None:
                with self._engine.text() as llm:
                    story.write(llm, self._check, partial(self._note, story))
        except BaseException as error:
            self._error = self._error or error
            self._stopped.set()

    def _next(self) -> OneOfMany | None:
        with self._turn:
            return None if self._stopped.is_set() else next(self._left, None)

    def _check(self) -> None:
        if self._stopped.is_set():
            raise KeyboardInterrupt

    def _note(self, story: OneOfMany, note: str) -> None:
        self._notes.put(f"{story.file.name}: {note}")

    # ---------------------------------------------------------------------------------------------
    # What is shown
    # ---------------------------------------------------------------------------------------------

    def _say_notes(self) -> None:
        while not self._notes.empty():
            terminal.say(self._notes.get())

    def _show(self, seconds: float) -> None:
        progress = [story.progress for story in self._stories]
        written = sum(each.written for each in progress)
        if written:
            most = [each.most for each in progress]
            total = None if None in most else sum(filter(None, most))
            self._bars.writing(written, total, seconds)
        elif to_read := sum(each.to_read for each in progress):
            self._bars.reading(sum(each.read for each in progress), to_read)

    def _report(self, texts: int, seconds: float) -> str:
        written = sum(story.progress.written for story in self._stories)
        parts = [count(len(self._stories), "text"), f"wrote {count(written, 'token')}"]
        if speed := per_second(written, seconds):
            parts[-1] += f" at {speed}"
        memory = mib_text(self._engine.model.kv.bytes_total)
        return " · ".join([*parts, f"KV {texts} x {memory} MiB"])
