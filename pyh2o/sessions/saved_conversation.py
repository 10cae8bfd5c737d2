"""Reads the session file of a conversation, and says what its header must hold."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import OtherSettingsError
from ..generation.finish import (
    FINISH_INTERRUPTED,
    FINISH_LENGTH,
    FINISH_REPETITION,
    FINISH_STOP,
    FINISH_TRAINED_CONTEXT,
)
from ..generation.sampling import Sampling
from ..llama import Llama
from ..text.chat_template import ChatTemplate
from .identity import ModelIdentity, Settings, check_same, check_settings
from .kept_answers import KeptAnswer, attempts, check_kept, check_known
from .pins import check_pins
from .places import Places
from .records import Count, in_one_line, record_of
from .session_file import Session, damage_found, read_header, read_session
from .turns import Turn

KIND = "conversation"
FINISHES = (
    FINISH_STOP,
    FINISH_LENGTH,
    FINISH_REPETITION,
    FINISH_TRAINED_CONTEXT,
    FINISH_INTERRUPTED,
)


@dataclass(frozen=True)
class SavedConversation:
    """The header.

    Attributes:
        model, settings: what the state of the cache depends on.
        template: fingerprint of the chat template.
        system, sampling, places, turns: as in the conversation.
        cached: tokens that the state of the cache covers.
        known: tokens behind them that had been evaluated before.
        empty: answers in a row that had no text.
        archive: which file beside the session is its archive's; None if it has none.
        pins: spans that are never evicted, beside the system prompt.
        kept: answers to the last message that were replaced, in the order of that.
    """

    model: ModelIdentity
    settings: Settings
    template: str
    system: str | None
    sampling: Sampling
    places: Places
    turns: tuple[Turn, ...]
    cached: Count
    known: Count
    empty: Count
    archive: str | None = None
    pins: tuple[tuple[Count, Count], ...] = ()
    kept: tuple[KeptAnswer, ...] = ()

    def __post_init__(self) -> None:
        """Refuse settings and turns that make no sense.

        Raises:
            ValueError: a turn has no message or no answer, or they are not one behind the other, or
                an answer that is kept is none.
        """
        check_settings(self.settings)
        check_pins(self.pins)
        for turn in self.turns:
            if not 0 <= turn.start < turn.answer_start < turn.end:
                raise ValueError("a turn has no message or no answer")
            if not 0 <= turn.attempt <= 2**31:
                raise ValueError(f"the attempt of a turn is {turn.attempt}")
        finishes = [each.finish for each in self.turns] + [each.finish for each in self.kept]
        for finish in finishes:
            if finish not in FINISHES:
                raise ValueError(f"the answer of a turn ended by {in_one_line(ascii(finish))}")
        check_kept(self.kept, self.turns)
        if any(after.start != turn.end for turn, after in pairwise(self.turns)):
            raise ValueError("its turns are not one behind the other")

    @classmethod
    def of(cls, header: dict[str, Any]) -> SavedConversation:
        """Read a header, which somebody may have edited.

        Raises:
            ValueError: it makes no sense.
        """
        return record_of(cls, header)

    @property
    def attempts(self) -> list[int]:
        """Of all answers to the last message that are kept, the one in its turn among them."""
        return attempts(self.turns, self.kept)

    def check_text(self, tokens: list[int], opening: list[int]) -> None:
        """Compare the header with the tokens of the text.

        Args:
            tokens: of the text.
            opening: that a conversation of this template begins with.

        Raises:
            ValueError: they do not belong together.
        """
        n_text = len(tokens)
        if self.pins and self.pins[-1][1] > n_text:
            raise ValueError("its pins are not in its text")
        if self.turns and self.turns[-1].end != n_text:
            raise ValueError("its turns are not its text")
        if self.cached + self.known > n_text:
            raise ValueError(f"it has {n_text} tokens, of which {self.cached} are cached")
        n_opening = self.turns[0].start if self.turns else n_text
        if n_opening > len(opening) or tokens[:n_opening] != opening[:n_opening]:
            raise ValueError("its text does not begin with the system prompt")


def read_saved_conversation(path: str | Path) -> SavedConversation:
    """Read the header of a conversation's session file, which is quick.

    Raises:
        SessionError: there is no such file, it is damaged, or of another kind.
    """
    header = read_header(path, KIND)
    with damage_found(path):
        return SavedConversation.of(header)


def open_saved_conversation(
    path: str | Path, llm: Llama
) -> tuple[Session, SavedConversation, ChatTemplate]:
    """Read a conversation's session file to go on with it in a model.

    Returns:
        The session, what its header says, and the model's chat template with its system prompt.

    Raises:
        SessionError: no such file, or it is damaged, of another model, other settings, another
            template or a newer format.
    """
    session = read_session(path, KIND)
    check_same(session, llm)
    with damage_found(path):
        saved = SavedConversation.of(session.header)
        check_known(saved.kept, llm)
    template = ChatTemplate(llm, saved.system)
    if template.fingerprint != saved.template:
        raise OtherSettingsError(
            f"the session {path} was made with another chat template: load the model with the "
            "same chat_format, or start a new session"
        )
    with damage_found(path):
        saved.check_text(session.tokens, template.opening)
    return session, saved, template
