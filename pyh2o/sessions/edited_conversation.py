"""Takes back or replaces what was said in a conversation, and checks that it is still there."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PyH2OError
from ..llama import Llama
from ..text.chat_template import ChatTemplate
from .answers import LatestAnswer
from .kept_answers import KeptAnswer, find_answer, with_replaced
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
    _kept: tuple[KeptAnswer, ...]

    @property
    def answers(self) -> tuple[Turn, ...]:
        """The last turn with each of its answers that are kept, by their attempts; () without one.

        One of them is the turn as it is now, the others were replaced by `regenerate`.
        """
        last = self._turns[-1:]
        found = [*last, *(kept.in_turn(last[0]) for kept in self._kept)]
        return tuple(sorted(found, key=lambda turn: turn.attempt))

    def choose(self, attempt: int) -> None:
        """Have an answer back that was replaced; the one in its place is kept in turn.

        What comes next is as if it had been the answer all the time: bit for bit where a copy of
        the cache has it. Otherwise its tokens are read again with the next message, and
        `on_recompute` is told so before.

        Args:
            attempt: of one of `answers`.

        Raises:
            PyH2OError: there is no such answer, nothing has been said, or the model has another
                text by now.
        """
        self._settle()
        last, text = self._last_turn(), self._text
        if attempt == last.attempt:
            return
        chosen = find_answer(self._kept, last, attempt)
        others = tuple(each for each in self._kept if each is not chosen)
        start = last.answer_start
        self._kept = with_replaced(others, KeptAnswer.of(last, text.tokens))
        self._turns = (*self._turns[:-1], chosen.in_turn(last))
        text.set_back(start, may_return=True)
        text.put_back(start, chosen.tokens, start + chosen.n_known, text.pins)

    def undo(self) -> Turn:
        """Take back the last message and its answer, and return them.

        Raises:
            PyH2OError: nothing has been said, or the model has another text by now.
        """
        self._settle()
        last = self._last_turn()
        self._turns, self._kept = self._turns[:-1], ()
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
            self._turns, self._kept = (), ()
            self._text.set_back(start)
            self._text.copies.clear()

    def take_over(self, said: Sequence[tuple[str, str]]) -> None:
        """Begin with messages and answers that were said elsewhere; the next message reads them.

        Raises:
            PyH2OError: the template refuses one, or the model has another text by now.
        """
        self._settle()
        tokens, self._turns = said_before(self._template, said)
        self._kept = ()
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
