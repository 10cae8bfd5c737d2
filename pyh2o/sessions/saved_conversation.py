"""What the header of a conversation's session file says, and whether it goes with a template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ..core.text import Text
from ..errors import OtherSettingsError
from ..writing.chat_template import ChatTemplate
from .layout import Places
from .records import Count
from .session_file import Session, damage_found
from .session_header import SessionHeader, check_vocabulary, open_session
from .turns import KeptAnswer, Turn, attempts

KIND = "conversation"


@dataclass(frozen=True, kw_only=True)
class SavedConversation(SessionHeader):
    """The header.

    Attributes:
        template: fingerprint of the chat template.
        system, places, turns: as in the conversation.
        known: tokens behind those in the cache that had been evaluated before.
        empty: answers in a row that had no text.
        kept: answers to the last message that were replaced, in the order of that.
    """

    kind = KIND

    template: str
    system: str | None
    places: Places
    turns: tuple[Turn, ...]
    known: Count
    empty: Count
    kept: tuple[KeptAnswer, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(turn.start < turn.answer_start < turn.end for turn in self.turns):
            raise ValueError("a turn has no message or no answer")
        if any(after.start != turn.end for turn, after in pairwise(self.turns)):
            raise ValueError("its turns are not one behind the other")
        if self.kept and len(set(self.attempts)) != len(self.kept) + 1:
            raise ValueError("it keeps two answers of one attempt, or to no message")
        if not all(each.tokens for each in self.kept):
            raise ValueError("an answer it keeps has no tokens")

    @property
    def attempts(self) -> list[int]:
        """Of all answers to the last message that are kept, the one in its turn among them."""
        return attempts(self.turns, self.kept)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        super().check_tokens(tokens)
        if self.turns and self.turns[-1].end != len(tokens):
            raise ValueError("its turns are not its text")
        if self.cached + self.known > len(tokens):
            raise ValueError(f"it has {len(tokens)} tokens, of which {self.known} are known")

    def check_opening(self, tokens: Sequence[int], opening: list[int]) -> None:
        """Compare the text with what a conversation of a template begins with.

        Raises:
            ValueError: it begins otherwise.
        """
        n_opening = self.turns[0].start if self.turns else len(tokens)
        if n_opening > len(opening) or list(tokens[:n_opening]) != opening[:n_opening]:
            raise ValueError("its text does not begin with the system prompt")


def open_conversation(
    path: str | Path, llm: Text, *, reread: bool
) -> tuple[Session, SavedConversation, bool, ChatTemplate]:
    """As `open_session`, with the model's chat template and its system prompt.

    Raises:
        SessionError: as there, or it is of another template.
    """
    session, saved, is_same = open_session(path, SavedConversation, llm.model, reread=reread)
    template = ChatTemplate(llm.model, saved.system)
    if not reread and template.fingerprint != saved.template:
        raise OtherSettingsError(
            f"the session {path} was made with another chat template: load the model with the "
            "same chat_format, or start a new session"
        )
    with damage_found(path):
        if not reread:
            saved.check_opening(session.tokens, template.opening)
        if is_same:
            for answer in saved.kept:
                check_vocabulary(llm.model, answer.tokens)
    return session, saved, is_same, template
