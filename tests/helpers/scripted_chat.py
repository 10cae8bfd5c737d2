"""The tiny model for `chat` with sampled tokens specified by the test; the conversation is real.

The numbers of its cache are made up, so that tests contain them as shown.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chat_turns import ChatTurns
from cli_fakes import LoadedModel, Output, cache_with, run
from pyh2o import Conversation, Llama
from pyh2o.cli.chat import answers, command
from pyh2o.cli.chat.input import PROMPT, ScriptSource
from pyh2o.core.text import Text
from pyh2o.sessions import conversation as conversation_module
from pyh2o.sessions.chats import locked, open_chats
from pyh2o.writing import answer as answer_module
from pyh2o.writing.sampling import Sampling
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import tiny_llama

CHATS = Path("chats")
"""The folder of the chats that a test saves, in its own."""
SETTINGS: dict[str, Any] = {"n_ctx": 1000, "hh": 400, "recent": 400, "slack": 100, "policy": "snap"}


@dataclass
class Script:
    """What the model samples for one message: texts or actions in turn, a token per byte.

    Then it ends its text, unless `room` says that no positions are left.
    """

    pieces: list[str | Callable[[], None]]
    room: bool = True


@dataclass
class ScriptedModel(LoadedModel):
    """The model that `chat` and `ask` load.

    Attributes:
        answers: answers to the next messages, or errors to raise instead.
        changes: non-default numbers of the cache.
    """

    answers: deque[Script | Exception] = field(default_factory=deque)
    changes: dict[str, Any] = field(default_factory=dict)

    def say(self, *texts: str) -> None:
        """Set the next answers."""
        self.answers.extend(Script([text]) for text in texts)

    def n_text(self, *exchanges: tuple[str, str], system: str | None = None) -> int:
        """Count the tokens of a conversation of these messages and answers."""
        template = ChatTurns(self.llm.text.model, system)
        if not exchanges:
            return len(template.opening)
        messages = [
            template.next_turn(message) if n else template.first_turn(message)
            for n, (message, _) in enumerate(exchanges)
        ]
        return sum(map(len, messages)) + sum(len(answer.encode()) for _, answer in exchanges)

    def footer(
        self, *exchanges: tuple[str, str], system: str | None = None, cut: bool = False
    ) -> str:
        """Return the line under the last answer: half a second for reading and for each token.

        If the answer was `cut`, its last token is evaluated with the next message.
        """
        _, answer = exchanges[-1]
        count, speed = f"{len(answer.encode())} tokens", " · 2.0 tokens/s"
        if count == "1 tokens":
            count, speed = "1 token", ""
        used = self.n_text(*exchanges, system=system) - cut
        return f"{count}{speed} · first after 0.5 s · {self.cache(used)}\n"

    def empty_footer(self, used: int) -> str:
        """Return the line under an answer without tokens."""
        return f"0 tokens · {self.cache(used)}\n"

    @staticmethod
    def cache(used: int) -> str:
        """Return the cache as a footer shows it."""
        return f"all {used} tokens cached"


class RecordedConversation(Conversation):
    """The real conversation, which also records its calls."""

    last: RecordedConversation

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.said: list[str] = []
        self.limits: list[int | None] = []
        self.stores = 0
        type(self).last = self
        super().__init__(*arguments, **settings)

    def say(self, message: str, *, max_tokens: int | None = None) -> Generator[str]:
        self.said.append(message)
        self.limits.append(max_tokens)
        return super().say(message, max_tokens=max_tokens)

    def regenerate(self, *, max_tokens: int | None = None) -> Generator[str]:
        self.said.append(self.turns[-1].user)
        return super().regenerate(max_tokens=max_tokens)

    def resume(self, *, max_tokens: int | None = None) -> Generator[str]:
        self.limits.append(max_tokens)
        return super().resume(max_tokens=max_tokens)

    def edit(self, message: str, *, max_tokens: int | None = None) -> Generator[str]:
        self.said.append(message)
        return super().edit(message, max_tokens=max_tokens)

    def store(self, *, leaving: bool = False) -> None:
        super().store(leaving=leaving)
        self.stores += 1


def ticking_clock() -> Iterator[float]:
    """Advance the clock by half a second at each call."""
    return (tick / 2 for tick in itertools.count())


def open_chat_model(folder: Path) -> Llama:
    """Return the model for `scripted_chat`; opened once, as its weights do not matter."""
    path = write_tiny_gguf(folder / "tiny.gguf", seed=17, chat_template=CHAT_TEMPLATE)
    return tiny_llama(path, **SETTINGS)


def scripted_chat(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> ScriptedModel:
    """Make `chat` load the model."""
    model = ScriptedModel(llm)

    class ScriptedWriter:
        def __init__(self, llm: Llama, _sampling: Sampling, **_more: Any) -> None:
            self._llm = llm

        def write(self, tokens: Sequence[int]) -> Generator[int]:
            script = model.answers.popleft()
            if isinstance(script, Exception):
                raise script
            model.before_reading()
            self._llm.eval(tokens)
            for piece in script.pieces:
                if callable(piece):
                    piece()
                    continue
                for byte in piece.encode():
                    yield model.byte_0 + byte
                    if self._llm.n_tokens >= self._llm.position_limit:
                        return
                    self._llm.eval([model.byte_0 + byte])
            if script.room:
                yield self._llm.model.native.token_eos()

    def kv(text: Text) -> Any:
        return cache_with(text.n_tokens, **{"evicting": text.evicting, **model.changes})

    model.be_loaded(monkeypatch)
    monkeypatch.setattr(Text, "kv", property(kv))
    monkeypatch.setattr(answer_module, "Writer", ScriptedWriter)
    monkeypatch.setattr(conversation_module, "Conversation", RecordedConversation)
    clock = ticking_clock()
    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    return model


def said() -> list[str]:
    """Return the messages that the model received."""
    return RecordedConversation.last.said


def answers_of() -> list[tuple[str, str]]:
    """Return the last turns of the conversation."""
    return [(turn.user, turn.answer) for turn in RecordedConversation.last.turns]


def notes_of(output: Output) -> list[str]:
    """Return the notes without the footers."""
    return [line for line in output.notes.splitlines() if " tokens cached" not in line]


def titles() -> list[str]:
    """Return the titles of the saved texts."""
    with open_chats() as database:
        return sorted(text.title for text in database.texts())


@contextmanager
def held(title: str) -> Iterator[None]:
    """Open a session as another chat does."""
    with open_chats() as database:
        text = database.find(title)
        assert text is not None
        with locked(database, text):
            yield


class Person(ScriptSource):
    """A user who types these lines, and records the prompts shown."""

    interactive = True

    def __init__(self, lines: str) -> None:
        super().__init__(lines.encode().splitlines(keepends=True))

    def read(self, prompt: str = PROMPT, default: str = "", *, verbatim: bool = False) -> str:
        sys.stderr.write(prompt)
        return super().read(prompt, default, verbatim=verbatim)


def chat_with(person: Person, *arguments: str) -> Output:
    """Run `pyh2o chat` for a user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "open_source", lambda *_, **__: person)
        return run("chat", *arguments)
