"""The text of a conversation in a model's cache, and changes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from ..core.text import HasText, Text, text_of
from ..writing.cached_text import CachedText, Span
from ..writing.finish import FINISH_STOP
from ..writing.reasoning import drops_reasoning, reasoning_span
from ..writing.thinking import Thinking
from ..writing.tools import Call, Tool
from .chat_template import ChatTemplate
from .layout import Layout, RowShares, lay_out, without
from .text_session import TextSession
from .turns import Dialogue, Turn


class Talk(TextSession):
    """Messages and answers as a text; `Conversation` adds generation."""

    def __init__(self, llm: Text | HasText, template: ChatTemplate, places: RowShares) -> None:
        self.llm = llm = text_of(llm)
        self._template, self._places = template, places
        self._dialogue = Dialogue()
        self._text = CachedText(llm, on_taken=self._end_answer)
        n_pinned = places.n_pinned(llm, template)
        self._text.begin(template.opening, n_pinned=n_pinned)

    @property
    def system(self) -> str | None:
        """The given system prompt."""
        return self._template.system

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that answers may call."""
        return self._template.tools

    @property
    def thinking(self) -> Thinking:
        """The reasoning settings."""
        return self._template.thinking

    @property
    def calls(self) -> tuple[Call, ...]:
        """The tool calls at the end of the last answer, which wait for `give_results`."""
        return self.turns[-1].calls if self.turns else ()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All messages that have an answer."""
        return self._dialogue.turns

    @property
    def answers(self) -> tuple[Turn, ...]:
        """The last turn with each of its answers, in order of attempts; () without turns.

        One of them is the current one, the others were replaced by `regenerate`.
        """
        return self._dialogue.answers

    # ---------------------------------------------------------------------------------------------
    # Changes
    # ---------------------------------------------------------------------------------------------

    def choose(self, attempt: int) -> None:
        """Restore a replaced answer, and keep the current one as a replaced answer.

        The conversation continues as if it had never been replaced: bit for bit if a snapshot
        has its rows. Otherwise its tokens are read again with the next message.

        Args:
            attempt: attempt of one of `answers`.

        Raises:
            PyH2OError: unknown attempt, or there is no message.
        """
        self._settle()
        last, text = self._dialogue.last, self._text
        if attempt == last.attempt:
            return
        self._dialogue, chosen = self._dialogue.choose(attempt, text.tokens)
        text.truncate(last.answer_start, may_return=True)
        text.restore(last.answer_start, chosen.tokens, text.pins, text.dropped)

    def undo(self) -> Turn:
        """Remove the last message with its answer, and return them.

        Raises:
            PyH2OError: there is no message.
        """
        self._settle()
        last = self._dialogue.last
        self._dialogue = Dialogue(self.turns[:-1])
        self._text.truncate(last.start)
        return last

    def clear(self) -> None:
        """Remove all turns; the system prompt stays."""
        self._settle()
        if self.turns:
            start = self.turns[0].start
            self._dialogue = Dialogue()
            self._text.truncate(start)
            self._text.drop_snapshots()

    def take_over(self, said: Sequence[tuple[str, str]]) -> None:
        """Start with messages and answers from elsewhere, which are read with the next message.

        Raises:
            PyH2OError: the template rejects one of them.
        """
        self._settle()
        turns = [Turn(user, answer, FINISH_STOP, 0, 0, 0) for user, answer in said]
        self._dialogue = Dialogue()
        self._begin(lay_out(self.llm, self._template, self._places, turns))

    def set_system(self, text: str | None) -> None:
        """Set the system prompt; the whole text is read again with the next message.

        Raises:
            SettingsError: it does not fit the budget, or the template does not support one.
        """
        self._begin_under(ChatTemplate(self.llm.model, text, self.tools, self.thinking))

    def set_tools(self, tools: Sequence[Tool]) -> None:
        """Set the tools; the whole text is read again with the next message.

        Raises:
            SettingsError: they do not fit the budget, or the template does not support tools.
        """
        self._begin_under(ChatTemplate(self.llm.model, self.system, tools, self.thinking))

    def set_thinking(self, thinking: Thinking) -> None:
        """Set the reasoning settings from the next message on.

        If the template mentions them before the first message, the whole text is read again.

        Raises:
            SettingsError: the template does not support them.
        """
        self._settle()
        template = ChatTemplate(self.llm.model, self.system, self.tools, thinking)
        if template.opening == self._template.opening:
            self._template = template
        else:
            self._begin_under(template)

    def _begin_under(self, template: ChatTemplate) -> None:
        """Render all turns with another template."""
        self._settle()
        layout = lay_out(self.llm, template, self._places, self.turns, self._text.tokens, self.pins)
        self._template = template
        self._begin(layout)

    def _begin(self, layout: Layout) -> None:
        """Replace the tokens; all are read with the next message."""
        self._dialogue = replace(self._dialogue, turns=layout.turns)
        text, tokens = self._text, layout.tokens
        text.begin(tokens, n_pinned=layout.n_pinned, pins=layout.pins)
        text.drop(self._reasoning_spans(layout.turns[:-1], tokens))

    def _settle(self) -> None:
        """End the answer in progress, and restore the text in the cache."""
        self._end_answer()
        self._prepare()

    def _end_answer(self) -> None:
        """End the answer in progress, if any."""

    def _stop(self) -> None:
        self._end_answer()
        if self._text.is_there():
            self._text.drop_surplus()

    def _prepare(self) -> None:
        """Restore the text in the cache, if the model was used for another one."""
        self._text.reclaim()
        self._text.drop_surplus()

    def _reasoning_spans(self, turns: Sequence[Turn], tokens: Sequence[int]) -> list[Span]:
        """Return the spans of reasoning to drop, without pinned tokens."""
        model = self.llm.model
        parts = [part for turn in turns for part in pairwise([*turn.part_starts, turn.end])]
        found = [reasoning_span(model, tokens, *part) for part in parts]
        spans: Iterable[Span] = filter(None, found if drops_reasoning(model) else ())
        for pin in ((0, self.n_pinned), *self.pins):
            spans = without(spans, *pin)
        return [*spans]
