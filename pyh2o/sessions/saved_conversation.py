"""What the header of a conversation's session file says, and whether it goes with a model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ..core.text import Text
from ..errors import OtherSettingsError
from ..writing.chat_template import ChatTemplate
from ..writing.finish import (
    FINISH_INTERRUPTED,
    FINISH_LENGTH,
    FINISH_REPETITION,
    FINISH_STOP,
    FINISH_TRAINED_CONTEXT,
)
from ..writing.sampling import Sampling
from .identity import (
    ModelIdentity,
    Settings,
    check_same_header,
    check_settings,
    check_tokens,
    model_identity,
)
from .layout import Places
from .pins import check_pins
from .records import Count, in_one_line, record_of
from .session_file import Session, damage_found, read_overview, read_session
from .turns import KeptAnswer, Turn, attempts

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

    Raises:
        ValueError: they make no sense.
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
    archive: str | None
    pins: tuple[tuple[Count, Count], ...]
    kept: tuple[KeptAnswer, ...]

    def __post_init__(self) -> None:
        check_settings(self.settings)
        check_pins(self.pins)
        for turn in self.turns:
            if not 0 <= turn.start < turn.answer_start < turn.end:
                raise ValueError("a turn has no message or no answer")
            if not 0 <= turn.attempt <= 2**31:
                raise ValueError(f"the attempt of a turn is {turn.attempt}")
        finishes = [*(turn.finish for turn in self.turns), *(each.finish for each in self.kept)]
        for finish in finishes:
            if finish not in FINISHES:
                raise ValueError(f"the answer of a turn ended by {in_one_line(ascii(finish))}")
        if self.kept and len(set(self.attempts)) != len(self.kept) + 1:
            raise ValueError("it keeps two answers of one attempt, or to no message")
        if not all(each.tokens for each in self.kept):
            raise ValueError("an answer it keeps has no tokens")
        if any(after.start != turn.end for turn, after in pairwise(self.turns)):
            raise ValueError("its turns are not one behind the other")

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
    header = read_overview(path, KIND).header
    with damage_found(path):
        return record_of(SavedConversation, header)


def open_saved_conversation(
    path: str | Path, llm: Text, *, reread: bool
) -> tuple[Session, SavedConversation, ChatTemplate]:
    """Read a conversation's session file to go on with it in a model.

    Args:
        path: the file.
        llm: the model.
        reread: whether model, settings and template may be others than those of the file.

    Returns:
        The session, what its header says, and the model's chat template with its system prompt.

    Raises:
        SessionError: no such file, or it is damaged, of another model, other settings, another
            template or another format.
    """
    session = read_session(path, KIND)
    with damage_found(path):
        saved = record_of(SavedConversation, session.header)
    if not reread:
        check_same_header(session.header, llm.model)
    template = ChatTemplate(llm.model, saved.system)
    if not reread and template.fingerprint != saved.template:
        raise OtherSettingsError(
            f"the session {path} was made with another chat template: load the model with the "
            "same chat_format, or start a new session"
        )
    with damage_found(path):
        saved.check_text(session.tokens, session.tokens if reread else template.opening)
        if saved.model.is_same(model_identity(llm.model)):
            check_tokens(llm.model, session.tokens, *(each.tokens for each in saved.kept))
    return session, saved, template
