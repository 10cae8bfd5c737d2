"""Answers of the model: streamed, stopped by Ctrl-C, counted, and told of in numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyh2o.cache.statistics import KVStatistics, mib_text
from pyh2o.writing.finish import FINISH_INTERRUPTED, FINISH_LENGTH, FINISH_STOP
from pyh2o.writing.pieces import ReasoningText

from ..loading import ModelRun
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from ..terminal.wording import count, per_second, why_ended

if TYPE_CHECKING:
    from pyh2o.sessions.conversation import Conversation


@dataclass(frozen=True)
class Answer:
    """An answer and what it took.

    Attributes:
        finish: the finish reason of the library.
        kept: whether it is in the conversation now; an answer without a token is not, unless the
            model has ended an answer that was to go on.
        read, written: tokens of the prompt evaluated for it, and tokens written.
        read_seconds: until the first text was there.
        write_seconds: from the first text to the last.
    """

    finish: str
    kept: bool
    read: int
    read_seconds: float
    written: int
    write_seconds: float


class Answers(ModelRun):
    """Streams one answer after the other; Ctrl-C ends an answer between two tokens.

    Attributes:
        all: the answers since the chat was opened.
    """

    def __init__(self, bars: Bars) -> None:
        super().__init__(bars)
        self.all: list[Answer] = []
        self._read = 0

    def on_read(self, done: int, total: int) -> None:
        """As for any run of a model; the tokens are counted."""
        self._read = done
        super().on_read(done, total)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Do something that Ctrl-C can only stop where that is safe, or if it is pressed twice."""
        self._read = 0
        try:
            with self.interrupts:
                yield
        finally:
            self.bars.clear()

    def stream(
        self,
        conversation: Conversation,
        start: Callable[[], Generator[str]],
        *,
        n_before: int = 0,
    ) -> Answer:
        """Show an answer as it comes.

        Args:
            conversation: where it belongs.
            start: gives its text, piece by piece; to stop that early keeps what was said.
            n_before: tokens that are there already of an answer that goes on.
        """
        turns, times = conversation.turns, list[float]()
        thinking = Thinking(conversation, self.bars)

        def show(text: str) -> None:
            times.append(time.monotonic())
            if isinstance(text, ReasoningText):
                thinking.count()
                return
            self.bars.clear()
            thinking.end()
            terminal.show(text)

        began = time.monotonic()
        try:
            with self.undisturbed():
                interrupted = self.write_all(start(), show)
        finally:
            terminal.end_line()
            thinking.end()
        kept = conversation.turns != turns
        turn = conversation.turns[-1] if kept else None
        answer = Answer(
            finish=turn.finish if turn else FINISH_INTERRUPTED if interrupted else FINISH_STOP,
            kept=kept,
            read=self._read or bool(times),  # no call is made for a prompt of one token
            read_seconds=(times[0] if times else time.monotonic()) - began,
            written=max(0, turn.end - turn.part_starts[-1] - n_before) if turn else 0,
            write_seconds=times[-1] - times[0] if times else 0.0,
        )
        self.all.append(answer)
        return answer


class Thinking:
    """A line that counts thoughts while they come, and says their number at their end."""

    def __init__(self, conversation: Conversation, bars: Bars) -> None:
        self._conversation = conversation
        self._bars = bars
        self._start = self._end = 0  # of the text's tokens

    def count(self) -> None:
        """There are more."""
        self._end = len(self._conversation.tokens)
        self._start = self._start or self._end - 1
        self._bars.show("thinking", self._end - self._start, None, "tokens")

    def end(self) -> None:
        """They have ended, if there were any."""
        if self._start:
            size = count(self._end - self._start, "token")
            terminal.say(f"thought for {size}", style="dim")
            self._start = 0


def footer(answer: Answer, kv: KVStatistics) -> str:
    """What an answer took and what is left of the text, as one line."""
    held = f"{min(kv.used, kv.position):,} of" if kv.used < kv.position else "all"
    parts = [
        count(answer.written, "token"),
        per_second(answer.written - 1, answer.write_seconds),
        f"first after {answer.read_seconds:.1f} s" if answer.written else "",
        f"remembers {held} {count(kv.position, 'token')}",
        f"{kv.found_share:.1%} looked up" if kv.found_share else "",
    ]
    return " · ".join(filter(None, parts))


def why_short(answer: Answer, kv: KVStatistics, most: int) -> str:
    """Why an answer of at most so many tokens ended, unless the model or Ctrl-C ended it."""
    if answer.finish == FINISH_INTERRUPTED:
        return ""
    if not answer.kept:
        return "the model had nothing to say"
    if answer.finish == FINISH_LENGTH and answer.written >= most:
        return f"the answer was cut at {count(most, 'token')}: give a larger --max-tokens"
    if answer.finish == FINISH_STOP:
        return ""
    return f"the answer ends here: {why_ended(answer.finish, kv)}"


def say_unread(conversation: Conversation) -> None:
    """Say what of a text that was changed is read again, but for the newest token of an answer."""
    n_unread = len(conversation.unread)
    if conversation.turns and n_unread > 1:
        terminal.say(f"{count(n_unread, 'token')} will be read again with the next message")


def statistics(conversation: Conversation, answers: list[Answer]) -> Iterator[tuple[str, str]]:
    """Labels and lines for `/stats`: of all answers since the chat was opened, and of the cache."""
    kv = conversation.llm.kv
    turns = conversation.turns
    # behind what was taken back the cache may be empty, and the text is read again
    tokens = max(kv.position, turns[-1].end if turns else 0)
    yield "conversation", f"{count(len(turns), 'turn')} · {count(tokens, 'token')} of text"
    if answers:
        yield "last answer", _took(answers[-1:])
        yield "all answers", _took(answers)
    yield "cache", kv.summary()
    yield "", kv.details()
    if kv.limits.recall:
        left = f" · {count(kv.unarchived, 'token')} had to leave" if kv.unarchived else ""
        yield "archive", f"{count(kv.archived, 'token')} · {mib_text(kv.bytes_archive)} MiB{left}"
        rows = f"{kv.limits.recall:,} rows for each token"
        yield "recalled", f"{rows} · {kv.found_share:.1%} of its attention"
    if (snapshots := conversation.llm.model.snapshots).mib:
        stored = snapshots.counts
        size = f"{mib_text(stored.bytes)} of {snapshots.mib:,} MiB"
        yield "snapshots", f"{stored.texts:,} · {size}"


def _took(answers: list[Answer]) -> str:
    read, written = sum(each.read for each in answers), sum(each.written for each in answers)
    # the first token of each answer belongs to the reading
    steps = written - len(answers)
    parts = [
        f"{count(read, 'token')} read",
        per_second(read, sum(each.read_seconds for each in answers)),
        f"{count(written, 'token')} written",
        per_second(steps, sum(each.write_seconds for each in answers)),
    ]
    return " · ".join(filter(None, parts))
