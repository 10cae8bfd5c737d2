"""The tokens that a chat template writes between answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyh2o.sessions.chat_template import ChatTemplate, open_turn
from pyh2o.sessions.turns import Step, Turn
from pyh2o.writing.tools import Call


class ChatTurns(ChatTemplate):
    """A chat template that is asked turn by turn."""

    def next_turn(self, message: str, answer: Sequence[int] = ()) -> list[int]:
        """Return the tokens after an answer, up to the next one."""
        turns = [replace(open_turn("hello"), answer="ok"), open_turn(message)]
        return self.lead(self.frames(turns), answer)

    def said(self, text: str) -> list[int]:
        """Return the tokens of an answer that is known as text."""
        turns = [replace(open_turn("hello"), answer=text)]
        frames = self.frames([open_turn("hello")])
        return self.answer(turns, frames, self.opening[-1])[1]

    def step(self, text: str, calls: Sequence[Call], last: int) -> list[int]:
        """Return the tokens of calls after the token `last`, and of their results."""
        turn = open_turn("why?")
        frames = self.frames([turn])
        return self.answer([self._called(text, calls)], frames, last)[1]

    def after_calls(self, calls: Sequence[Call]) -> list[int]:
        """Return the tokens after calls that a model has written: their end and the results."""
        turns = [self._called("", calls)]
        return self.results(turns, self.frames(turns))

    def _called(self, text: str, calls: Sequence[Call]) -> Turn:
        return replace(open_turn("why?"), steps=(Step(text, tuple(calls), 0),))
