"""One answer of the model: streamed, counted and stopped by Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyh2o.statistics import KVStatistics

from .interrupts import Interrupts
from .progress import Bars

if TYPE_CHECKING:
    from pyh2o.llama import Llama

INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Piece:
    """A piece of an answer: its text and, at the end, the finish reason."""

    text: str
    finish: str | None = None


@dataclass(frozen=True)
class Answer:
    """An answer and what it took.

    Attributes:
        text: the whole answer.
        finish: the finish reason of the library, or INTERRUPTED.
        read, written: tokens of the prompt evaluated for it, and tokens written.
        read_seconds: until the first token was there.
        write_seconds: from the first token to the last.
    """

    text: str
    finish: str
    read: int
    read_seconds: float
    written: int
    write_seconds: float

    def reading(self) -> str:
        """Tokens and speed of reading, for a person."""
        return f"read {_tokens(self.read)}{_speed(self.read, self.read_seconds)}"

    def writing(self) -> str:
        """Tokens and speed of writing, for a person; the first token belongs to the reading."""
        return f"wrote {_tokens(self.written)}{_speed(self.written - 1, self.write_seconds)}"


def completion_pieces(chunks: Iterator[dict[str, Any]]) -> Generator[Piece]:
    """The pieces of a streamed `create_completion`."""
    for chunk in chunks:
        choice = chunk["choices"][0]
        yield Piece(choice["text"], choice["finish_reason"])


def chat_pieces(chunks: Iterator[dict[str, Any]]) -> Generator[Piece]:
    """The pieces of a streamed `create_chat_completion`."""
    for chunk in chunks:
        choice = chunk["choices"][0]
        yield Piece(choice["delta"].get("content") or "", choice["finish_reason"])


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
        self._interrupts.check()

    def run(self, llm: Llama, pieces: Generator[Piece], write: Callable[[str], None]) -> Answer:
        """Stream an answer to `write`.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed twice.
            PyH2OError: the library refused.
        """
        self._read = 0
        try:
            with self._interrupts, closing(pieces):
                return self._stream(llm, pieces, write)
        finally:
            self._bars.clear()

    def _stream(self, llm: Llama, pieces: Iterator[Piece], write: Callable[[str], None]) -> Answer:
        texts: list[str] = []
        finish = INTERRUPTED
        start = first = last = time.monotonic()
        first_position = 0
        try:
            for piece in pieces:
                if piece.text:
                    last = time.monotonic()
                    if not texts:
                        first, first_position = last, llm.kv.position
                        self._bars.clear()
                    texts.append(piece.text)
                    write(piece.text)
                if piece.finish:
                    finish = piece.finish
                    break
                self._interrupts.check()
        except KeyboardInterrupt:
            if self._interrupts.presses != 1:
                raise
        return Answer(
            text="".join(texts),
            finish=finish,
            read=self._read or bool(texts),  # no call is made for a prompt of one token
            read_seconds=(first if texts else time.monotonic()) - start,
            written=_written(len(texts), finish, first_position, llm.kv.position),
            write_seconds=last - first,
        )


def why_ended(answer: Answer, kv: KVStatistics) -> str:
    """Why an answer ended, for a person; `kv` is the cache after it."""
    if answer.finish == "stop":
        return "the model ended its text"
    if answer.finish == INTERRUPTED:
        return "stopped by Ctrl-C"
    if answer.finish == "trained_context":
        return f"all {kv.position_limit:,} positions the model was trained for are used up"
    # The token written last has no position yet.
    if not kv.evicting and kv.position + 1 >= kv.window:
        return f"the window of {kv.window:,} tokens is full, and --no-evict drops nothing"
    return "the number of tokens asked for is reached"


def _written(pieces: int, finish: str, first_position: int, position: int) -> int:
    """Tokens written, from the positions when the first piece came and at the end.

    Pieces are too few where a character takes several tokens. The last token has no position
    yet, unless the model went on from it and then chose to stop.
    """
    if pieces == 0:
        return 0
    return max(pieces, position - first_position + (finish != "stop"))


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens"


def _speed(tokens: int, seconds: float) -> str:
    return f" at {tokens / seconds:.1f} tokens/s" if tokens > 0 and seconds > 0 else ""
