"""Headers of session files, and checks whether a session matches a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from ..cache.settings import saved_names
from ..core.chat_formats import with_format_advice
from ..core.model import Model
from ..core.parameters import KV_TYPES, ROPE_NAMES
from ..core.projector import is_of_picture
from ..core.text import Text
from ..errors import OtherSettingsError, SessionError
from ..writing.cached_text import Span
from ..writing.finish import FINISH_STOP, FINISH_UNTIL
from ..writing.sampling import Sampling
from ..writing.thinking import USUAL, Thinking
from ..writing.tools import Tool
from .chat_template import ChatTemplate
from .layout import Layout, RowShares, lay_out
from .lorebooks import LoreEntry
from .records import Count, Scalar, in_one_line, record_of
from .session_file import Session, damage_found, read_session
from .story_notes import hidden_spans, own_tokens
from .turns import ANSWER_FINISHES, Dialogue, KeptAnswer, Turn

CONVERSATION, STORY = "conversation", "story"
FINISHES = (*ANSWER_FINISHES, FINISH_UNTIL)
# Cache settings by name (see `settings_identity`).
Settings = dict[str, Scalar | dict[str, Scalar]]
# Settings and their command-line options.
_OPTIONS = {
    "ctx": "--ctx",
    **{saved: f"--{name.replace('_', '-')}" for name, saved in saved_names().items()},
    "type_k": "--kv-type",
    "type_v": "--kv-type",
}


@dataclass(frozen=True)
class ModelIdentity:
    """The identity of a model's file.

    Attributes:
        file: name of the file.
        bytes: size of the file.
        sha256: hash of its header, in hexadecimal digits.
        path: last known path; the same model may be elsewhere.
    """

    file: str
    bytes: Annotated[int, range(2**63)]
    sha256: str
    path: str = ""

    def is_same(self, other: ModelIdentity) -> bool:
        """Return whether it is the same model, at any path."""
        return (self.sha256, self.bytes) == (other.sha256, other.bytes)


def model_identity(model: Model) -> ModelIdentity:
    """Return the identity of a model."""
    file = model.file
    return ModelIdentity(**file.record(), path=str(file.path))


def settings_identity(model: Model) -> dict[str, Any]:
    """Return the settings on which a state of the cache depends.

    Threads, batch sizes and devices are not among them, as they only change rounding.
    """
    params = model.context_params
    lora = (
        None
        if model.lora_file is None
        else model.lora_file.record() | {"scale": model.parameters.lora_scale}
    )
    types = {number: name for name, number in KV_TYPES.items()}
    return {
        "evict": model.evicting,
        "ctx": model.window,
        **({} if model.budget is None else model.budget.saved()),
        "type_k": types.get(params.type_k, str(params.type_k)),
        "type_v": types.get(params.type_v, str(params.type_v)),
        "flash_attn": int(params.flash_attn_type),
        **{name: getattr(params, name) for name in ROPE_NAMES},
        "lora": lora,
        "kv_overrides": model.parameters.kv_overrides,
    }


@dataclass(frozen=True, kw_only=True)
class SessionHeader:
    """The fields that headers of conversations and stories share.

    Attributes:
        model, settings: the model and settings of the state of the cache.
        sampling: sampling settings.
        cached: number of tokens in the state of the cache.
        pins: pinned spans other than the first tokens.
        forgotten: spans dropped from the cache.
        archive: id of the archive's file next to the session; None if it has none.
    """

    kind: ClassVar[str]

    model: ModelIdentity
    settings: Settings
    sampling: Sampling
    cached: Count
    pins: tuple[tuple[Count, Count], ...]
    forgotten: tuple[tuple[Count, Count], ...] = ()
    archive: str | None = None

    def check_made_with(self, model: Model) -> None:
        """Check that the session was made with this model and its settings.

        Raises:
            OtherSettingsError: the first difference.
        """
        mine = model_identity(model)
        if not self.model.is_same(mine):
            raise OtherSettingsError(
                f"this session was made with the model {in_one_line(self.model.file)}, not with "
                f"{mine.file}: give that one (--model), or start a new session"
            )
        theirs, now = self.settings, settings_identity(model)
        for name in {**now, **theirs}:
            if name not in now or name not in theirs or theirs[name] != now[name]:
                raise OtherSettingsError(
                    f"this session was made {_shown(name, theirs)}, and the model is loaded "
                    f"{_shown(name, now)}: give the same settings, or start a new session"
                )

    def check(self, tokens: Sequence[int]) -> None:
        """Check the header against the tokens of the text.

        Raises:
            ValueError: they do not match.
        """
        _check_spans("pins", self.pins, tokens)
        _check_spans("dropped spans", self.forgotten, tokens)
        if self.cached > len(tokens):
            raise ValueError(f"{self.cached} of its {len(tokens)} tokens are cached")


def _check_spans(name: str, spans: Sequence[Span], tokens: Sequence[int]) -> None:
    if any(len(span) != 2 or span[0] >= span[1] for span in spans) or any(
        before[1] > after[0] for before, after in pairwise(spans)
    ):
        raise ValueError(f"its {name} are not spans")
    if spans and spans[-1][1] > len(tokens):
        raise ValueError(f"its {name} are outside its text")


@dataclass(frozen=True, kw_only=True)
class SavedConversation(SessionHeader):
    """The header of a conversation.

    Attributes:
        template: fingerprint of the chat template.
        system, tools, thinking, places, turns, lore, note: as in the conversation.
        known: unused; older files have it.
        empty: number of consecutive empty answers.
        kept: replaced answers to the last message, in the order of replacement.
    """

    kind = CONVERSATION

    template: str
    system: str | None
    places: RowShares
    turns: tuple[Turn, ...]
    empty: Count
    kept: tuple[KeptAnswer, ...]
    known: Count = 0
    lore: tuple[LoreEntry, ...] = ()
    note: str = ""
    tools: tuple[Tool, ...] = ()
    thinking: Thinking = USUAL

    @property
    def dialogue(self) -> Dialogue:
        """Messages and answers."""
        return Dialogue(self.turns, self.kept)

    def check(self, tokens: Sequence[int]) -> None:
        if not all(turn.start < turn.answer_start <= turn.end for turn in self.turns):
            raise ValueError("a turn has no message tokens, or ends before its answer")
        if not all(turn.part_starts[-1] <= turn.end for turn in self.dialogue.answers + self.turns):
            raise ValueError("the steps of an answer are longer than it")
        if any(after.start != turn.end for turn, after in pairwise(self.turns)):
            raise ValueError("its turns are not contiguous")
        if self.turns and self.turns[-1].end != len(tokens):
            raise ValueError("its turns do not end where its text ends")
        attempts = set(self.dialogue.attempts) if self.turns else set[int]()
        if self.kept and len(attempts) != len(self.kept) + 1:
            raise ValueError("two kept answers have the same attempt, or there is no message")
        if not all(each.tokens for each in self.kept):
            raise ValueError("a kept answer has no tokens")
        super().check(tokens)


@dataclass(frozen=True, kw_only=True)
class SavedStory(SessionHeader):
    """The header of a story.

    Attributes:
        prompt_tokens: number of tokens of the prompt.
        opening: text before that of the generated tokens.
        text_bytes: number of bytes returned so far.
        held: bytes that TextPieces holds back, in hexadecimal digits.
        unsearched: see TextPieces.
        finish, until, seconds, notes, memory, told, lore, note, thinking: as in the story.
        ended: whether the model ended its text after the last token.
        loop_guard, ignore_eos: arguments of the story.
    """

    kind = STORY

    prompt_tokens: Count
    opening: str
    text_bytes: Count
    held: str
    unsearched: Count
    finish: Annotated[str, FINISHES] | None
    ended: bool
    until: list[str]
    loop_guard: bool
    ignore_eos: bool
    seconds: float
    notes: dict[str, Any]
    memory: str = ""
    told: tuple[tuple[Count, Count], ...] = ()
    lore: tuple[LoreEntry, ...] = ()
    note: str = ""
    thinking: Thinking = USUAL

    def check(self, tokens: Sequence[int]) -> None:
        super().check(tokens)
        _check_spans("notes", self.told, tokens)
        if not 0 < self.prompt_tokens <= len(own_tokens(tokens, self.told)):
            raise ValueError(f"its prompt_tokens is {self.prompt_tokens}")
        if self.seconds < 0:
            raise ValueError(f"its seconds is {self.seconds}")
        for text in (self.opening, self.memory, *self.until):
            text.encode()

    def hidden(self, model: Model, tokens: Sequence[int]) -> list[Span]:
        """Return the spans of tokens that are not part of its text."""
        return hidden_spans(
            model,
            tokens,
            self.told,
            n_prompt=self.prompt_tokens,
            opening=self.opening,
            memory=self.memory,
        )

    def check_text(self, written: bytes) -> None:
        """Check the header against the bytes of the generated tokens.

        Raises:
            ValueError: they do not match.
        """
        whole, held = self.opening.encode() + written, bytes.fromhex(self.held)
        given = whole[: len(whole) - len(held)].decode(errors="ignore")
        if not whole.endswith(held) or len(given.encode()) != self.text_bytes:
            raise ValueError(f"its text_bytes is {self.text_bytes}, which does not match its text")
        if self.unsearched > len(held):
            raise ValueError(f"its unsearched is {self.unsearched}")
        held[: self.unsearched].decode()


Header = TypeVar("Header", bound=SessionHeader)


def read_header(path: str | Path, kind: type[Header]) -> Header:
    """Read only the header of a session file.

    Raises:
        SessionError: the file does not exist, is damaged, or of another kind.
    """
    header = read_session(path, kind.kind, state=False).header
    with damage_found(path):
        return record_of(kind, header)


def open_session(
    path: str | Path, kind: type[Header], model: Model, *, reread: bool
) -> tuple[Session, Header, bool]:
    """Read a session file to continue it with a model.

    Args:
        path: the session file.
        kind: the expected kind.
        model: the model.
        reread: whether model and settings may differ from those of the file.

    Returns:
        The session, its header, and whether it was made with this model.

    Raises:
        SessionError: the file does not exist, is damaged, or of another model, other settings or
            another format.
    """
    session = read_session(path, kind.kind)
    with damage_found(path):
        header = record_of(kind, session.header)
    if not reread:
        header.check_made_with(model)
    is_same = header.model.is_same(model_identity(model))
    with damage_found(path):
        header.check(session.tokens)
        if is_same:
            _check_vocabulary(model, session.tokens)
    return session, header, is_same


def _check_vocabulary(model: Model, tokens: Sequence[int]) -> None:
    n_vocab = model.n_vocab
    if any(not (0 <= token < n_vocab or is_of_picture(token)) for token in tokens):
        raise ValueError("it has tokens that the model does not have")


def open_conversation(
    path: str | Path, llm: Text, *, reread: bool
) -> tuple[Session, SavedConversation, Layout | None]:
    """Read a session file of a conversation to continue it; the cache is not changed.

    Args:
        path: the session file.
        llm: the model.
        reread: whether the text is read again, with any model and settings.

    Returns:
        The session, its header without fields that the model does not support, and the layout of
        a text that is read again.

    Raises:
        SessionError: as in `open_session`, or it was made with another chat template.
        SettingsError: the pinned tokens do not fit the budget.
    """
    session, saved, is_same = open_session(path, SavedConversation, llm.model, reread=reread)
    for picture in session.pictures.values():
        if llm.model.projector is None:
            raise SessionError(
                f"the session {path} has pictures, and the model was loaded without a projector: "
                "give it one (--mmproj FILE)"
            )
        llm.model.projector.remember(picture)
    if not is_same:
        saved = replace(saved, thinking=USUAL)  # another model may not support reasoning
    template = ChatTemplate(llm.model, saved.system, saved.tools, saved.thinking)
    if not reread and template.fingerprint != saved.template:
        raise with_format_advice(
            OtherSettingsError(
                f"the session {path} was made with another chat template: start a new session"
            )
        )
    with damage_found(path):
        if is_same:
            for answer in saved.kept:
                _check_vocabulary(llm.model, answer.tokens)
    places, layout = saved.places, None
    if reread and is_same:
        layout = lay_out(llm, template, places, saved.turns, session.tokens, saved.pins)
    elif reread:
        turns = [replace(turn, finish=FINISH_STOP, attempt=0, calls=()) for turn in saved.turns]
        saved, layout = replace(saved, kept=()), lay_out(llm, template, places, turns)
    return session, saved, layout


def _shown(name: str, settings: Mapping[str, Any]) -> str:
    """Return a setting as a phrase with its command-line option."""
    if name == "evict":
        return "with eviction" if settings.get(name) else "with --no-evict"
    option = _OPTIONS.get(name) or in_one_line(name)
    if name not in settings:
        return f"without {option}"
    value = settings[name]
    text = value if isinstance(value, str) else json.dumps(value)
    return f"with {option} {in_one_line(text)}"
