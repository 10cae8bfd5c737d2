"""Texts and messages as the database stores them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

CONVERSATION, STORY = "conversation", "story"


@dataclass(frozen=True)
class Message:
    """A message with its answer, or a passage of a story.

    Attributes:
        user: the message; "" for a passage.
        answer: text of the answer or passage.
        finish: finish reason; None while the answer is generated.
        attempt: number of earlier answers to the message.
        n_before: number of tokens before those of the answer.
        tokens: tokens of the message and the answer, little-endian int32.
        about: other fields, as JSON values.
    """

    user: str
    answer: str
    finish: str | None = None
    attempt: int = 0
    n_before: int = 0
    tokens: bytes = b""
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def answer_tokens(self) -> bytes:
        """The tokens of the answer."""
        return self.tokens[4 * self.n_before :]

    def replaces(self, stored: Message) -> bool:
        """Return whether this is a newer version of a stored answer to the same message."""
        # tokens of a stop string at the end of an answer in progress are dropped
        return stored.finish is None or self.answer_tokens.startswith(stored.answer_tokens)


FIELDS = ", ".join(each.name for each in fields(Message))


def packed(tokens: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Return tokens as bytes of a `Message`."""
    return np.asarray(tokens, "<i4").tobytes()


def unpacked(tokens: bytes) -> list[int]:
    """Return tokens from bytes of a `Message`."""
    unpacked: list[int] = np.frombuffer(tokens, "<i4").tolist()
    return unpacked


@dataclass(frozen=True)
class TextInfo:
    """A text in a list.

    Attributes:
        id: unique in the database; never used again.
        kind: "conversation" or "story".
        created, changed: times in seconds since 1970.
        settings: what `Database.write` was given.
        n_messages, n_tokens: size of the current path.
    """

    id: int
    kind: str
    title: str
    created: float
    changed: float
    settings: dict[str, Any]
    n_messages: int
    n_tokens: int


INFO = ", ".join(each.name for each in fields(TextInfo))


@dataclass(frozen=True)
class Found:
    """A search result.

    Attributes:
        text: the text.
        message: id of the message; None if only the title matches.
        snippet: the words in their context, in one line.
    """

    text: TextInfo
    message: int | None
    snippet: str


@dataclass(frozen=True)
class Contents:
    """The contents of a text.

    Attributes:
        messages: the path to the head.
        replaced: replaced answers to the last message, in the order of replacement.
        pictures: files of the pictures in the text, by their hashes.
    """

    info: TextInfo
    messages: list[Message]
    replaced: list[Message]
    pictures: dict[str, bytes] = field(default_factory=dict)


def values_of(message: Message) -> tuple[Any, ...]:
    """Return the values of the columns `FIELDS`."""
    *values, about = astuple(message)
    return (*values, json.dumps(about))


def message_from(row: Sequence[Any]) -> Message:
    """Return a message from the columns `FIELDS`."""
    user, answer, finish, attempt, n_before, tokens, about = row
    return Message(user, answer, finish, attempt, n_before, tokens, json.loads(about))


def info_from(row: Sequence[Any]) -> TextInfo:
    """Return a text from the columns `INFO`."""
    number, kind, title, created, changed, settings, *sizes = row
    return TextInfo(number, kind, title, created, changed, json.loads(settings), *sizes)
