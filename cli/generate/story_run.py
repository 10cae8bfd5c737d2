"""One run of `generate`: write the text, checkpoints and a summary."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import typer

from pyh2o.system.memory import resident_bytes
from pyh2o.writing.finish import FINISH_INTERRUPTED, FINISH_UNTIL

from ..errors import EXIT_INTERRUPTED, InputError
from ..loading import ModelRun
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from ..terminal.wording import count, per_second, why_ended
from .story_file import StoryFile

if TYPE_CHECKING:
    from pyh2o.sessions.story import Story

NO_LIMIT = 0
"""Value of -n for a story that continues until the model ends it."""


@dataclass(frozen=True)
class Plan:
    """The planned length of a story, which its checkpoint stores.

    Attributes:
        max_tokens: maximum tokens of the whole story, without the prompt, or NO_LIMIT.
        checkpoint_every: tokens between two checkpoints.
    """

    max_tokens: int = NO_LIMIT
    checkpoint_every: int = 1000

    @classmethod
    def of(cls, notes: Mapping[str, Any]) -> Plan:
        """Return the plan from a checkpoint."""
        found: dict[str, Any] = {name: notes.get(name) for name in asdict(cls())}
        for name, value in found.items():
            if type(value) is not int or value < (name == "checkpoint_every"):
                raise InputError(
                    f"the checkpoint is damaged (its {name} is {value!r}): use another copy of it"
                )
        return cls(**found)

    def changed(self, max_tokens: int | None, checkpoint_every: int | None) -> Plan:
        """Return the plan with typed values; None keeps a value."""
        typed = {"max_tokens": max_tokens, "checkpoint_every": checkpoint_every}
        return replace(self, **{name: value for name, value in typed.items() if value is not None})

    def left(self, written: int) -> int | None:
        """Return how many more tokens a story may have; None for no limit."""
        return None if self.max_tokens == NO_LIMIT else max(0, self.max_tokens - written)


class StoryRun(ModelRun):
    """Writes a story to a file or standard output; Ctrl-C stops it between two tokens.

    Args:
        bars: progress bars.
        file: file of the story; None for standard output.
    """

    def __init__(self, bars: Bars, file: StoryFile | None) -> None:
        super().__init__(bars)
        self._file = file

    def write(self, story: Story, plan: Plan) -> None:
        """Write the story as planned, and print a summary."""
        file = self._file
        if plan.left(story.written) == 0:
            terminal.say(
                f"the story has {count(story.written, 'token')}, and --max-tokens is "
                f"{plan.max_tokens:,}: increase it to continue, or give 0 for no limit"
            )
            return
        story.notes = asdict(plan)
        self._story, self._plan = story, plan
        self._finish_before, self._loops_before = story.finish, story.loops
        self._written_before, self._seconds_before = story.written, story.seconds
        self._last_record = story.written, story.seconds
        self._is_read = story.llm.n_tokens > 0
        try:
            with file or nullcontext(), self.interrupts:
                self._begin()
                self._write()
                self._end()
        except KeyboardInterrupt:
            self._say_how_to_resume()
            raise
        if story.llm.archive_trouble:
            terminal.say(f"warning: {story.llm.archive_trouble}", style="yellow")
        if file is not None and file.written:
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

    def _begin(self) -> None:
        """Write an initial checkpoint, to resume even if no token is written."""
        file = self._file
        if file is None:
            return
        # the checkpoint of an ended story must allow more text after its end
        if self._finish_before is not None or not file.checkpoint.exists():
            self._story.finish = None
            self._story.save(file.checkpoint)

    def _write(self) -> None:
        story, plan = self._story, self._plan
        most = plan.left(story.written)

        def write(text: str) -> None:
            self._put(text)
            is_at_step = story.written % plan.checkpoint_every == 0
            if story.finish is None and (is_at_step or not self._is_read):
                self._checkpoint()
            if self._file is not None:
                self.bars.show("writing", self._written, most, "tokens")

        self.write_all(story.write(most), write)

    def _put(self, text: str) -> None:
        if self._file is None:
            terminal.show(text)
        else:
            self._file.write(text)

    def _checkpoint(self) -> None:
        """Write a checkpoint of the text so far."""
        file, story = self._file, self._story
        if file is None or not file.written:
            return
        self._is_read = True
        # text first, as a checkpoint must not contain text that is not in the file
        file.sync()
        story.save(file.checkpoint)
        file.record(self._record(file.n_bytes))
        self._last_record = story.written, story.seconds

    def _end(self) -> None:
        """End the text with a line break, unless the run was interrupted."""
        story, file = self._story, self._file
        if story.finish == FINISH_INTERRUPTED and self._written == 0:
            if file is not None and self._finish_before is not None:
                story.finish = self._finish_before  # mark it as ended again
                story.save(file.checkpoint)
                story.finish = FINISH_INTERRUPTED
            return
        if file is not None:
            file.settle()
            self._checkpoint()
        self._put(end_of(story) or "")

    def _record(self, n_bytes: int) -> dict[str, Any]:
        """Return a line of statistics for the records."""
        story, kv = self._story, self._story.llm.kv
        written_before, seconds_before = self._last_record
        written, seconds = story.written - written_before, story.seconds - seconds_before
        return {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "finish": story.finish,
            "tokens": story.written,
            "text_bytes": n_bytes,
            "seconds": round(story.seconds, 3),
            "tokens_per_second": round(written / seconds, 2) if seconds > 0 else 0.0,
            "loops": story.loops,
            "position": kv.position,
            "cells_used": kv.used,
            "capacity": kv.capacity,
            "tokens_evicted": kv.tokens_evicted,
            "compactions": kv.compactions,
            "rebases": kv.rebases,
            "kv_bytes": kv.bytes_total,
            "resident_bytes": resident_bytes(),
        }

    def _say_how_to_resume(self) -> None:
        if self._file is not None and self._file.written:
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


def end_of(story: Story) -> str | None:
    """Return the end of the file after the text of a story; None while it is being written."""
    if story.finish is None:
        return None
    held_back = "" if story.finish == FINISH_UNTIL else story.held_back
    text = story.text() + held_back
    is_closed = story.finish == FINISH_INTERRUPTED or not text or text.endswith("\n")
    return held_back if is_closed else f"{held_back}\n"


def _with_speed(verb: str, tokens: int, timed: int, seconds: float) -> str:
    speed = per_second(timed, seconds)
    return f"{verb} {count(tokens, 'token')}" + (f" at {speed}" if speed else "")
