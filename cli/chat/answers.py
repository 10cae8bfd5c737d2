"""One answer of the model: streamed, counted and stopped by Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyh2o.generation.finish import FINISH_INTERRUPTED, FINISH_STOP

from ..terminal.interrupts import Interrupts
from ..terminal.progress import Bars

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


class Answers:
    """Runs answers one after the other; Ctrl-C ends an answer between two tokens."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._interrupts = Interrupts()
        self._read = 0

    def on_read(self, done: int, total: int) -> None:
        """To be called after each piece of a prompt is read: `done` of `total` tokens.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed meanwhile.
        """
        self._read = done
        self._bars.reading(done, total)
        self.check()

    def check(self) -> None:
        """To be called while a piece of a prompt is read.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed meanwhile.
        """
        self._interrupts.check()

    def run(
        self,
        conversation: Conversation,
        start: Callable[[], Generator[str]],
        write: Callable[[str], None],
        *,
        n_before: int = 0,
    ) -> Answer:
        """Stream an answer to `write`.

        Args:
            conversation: where it belongs.
            start: gives its text, piece by piece; to stop that early keeps what was said.
            write: takes each piece.
            n_before: tokens that are there already of an answer that goes on.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed twice.
            PyH2OError: the library refused.
        """
        turns = conversation.turns
        began = time.monotonic()
        with self.undisturbed(), closing(start()) as texts:
            times, interrupted = self._stream(texts, write)
        kept = conversation.turns != turns
        turn = conversation.turns[-1] if kept else None
        return Answer(
            finish=turn.finish if turn else FINISH_INTERRUPTED if interrupted else FINISH_STOP,
            kept=kept,
            read=self._read or bool(times),  # no call is made for a prompt of one token
            read_seconds=(times[0] if times else time.monotonic()) - began,
            written=max(0, turn.end - turn.answer_start - n_before) if turn else 0,
            write_seconds=times[-1] - times[0] if times else 0.0,
        )

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Do something that Ctrl-C can only stop where that is safe, or if it is pressed twice."""
        self._read = 0
        try:
            with self._interrupts:
                yield
        finally:
            self._bars.clear()

    def _stream(
        self, texts: Iterator[str], write: Callable[[str], None]
    ) -> tuple[list[float], bool]:
        """Write the pieces; the times of all of them, and whether Ctrl-C stopped them."""
        times: list[float] = []
        try:
            for text in texts:
                times.append(time.monotonic())
                self._bars.clear()
                write(text)
                self._interrupts.check()
        except KeyboardInterrupt:
            if self._interrupts.presses != 1:
                raise
            return times, True
        return times, False
