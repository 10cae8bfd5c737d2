"""Stream answers until Ctrl-C, and show their statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyh2o.cache.statistics import KVStatistics, mib_text
from pyh2o.writing.finish import FINISH_INTERRUPTED, FINISH_LENGTH, FINISH_STOP
from pyh2o.writing.pieces import ReasoningText

from ..loading import ModelRun
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from ..terminal.wording import count, duration, per_second, why_ended

if TYPE_CHECKING:
    from pyh2o.sessions.conversation import Conversation

# Tokens that must have been read before the speed of reading is known.
MIN_READ = 100
# Minimum seconds that reading has to take to be mentioned.
MIN_WAIT = 2.0


@dataclass(frozen=True)
class AnswerStats:
    """Statistics of an answer.

    Attributes:
        finish: finish reason of the library.
        kept: whether it was added to the conversation; an answer without tokens is not, unless it
            continues another one.
        read, written: number of prompt tokens and of generated tokens.
        read_seconds: time to the first text.
        write_seconds: time from the first text to the last.
    """

    finish: str
    kept: bool
    read: int
    read_seconds: float
    written: int
    write_seconds: float


class Answers(ModelRun):
    """Streams answers; Ctrl-C ends an answer between two tokens.

    Attributes:
        all: the answers since the chat was opened.
    """

    def __init__(self, bars: Bars) -> None:
        super().__init__(bars)
        self.all: list[AnswerStats] = []
        self._read = 0

    def on_read(self, done: int, total: int) -> None:
        """Show the progress of reading, and count the tokens."""
        self._read = done
        super().on_read(done, total)

    @contextmanager
    def safe_interrupts(self) -> Iterator[None]:
        """Let Ctrl-C stop the body only at safe places, or if it is pressed twice."""
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
    ) -> AnswerStats:
        """Show an answer while it is generated.

        Args:
            conversation: the conversation.
            start: returns a generator of the text; closing it early keeps the text so far.
            n_before: number of earlier tokens of an answer that is continued.
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

        started = time.monotonic()
        try:
            with self.safe_interrupts():
                interrupted = self.write_all(start(), show)
        finally:
            terminal.end_line()
            thinking.end()
        kept = conversation.turns != turns
        turn = conversation.turns[-1] if kept else None
        answer = AnswerStats(
            finish=turn.finish if turn else FINISH_INTERRUPTED if interrupted else FINISH_STOP,
            kept=kept,
            read=self._read or bool(times),  # a prompt of one token reports no progress
            read_seconds=(times[0] if times else time.monotonic()) - started,
            written=max(0, turn.end - turn.part_starts[-1] - n_before) if turn else 0,
            write_seconds=times[-1] - times[0] if times else 0.0,
        )
        self.all.append(answer)
        return answer


class Thinking:
    """A line that counts reasoning tokens, and shows their number at the end."""

    def __init__(self, conversation: Conversation, bars: Bars) -> None:
        self._conversation = conversation
        self._bars = bars
        self._start = self._end = 0  # token positions

    def count(self) -> None:
        """Update the number of tokens."""
        self._end = len(self._conversation.tokens)
        self._start = self._start or self._end - 1
        self._bars.show("thinking", self._end - self._start, None, "tokens")

    def end(self) -> None:
        """Show the number of tokens, if any."""
        if self._start:
            size = count(self._end - self._start, "token")
            terminal.say(f"reasoning: {size}", style="dim")
            self._start = 0


def footer(answer: AnswerStats, kv: KVStatistics) -> str:
    """Return statistics of an answer and the cache as one line."""
    held = f"{min(kv.used, kv.position):,} of" if kv.used < kv.position else "all"
    parts = [
        count(answer.written, "token"),
        per_second(answer.written - 1, answer.write_seconds),
        f"first after {answer.read_seconds:.1f} s" if answer.written else "",
        f"{held} {count(kv.position, 'token')} cached",
        f"{kv.found_share:.1%} recalled" if kv.found_share else "",
    ]
    return " · ".join(filter(None, parts))


def why_short(answer: AnswerStats, kv: KVStatistics, most: int) -> str:
    """Return why an answer of at most `most` tokens ended; "" if the model or Ctrl-C ended it."""
    if answer.finish == FINISH_INTERRUPTED:
        return ""
    if not answer.kept:
        return "the answer is empty"
    if answer.finish == FINISH_LENGTH and answer.written >= most:
        return f"the answer reached {count(most, 'token')}: give a larger --max-tokens"
    if answer.finish == FINISH_STOP:
        return ""
    return f"the answer ends here: {why_ended(answer.finish, kv)}"


def say_unread(
    conversation: Conversation, answers: Sequence[AnswerStats], reason: str = ""
) -> None:
    """Print how many tokens are read again, except for the last token of an answer.

    Args:
        conversation: the conversation.
        answers: earlier answers, from which the time is estimated.
        reason: why they are read again.
    """
    n_unread = len(conversation.unread)
    if conversation.turns and n_unread > 1:
        n_read = sum(each.read for each in answers)
        seconds = sum(each.read_seconds for each in answers)
        expected = n_unread * seconds / n_read if n_read >= MIN_READ else 0.0
        wait = f" in about {duration(expected)}" if expected >= MIN_WAIT else ""
        why = f" ({reason})" if reason else ""
        tokens = count(n_unread, "token")
        terminal.say(f"{tokens} will be read again{wait} with the next message{why}")


def statistics(conversation: Conversation, answers: list[AnswerStats]) -> Iterator[tuple[str, str]]:
    """Yield labels and lines for `/stats`: answers since the chat was opened, and the cache."""
    kv = conversation.llm.kv
    turns = conversation.turns
    # after a change the cache may be empty until the text is read again
    tokens = max(kv.position, turns[-1].end if turns else 0)
    yield "conversation", f"{count(len(turns), 'turn')} · {count(tokens, 'token')} of text"
    if answers:
        yield "last answer", _speed(answers[-1:])
        yield "all answers", _speed(answers)
    yield "cache", kv.summary()
    yield "", kv.details()
    if kv.limits.recall:
        lost = f" · {count(kv.unarchived, 'token')} removed" if kv.unarchived else ""
        yield "archive", f"{count(kv.archived, 'token')} · {mib_text(kv.bytes_archive)} MiB{lost}"
        rows = f"{kv.limits.recall:,} rows per token"
        yield "recalled", f"{rows} · {kv.found_share:.1%} of its attention"
    if (snapshots := conversation.llm.model.snapshots).mib:
        stored = snapshots.counts
        size = f"{mib_text(stored.bytes)} of {snapshots.mib:,} MiB"
        yield "snapshots", f"{stored.texts:,} · {size}"


def _speed(answers: list[AnswerStats]) -> str:
    read, written = sum(each.read for each in answers), sum(each.written for each in answers)
    # the first token of each answer counts as reading
    steps = written - len(answers)
    parts = [
        f"{count(read, 'token')} read",
        per_second(read, sum(each.read_seconds for each in answers)),
        f"{count(written, 'token')} written",
        per_second(steps, sum(each.write_seconds for each in answers)),
    ]
    return " · ".join(filter(None, parts))
