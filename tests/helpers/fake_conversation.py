"""A conversation with a model that says what the test tells it to."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cli_fakes import cache_with
from pyh2o.cache.statistics import KVStatistics
from pyh2o.cli import loading
from pyh2o.cli.chat import answers
from pyh2o.cli.options import ModelOptions, RunOptions
from pyh2o.errors import StateError
from pyh2o.generation.sampling import Sampling
from pyh2o.sessions.session_file import Session, read_session, write_session

SETTINGS = {
    "ctx": 1000,
    "evict": True,
    "heavy": 100,
    "recent": 100,
    "pinned": 0,
    "slack": 100,
    "policy": "tova",
    "type_k": "f16",
    "type_v": "f16",
}
DAMAGED_STATE = b"damaged"


@dataclass
class Script:
    """What the fake model does for one message: pieces (or actions) in turn, then the end."""

    pieces: list[str | Callable[[], None]]
    finish: str = "stop"


@dataclass
class FakeLlama:
    """A model whose tokens are words and pieces; the queue is shared with its conversation."""

    answers: deque[Script | Exception]
    on_read: Callable[[int, int], None] = lambda done, total: None
    options: ModelOptions | None = None
    evicting: bool = True
    n_tokens: int = 0
    closed: bool = False
    before_reading: Callable[[], None] = lambda: None
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def kv(self) -> KVStatistics:
        return cache_with(self.n_tokens, evicting=self.evicting, **self.changes)

    @property
    def input_ids(self) -> Any:
        return np.arange(self.n_tokens)

    def n_ctx(self) -> int:
        return self.kv.window

    def read(self, tokens: int) -> None:
        self.before_reading()
        self.n_tokens += tokens
        self.on_read(tokens, tokens)

    def kv_state(self) -> bytes:
        return str(self.n_tokens).encode()

    def load_kv_state(self, data: bytes, tokens: Sequence[int]) -> None:
        self.n_tokens = int(data)
        assert len(tokens) == self.n_tokens

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class FakeTurn:
    user: str
    answer: str
    finish: str
    start: int
    answer_start: int
    end: int


class FakeConversation:
    """Has the interface of `pyh2o.sessions.conversation.Conversation`."""

    last: FakeConversation

    def __init__(
        self,
        llm: FakeLlama,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        fair_turns: bool = False,
        on_recompute: Callable[[int], None] | None = None,
    ) -> None:
        self.llm = llm
        self.fair_turns = fair_turns
        self.system = system
        self.sampling = sampling or Sampling()
        self.on_recompute = on_recompute
        self.turns: tuple[FakeTurn, ...] = ()
        self.said: list[str] = []
        self.limits: list[int | None] = []
        self.saves: list[Path] = []
        self.unread = 0
        type(self).last = self

    def say(self, message: str, *, max_tokens: int | None = None) -> Generator[str, None, None]:
        return self._answer(message, self.turns, max_tokens)

    def regenerate(self, *, max_tokens: int | None = None) -> Generator[str, None, None]:
        return self._answer(self.turns[-1].user, self.turns[:-1], max_tokens)

    def edit(self, message: str, *, max_tokens: int | None = None) -> Generator[str, None, None]:
        return self._answer(message, self.turns[:-1], max_tokens)

    def _answer(
        self, message: str, before: tuple[FakeTurn, ...], max_tokens: int | None
    ) -> Generator[str, None, None]:
        """Without a piece everything is as it was."""
        self.said.append(message)
        self.limits.append(max_tokens)
        script = self.llm.answers.popleft()
        if isinstance(script, Exception):
            raise script
        if self.unread and self.on_recompute:
            self.on_recompute(self.unread)
        self.unread = 0
        as_it_was = self.llm.n_tokens
        if len(before) < len(self.turns):
            self.llm.n_tokens = self.turns[-1].start
        start, text, finish = self.llm.n_tokens, "", "interrupted"
        try:
            self.llm.read(len(message.split()))
            answer_start = self.llm.n_tokens
            for piece in script.pieces:
                if callable(piece):
                    piece()
                    continue
                self.llm.n_tokens += bool(text)  # evaluated when the next one is asked for
                text += piece
                yield piece
            finish = script.finish
        finally:
            if text:
                turn = FakeTurn(message, text, finish, start, answer_start, self.llm.n_tokens + 1)
                self.turns = (*before, turn)
            else:
                self.llm.n_tokens = as_it_was

    def undo(self) -> FakeTurn:
        turn = self.turns[-1]
        self.turns = self.turns[:-1]
        self.llm.n_tokens = turn.start
        return turn

    def clear(self) -> None:
        self.turns = ()
        self.llm.n_tokens = 0

    def set_system(self, text: str | None) -> None:
        self.system = text
        self.unread = self.llm.n_tokens if self.turns else 0

    def save(self, path: Path) -> None:
        self.saves.append(path)
        header = {
            "model": {"file": "fake.gguf"},
            "settings": SETTINGS,
            "turns": [asdict(turn) for turn in self.turns],
            "system": self.system,
            "sampling": asdict(self.sampling),
        }
        tokens = self.llm.input_ids.tolist()
        write_session(path, Session("conversation", header, tokens, self.llm.kv_state()))

    @classmethod
    def load(
        cls, path: Path, llm: FakeLlama, *, on_recompute: Callable[[int], None] | None = None
    ) -> FakeConversation:
        session = read_session(path, "conversation")
        header = session.header
        conversation = cls(
            llm,
            system=header["system"],
            sampling=Sampling(**header["sampling"]),
            on_recompute=on_recompute,
        )
        conversation.turns = tuple(FakeTurn(**turn) for turn in header["turns"])
        llm.n_tokens = 0
        if session.kv == DAMAGED_STATE:
            raise StateError("the state does not fit")
        llm.load_kv_state(session.kv, session.tokens)
        return conversation


def ticking_clock() -> Iterator[float]:
    """Half a second passes with each look at the clock."""
    return (tick / 2 for tick in itertools.count())


def fake_chat(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    """The model that `chat` loads from now on, for a fake conversation."""
    llama = FakeLlama(deque())

    def load_llama(
        options: RunOptions, _bars: object, on_read: Callable[[int, int], None]
    ) -> FakeLlama:
        llama.options, llama.on_read = options, on_read
        llama.n_tokens = 0
        return llama

    monkeypatch.setattr(loading, "load_llama", load_llama)
    monkeypatch.setattr("pyh2o.sessions.conversation.Conversation", FakeConversation)
    clock = ticking_clock()
    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    return llama
