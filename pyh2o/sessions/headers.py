"""What the headers of session files say, and whether a session goes with a model."""

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
from ..writing.chat_template import ChatTemplate
from ..writing.finish import FINISH_STOP, FINISH_UNTIL
from ..writing.sampling import Sampling
from ..writing.thinking import USUAL, Thinking
from ..writing.tools import Tool
from .layout import Layout, Places, lay_out
from .lorebooks import LoreEntry
from .records import Count, Scalar, in_one_line, record_of
from .session_file import Session, damage_found, read_session
from .story_notes import hidden_spans, own_tokens
from .turns import ANSWER_FINISHES, Dialogue, KeptAnswer, Turn

CONVERSATION, STORY = "conversation", "story"
FINISHES = (*ANSWER_FINISHES, FINISH_UNTIL)
# The settings of a cache by their names (see `settings_identity`).
Settings = dict[str, Scalar | dict[str, Scalar]]
# What the command line calls settings.
_OPTIONS = {
    "ctx": "--ctx",
    **{saved: f"--{name.replace('_', '-')}" for name, saved in saved_names().items()},
    "type_k": "--kv-type",
    "type_v": "--kv-type",
}


@dataclass(frozen=True)
class ModelIdentity:
    """What tells a model from others.

    Attributes:
        file: name of the file.
        bytes: its size.
        sha256: hash of its header, in hexadecimal digits.
        path: where to look for it first; the same model elsewhere is as good.
    """

    file: str
    bytes: Annotated[int, range(2**63)]
    sha256: str
    path: str = ""

    def is_same(self, other: ModelIdentity) -> bool:
        """Whether it is the same model, wherever its file lies."""
        return (self.sha256, self.bytes) == (other.sha256, other.bytes)


def model_identity(model: Model) -> ModelIdentity:
    """What tells a model from others."""
    file = model.file
    return ModelIdentity(**file.record(), path=str(file.path))


def settings_identity(model: Model) -> dict[str, Any]:
    """The settings that a state of the cache depends on, and how the text goes on after it.

    Threads, batch sizes and devices may differ: they change the rounding of a result, no more.
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
    """What conversations and stories have in common.

    Attributes:
        model, settings: what the state of the cache depends on.
        sampling: how tokens are drawn.
        cached: tokens that the state of the cache covers.
        pins: spans that are never evicted, beside the first tokens.
        forgotten: spans that the text does without.
        archive: which file beside the session is its archive's; None if it has none.
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
        """Refuse a session that was made with another model or other settings.

        Raises:
            OtherSettingsError: naming the first thing that differs.
        """
        mine = model_identity(model)
        if not self.model.is_same(mine):
            raise OtherSettingsError(
                f"this session was made with the model {in_one_line(self.model.file)}, which is "
                f"another than {mine.file}: give that one (--model), or start a new session"
            )
        theirs, now = self.settings, settings_identity(model)
        for name in {**now, **theirs}:
            if name not in now or name not in theirs or theirs[name] != now[name]:
                raise OtherSettingsError(
                    f"this session was made {_shown(name, theirs)}, and the model is loaded "
                    f"{_shown(name, now)}: give the same settings, or start a new session"
                )

    def check(self, tokens: Sequence[int]) -> None:
        """Refuse what makes no sense for the tokens of the text.

        Raises:
            ValueError: something does not.
        """
        _check_spans("pins", self.pins, tokens)
        _check_spans("forgotten spans", self.forgotten, tokens)
        if self.cached > len(tokens):
            raise ValueError(f"it has {len(tokens)} tokens, of which {self.cached} are cached")


def _check_spans(name: str, spans: Sequence[Span], tokens: Sequence[int]) -> None:
    if any(len(span) != 2 or span[0] >= span[1] for span in spans) or any(
        before[1] > after[0] for before, after in pairwise(spans)
    ):
        raise ValueError(f"its {name} are no spans")
    if spans and spans[-1][1] > len(tokens):
        raise ValueError(f"its {name} are not in its text")


@dataclass(frozen=True, kw_only=True)
class SavedConversation(SessionHeader):
    """The header of a conversation.

    Attributes:
        template: fingerprint of the chat template.
        system, tools, thinking, places, turns, lore, note: as in the conversation.
        known: not used; files that were written before have it.
        empty: answers in a row that had no text.
        kept: answers to the last message that were replaced, in the order of that.
    """

    kind = CONVERSATION

    template: str
    system: str | None
    places: Places
    turns: tuple[Turn, ...]
    empty: Count
    kept: tuple[KeptAnswer, ...]
    known: Count = 0
    lore: tuple[LoreEntry, ...] = ()
    note: str = ""
    tools: tuple[Tool, ...] = ()
    thinking: Thinking = USUAL

    @property
    def said(self) -> Dialogue:
        """What was said."""
        return Dialogue(self.turns, self.kept)

    def check(self, tokens: Sequence[int]) -> None:
        if not all(turn.start < turn.answer_start <= turn.end for turn in self.turns):
            raise ValueError("a turn has no message, or ends before its answer")
        if not all(turn.part_starts[-1] <= turn.end for turn in self.said.answers + self.turns):
            raise ValueError("the steps of an answer are longer than it")
        if any(after.start != turn.end for turn, after in pairwise(self.turns)):
            raise ValueError("its turns are not one behind the other")
        if self.turns and self.turns[-1].end != len(tokens):
            raise ValueError("its turns are not its text")
        attempts = set(self.said.attempts) if self.turns else set[int]()
        if self.kept and len(attempts) != len(self.kept) + 1:
            raise ValueError("it keeps two answers of one attempt, or to no message")
        if not all(each.tokens for each in self.kept):
            raise ValueError("an answer it keeps has no tokens")
        super().check(tokens)


@dataclass(frozen=True, kw_only=True)
class SavedStory(SessionHeader):
    """The header of a story.

    Attributes:
        prompt_tokens: how many of the tokens are the prompt's.
        opening: text that comes before that of the story's tokens.
        text_bytes: given out so far.
        held: what TextPieces holds back, in hexadecimal digits.
        unsearched: see TextPieces.
        finish, until, seconds: as in the story.
        ended: whether the model ended its text after the last token.
        loop_guard, ignore_eos: as the story was begun.
        notes: of whoever wrote the story.
        memory, told, lore, note, thinking: as in the story.
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
        """Where its tokens are no part of its text."""
        return hidden_spans(
            model,
            tokens,
            self.told,
            n_prompt=self.prompt_tokens,
            opening=self.opening,
            memory=self.memory,
        )

    def check_text(self, written: bytes) -> None:
        """Compare the header with the bytes of the story's own tokens.

        Raises:
            ValueError: they do not belong together.
        """
        whole, held = self.opening.encode() + written, bytes.fromhex(self.held)
        given = whole[: len(whole) - len(held)].decode(errors="ignore")
        if not whole.endswith(held) or len(given.encode()) != self.text_bytes:
            raise ValueError(f"its text_bytes is {self.text_bytes}, which its text has not")
        if self.unsearched > len(held):
            raise ValueError(f"its unsearched is {self.unsearched}")
        held[: self.unsearched].decode()


Header = TypeVar("Header", bound=SessionHeader)


def read_header(path: str | Path, kind: type[Header]) -> Header:
    """Read the header of a session file, which is quick.

    Raises:
        SessionError: there is no such file, it is damaged, or of another kind.
    """
    header = read_session(path, kind.kind, state=False).header
    with damage_found(path):
        return record_of(kind, header)


def open_session(
    path: str | Path, kind: type[Header], model: Model, *, reread: bool
) -> tuple[Session, Header, bool]:
    """Read a session file to go on with it in a model.

    Args:
        path: the file.
        kind: of session.
        model: it.
        reread: whether model and settings may be others than those of the file.

    Returns:
        The session, what its header says, and whether it was made with this model.

    Raises:
        SessionError: no such file, or it is damaged, of another model, other settings or another
            format.
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
        raise ValueError("it has tokens the model does not know")


def open_conversation(
    path: str | Path, llm: Text, *, reread: bool
) -> tuple[Session, SavedConversation, Layout | None]:
    """Read a conversation's session file to go on with it in a model, whose cache stays as it is.

    Args:
        path: the file.
        llm: the model.
        reread: whether the text is read again, under any model and settings.

    Returns:
        The session, what its header says, without what the model cannot know, and the tokens of a
        text that is read again.

    Raises:
        SessionError: as for `open_session`, or it is of another chat template.
        SettingsError: there is no room for what is pinned.
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
        saved = replace(saved, thinking=USUAL)  # another model may have no thoughts
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
    """Return a setting as the user gives it, in a phrase."""
    if name == "evict":
        return "with eviction" if settings.get(name) else "with --no-evict"
    option = _OPTIONS.get(name) or in_one_line(name)
    if name not in settings:
        return f"without {option}"
    value = settings[name]
    text = value if isinstance(value, str) else json.dumps(value)
    return f"with {option} {in_one_line(text)}"
