"""Takes back or replaces what was said in a conversation, and checks that it is still there."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PyH2OError
from ..llama import Llama
from ..text.chat_template import ChatTemplate
from .answers import LatestAnswer
from .pins import PinnedText, Pins, check_room, moved
from .places import Places
from .turns import Turn, rewritten, said_before


class EditableConversation(PinnedText):
    """What of a conversation takes something back, or puts something else in its place."""

    llm: Llama
    _template: ChatTemplate
    _places: Places
    _latest: LatestAnswer
    _turns: tuple[Turn, ...]

    def undo(self) -> Turn:
        """Take back the last message and its answer, and return them.

        Raises:
            PyH2OError: nothing has been said, or the model has another text by now.
        """
        self._settle()
        last = self._last_turn()
        self._turns = self._turns[:-1]
        self._text.set_back(last.start)
        return last

    def clear(self) -> None:
        """Take back all that was said; the system prompt stays.

        Raises:
            PyH2OError: the model has another text by now.
        """
        self._settle()
        if self._turns:
            start = self._turns[0].start
            self._turns = ()
            self._text.set_back(start)
            self._text.copies.clear()

    def take_over(self, said: Sequence[tuple[str, str]]) -> None:
        """Begin with messages and answers that were said elsewhere; the next message reads them.

        Raises:
            PyH2OError: the template refuses one, or the model has another text by now.
        """
        self._settle()
        tokens, self._turns = said_before(self._template, said)
        self._text.begin(tokens)

    def set_system(self, text: str | None) -> None:
        """Go on under another system prompt; with the next message all is read again.

        Raises:
            SettingsError: the system prompt does not fit the budget, or the template has no place
                for one.
            PyH2OError: the model has another text by now.
        """
        self._settle()
        template = ChatTemplate(self.llm, text)
        n_pinned = self._places.n_pinned(self.llm, template)
        tokens, turns = rewritten(template, self._text.tokens, self._turns)
        pins = moved(self.pins, self._turns, turns)
        check_room(self.llm, n_pinned, pins)
        self._template = template
        self._rewrite(tokens, turns, pins, n_pinned)

    def _rewrite(
        self, tokens: list[int], turns: tuple[Turn, ...], pins: Pins, n_pinned: int
    ) -> None:
        """Have other tokens for what was said, all to be read again."""
        self._turns = turns
        n_known = len(tokens) if turns else 0
        self._text.begin(tokens, n_known=n_known, n_pinned=n_pinned, pins=pins)

    def _settle(self) -> None:
        """End the answer that is drawn, and refuse to go on as `_check_text` does."""
        self._latest.end()
        self._check_text()

    def _check_text(self) -> None:
        """Refuse to go on if the model was used for another text."""
        if not self._text.is_as_left():
            raise other_text()
        self._text.drop_surplus()

    def _last_turn(self) -> Turn:
        if not self._turns:
            raise PyH2OError("nothing has been said yet: say something")
        return self._turns[-1]


def other_text() -> PyH2OError:
    """The error for a conversation that is no longer in the model's cache."""
    return PyH2OError(
        "the model has been used for another text, and this conversation is no longer in its "
        "cache: load it from a file (Conversation.load), or begin a new one"
    )
