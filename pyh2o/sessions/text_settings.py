"""The settings of a text in the database, and its turns as messages of the database."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from ..errors import PyH2OError, SessionError
from ..writing.cached_text import Span
from ..writing.finish import FINISH_INTERRUPTED
from ..writing.sampling import Sampling
from ..writing.thinking import USUAL, Thinking
from ..writing.tools import Tool
from .identity import ModelIdentity, Settings
from .layout import RowShares
from .lorebooks import LoreEntry
from .messages import CONVERSATION, STORY, Contents, Message, packed, unpacked
from .records import Count, record_of
from .turns import Dialogue, KeptAnswer, Turn

Spans = tuple[tuple[Count, Count], ...]


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """The settings that conversations and stories share.

    Attributes:
        model, settings: the model and its settings.
        sampling: sampling settings.
        pins: pinned spans other than the first tokens.
        forgotten: spans dropped from the cache.
        lore, note, thinking: as in the conversation or story.
    """

    kind: ClassVar[str]

    model: ModelIdentity
    settings: Settings
    sampling: Sampling
    pins: Spans = ()
    forgotten: Spans = ()
    lore: tuple[LoreEntry, ...] = ()
    note: str = ""
    thinking: Thinking = USUAL


@dataclass(frozen=True, kw_only=True)
class ConversationSettings(TextSettings):
    """The settings of a conversation.

    Attributes:
        template: fingerprint of the chat template.
        system, tools, places: as in the conversation.
        empty: number of consecutive empty answers.
    """

    kind = CONVERSATION

    template: str
    system: str | None
    tools: tuple[Tool, ...]
    places: RowShares
    empty: Count = 0


@dataclass(frozen=True, kw_only=True)
class StorySettings(TextSettings):
    """The settings of a story.

    Attributes:
        prompt_tokens: number of tokens of the prompt, without notes.
        echo: whether the prompt is a part of the text.
        opening: number of characters of the text before those of the generated tokens.
        text_bytes: number of bytes returned so far.
        held: bytes that TextPieces holds back, in hexadecimal digits.
        unsearched: see TextPieces.
        finish, until, seconds, notes, memory, told: as in the story.
        ended: whether the model ended its text after the last token.
        loop_guard, ignore_eos: arguments of the story.
    """

    kind = STORY

    prompt_tokens: Count
    echo: bool
    opening: Count
    text_bytes: Count
    held: str
    unsearched: Count
    finish: str | None
    ended: bool
    until: list[str]
    loop_guard: bool
    ignore_eos: bool
    seconds: float
    notes: dict[str, Any] = field(default_factory=dict)
    memory: str = ""
    told: Spans = ()


def within(spans: Sequence[Span], n_tokens: int) -> Spans:
    """Return the spans in the first `n_tokens` tokens."""
    return tuple((start, end) for start, end in spans if end <= n_tokens)


@contextlib.contextmanager
def damage_found(path: Path) -> Iterator[None]:
    """Turn an error while a session is decoded into a SessionError."""
    try:
        yield
    except PyH2OError:
        raise
    except Exception as error:  # json, zipfile and numpy raise many kinds
        why = " ".join(str(error).split()) or type(error).__name__
        raise SessionError(
            f"the session file {path} is damaged ({why}): use another copy of it, or start a new "
            "session"
        ) from error


# Fields of a turn that are not columns of the database.
_ABOUT = ("told", "steps", "calls", "thoughts")


def message_of(turn: Turn, text: Sequence[int], *, is_first: bool) -> Message:
    """Return a turn as a message; the first one has the tokens before it, too.

    Args:
        turn: the turn; an answer in progress has no finish reason.
        text: the tokens of the conversation.
        is_first: whether it is the first turn.
    """
    values = asdict(turn)
    start = 0 if is_first else turn.start
    return Message(
        user=turn.user,
        answer=turn.answer,
        finish=turn.finish or None,
        attempt=turn.attempt,
        n_before=turn.answer_start - start,
        tokens=packed(text[start : turn.end]),
        about={name: values[name] for name in _ABOUT if values[name]}
        | ({"start": turn.start} if is_first else {}),
    )


def messages_of(dialogue: Dialogue, text: Sequence[int]) -> tuple[list[Message], list[Message]]:
    """Return the path of messages of a dialogue, and the replaced answers to the last one."""
    turns = dialogue.turns
    path = [message_of(turn, text, is_first=not n) for n, turn in enumerate(turns)]
    replaced = [
        message_of(
            kept.in_turn(turns[-1]),
            [*text[: turns[-1].answer_start], *kept.tokens],
            is_first=len(turns) == 1,
        )
        for kept in dialogue.kept
    ]
    return path, replaced


def dialogue_of(contents: Contents) -> tuple[Dialogue, list[int]]:
    """Return the dialogue of a conversation, and its tokens.

    Raises:
        ValueError: a message is damaged.
    """
    turns, tokens = list[Turn](), list[int]()
    for message in contents.messages:
        start = len(tokens)
        tokens += unpacked(message.tokens)
        values = {
            "start": start,
            **message.about,
            "user": message.user,
            "answer": message.answer,
            "finish": message.finish or FINISH_INTERRUPTED,
            "attempt": message.attempt,
            "answer_start": start + message.n_before,
            "end": len(tokens),
        }
        turns.append(record_of(Turn, values, "message"))
    names = {each.name for each in fields(KeptAnswer)}
    kept = [
        record_of(
            KeptAnswer,
            {
                **{name: value for name, value in message.about.items() if name in names},
                "answer": message.answer,
                "finish": message.finish or FINISH_INTERRUPTED,
                "attempt": message.attempt,
                "tokens": unpacked(message.answer_tokens),
            },
            "answer",
        )
        for message in contents.replaced
    ]
    return Dialogue(tuple(turns), tuple(kept)), tokens
