"""The chat template of a model, applied turn by turn.

llama_cpp renders a conversation from its messages and reads it anew for every answer. But the text
of an answer, rendered and cut into tokens again, rarely gives the tokens that were generated, and
the work grows with the conversation. Here the template is asked, with placeholders for what was
said before, only for what surrounds a new message. What it answers does not depend on how long the
conversation is.

So an answer stays in the text as it was generated, also where a template would shorten it later.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.chat_formats import with_format_advice
from ..core.model import Model
from ..core.native_chat import ChatPrompt
from ..core.prefixes import n_common
from ..core.utf8 import utf8
from ..core.vocabulary import is_mark, tokens_after
from ..errors import SettingsError, UnsupportedModelError
from .chat_guide import ChatGuide, shown_tokens
from .chat_parser import ChatParser
from .rendering import Rendered, Renderer
from .thinking import USUAL, Thinking
from .tools import Call, Tool

# Stand for messages. No template and no person writes them.
QUESTION, NEXT_QUESTION, LAST_QUESTION = "question-x8qr1f", "question-x8qr2f", "question-x8qr3f"
ANSWER, NEXT_ANSWER = "answer-x8qr1f", "answer-x8qr2f"
RESULT, NO_END = "result-x8qr{}f", "end-x8qrf"
SYSTEM = "system-x8qr0f"
# For an answer of which no token made a character.
UNREADABLE = "\ufffd"

_NO_LOGITS: npt.NDArray[np.single] = np.empty(0, dtype=np.single)


class ChatTemplate:
    """What to feed a model for each message of a conversation.

    The tokens of the first turn are those of `Llama.create_chat_completion`.

    Attributes:
        system: the system prompt that was given, or None.
        tools: that the model is told of.
        thinking: whether it thinks, and for how long.
        stops: strings that end an answer.
        opening: tokens before the text of the first message, whatever that is: BOS, the system
            prompt, the first sign of the person's turn.
        fingerprint: differs between templates.
    """

    def __init__(
        self,
        model: Model,
        system: str | None,
        tools: Sequence[Tool] = (),
        thinking: Thinking = USUAL,
    ) -> None:
        """Ask the template what it writes.

        Args:
            model: its chat format or handler counts as in llama_cpp.
            system: system prompt; None for the template's own, if it has one.
            tools: that the model may call.
            thinking: whether it thinks, and for how long.

        Raises:
            SettingsError: the template has no place for a system prompt, or for tools, or what is
                said of thoughts is none of its.
            UnsupportedModelError: the template cannot be applied turn by turn.
        """
        if model.tokenize(b"", add_bos=False, special=True):
            raise UnsupportedModelError(
                "a conversation cannot be kept with this tokenizer, which adds tokens to every "
                "piece of text: use the model's own"
            )
        self._model = model
        self.system = system
        self.tools, self.thinking = tuple(tools), thinking
        self._renderer = Renderer(model, tools, thinking)
        if system is not None:
            self._check_system()
        self._parts = self._read_frames()
        self.guide([])  # a budget of thoughts that it has none of is refused
        if tools:
            self._check_tools()
        one, other = self.first_turn("A"), self.first_turn("1")
        self.opening = one[: n_common(one, other)]

    def first_turn(self, message: str) -> list[int]:
        """Tokens that begin a text: system prompt, message and the call for an answer.

        Raises:
            PyH2OError: the template refuses the message.
        """
        prompt = self._render(message)
        text = prompt.text.encode()
        return list(self._model.tokenize(text, add_bos=prompt.add_bos, special=True))

    def next_turn(self, message: str, answer: Sequence[int] = ()) -> list[int]:
        """Tokens that follow an answer: its end, the message and the call for an answer.

        Args:
            message: as it was said.
            answer: tokens of the answer. Marks at its end that the model has drawn itself, before
                the one that ends all answers, do not come again.

        Raises:
            PyH2OError: the template refuses the message.
        """
        text = self._render(QUESTION, ANSWER, message).text
        tokens = tokens_after(self._model, -1, text.partition(ANSWER)[2])
        n_marks = len(list(takewhile(partial(is_mark, self._model), tokens)))
        overlaps = range(min(n_marks, len(answer)), 0, -1)
        n_there = next((n for n in overlaps if [*answer[-n:]] == tokens[:n]), 0)
        return tokens[n_there:]

    def answer(self, text: str, last: int) -> list[int]:
        """Tokens of an answer that is there as a text, behind the token `last`; at least one."""
        return tokens_after(self._model, last, text or UNREADABLE, special=False)

    def results(self, calls: Sequence[Call]) -> list[int]:
        """Tokens that follow calls which a model has written: their end, results, and the call
        for what comes next.

        Raises:
            PyH2OError: the template refuses the calls.
        """
        return self._tokenize_results("", calls)[1]

    def step(self, text: str, calls: Sequence[Call], last: int) -> list[int]:
        """Tokens of calls that are there as texts, behind the token `last`, and of their results.

        Args:
            text: what was written beside the calls.
            calls: with results.
            last: token.

        Raises:
            PyH2OError: the template refuses the calls.
        """
        written, results = self._tokenize_results(text, calls)
        return [*tokens_after(self._model, last, written), *results]

    def parser(self) -> ChatParser | None:
        """What tells an answer's thoughts and calls from what is said; None if it has only that."""
        names = [tool.name for tool in self.tools]
        return None if self._parts is None else ChatParser(self._parts, names)

    def guide(self, written: Sequence[int]) -> ChatGuide | None:
        """What holds calls to their grammar and thoughts to their budget; None without both.

        Args:
            written: tokens of the answer so far.
        """
        budget = self.thinking.limit
        if self._parts is None or not (self._parts.grammar or budget is not None):
            return None
        guide = ChatGuide(self._model, self._parts, budget=budget)
        for token in written:
            guide.take(token)
        return guide

    @property
    def shown(self) -> frozenset[int]:
        """Control tokens whose texts the parser looks at."""
        return frozenset() if self._parts is None else shown_tokens(self._model, self._parts)

    def ends(self, token: int) -> bool:
        """Whether a token ends the answer although the model may not take it for its end."""
        # A formatter's criteria look at the newest token; the text before would have to be copied.
        criteria = self._stopping_criteria
        return criteria is not None and bool(criteria(np.array([token], np.intc), _NO_LOGITS))

    # ---------------------------------------------------------------------------------------------
    # Texts
    # ---------------------------------------------------------------------------------------------

    def _check_system(self) -> None:
        cure = "put what it says into your first message"
        try:
            prompt = self._renderer.render(_messages(SYSTEM, QUESTION))
        except UnsupportedModelError as error:
            self._renderer.render(_messages(None, QUESTION))
            raise SettingsError(f"with a system prompt {error}: {cure}") from error
        if SYSTEM not in prompt.text:
            raise SettingsError(f"the model's chat template ignores a system prompt: {cure}")

    def _check_tools(self) -> None:
        cure = "give another model, or no tools"
        name = self.tools[0].name
        if self._model.chat.inert.hide(name) not in self._render(QUESTION).text:
            raise SettingsError(f"the model's chat template knows of no tools: {cure}")
        try:
            self.results([Call(name, "", "")])
        except UnsupportedModelError as error:
            raise SettingsError(f"with tools {error}: {cure}") from error

    def _read_frames(self) -> ChatPrompt | None:
        """Render conversations of placeholders and find the pieces they consist of.

        Returns:
            how thoughts and calls are told apart in the answers; None if they have neither.
        """
        prompt = self._render(QUESTION)
        opening, call = _around(prompt.text, QUESTION)
        dialogue = self._render(QUESTION, ANSWER, NEXT_QUESTION).text
        first_answer, rest = _around(dialogue, ANSWER)
        _, first_answer = _around(first_answer, QUESTION)
        between, next_call = _around(rest, NEXT_QUESTION)
        longer = self._render(QUESTION, ANSWER, NEXT_QUESTION, NEXT_ANSWER, LAST_QUESTION).text
        _, rest = _around(longer, NEXT_QUESTION)
        next_answer, _ = _around(rest, NEXT_ANSWER)

        two_turns = f"{opening}{QUESTION}{first_answer}{ANSWER}{between}{NEXT_QUESTION}"
        answered = f"{two_turns}{next_answer}{NEXT_ANSWER}{between}{LAST_QUESTION}{next_call}"
        is_regular = (dialogue, longer) == (two_turns + next_call, answered)
        if not is_regular or not _fit(call, first_answer) or not _fit(next_call, next_answer):
            reason = (
                "the model's chat template changes earlier turns when later ones come, which a "
                "text that is read once cannot follow"
            )
            if self.tools:
                raise SettingsError(f"with tools {reason}: give another model, or no tools")
            if self.system is None:
                error = UnsupportedModelError(f"{reason}: use another model file")
                raise with_format_advice(error)
            raise with_format_advice(
                SettingsError(
                    f"with a system prompt {reason}: put what it says into your first message, or "
                    "use another model file"
                )
            )
        self._answer_start = first_answer
        self.stops = tuple(stop.encode() for stop in prompt.stops if stop)
        self._stopping_criteria = prompt.stopping_criteria
        parts = json.dumps([between, next_call, prompt.stops])
        self.fingerprint = hashlib.sha256(parts.encode()).hexdigest()
        is_told = self.tools or self.thinking.limit is not None
        return (
            prompt.parts if prompt.parts and (is_told or prompt.parts.supports_thinking) else None
        )

    def _render(self, *contents: str) -> Rendered:
        return self._renderer.render(_messages(self.system, *contents))

    def _render_results(self, text: str, calls: Sequence[Call]) -> str:
        """The text of a question, calls, their results and the call for more."""
        messages = _messages(self.system, QUESTION)
        ids = [f"call{number:05}" for number in range(len(calls))]
        made = [
            {
                "type": "function",
                "id": name,
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for name, call in zip(ids, calls, strict=True)
        ]
        messages.append({"role": "assistant", "content": text, "tool_calls": made})
        for name, call in zip(ids, calls, strict=True):
            result = {"name": call.name, "tool_call_id": name, "content": call.result or ""}
            messages.append({"role": "tool", **result})
        return self._renderer.render(messages).text

    # ---------------------------------------------------------------------------------------------
    # Tokens
    # ---------------------------------------------------------------------------------------------

    def _tokenize_results(self, text: str, calls: Sequence[Call]) -> tuple[str, list[int]]:
        """The text of calls, and the tokens behind it: the end, the results, the call for more."""
        marks = [RESULT.format(number) for number in range(len(calls))]
        made = [replace(call, result=mark) for call, mark in zip(calls, marks, strict=True)]
        frame = self._render_results(text, made)
        parts = re.split("|".join(marks), frame)
        # The model writes up to its end, which is the last one before a result.
        tokens = tokens_after(self._model, -1, parts[0])
        ends = [token for token in tokens if self._model.is_end(token)]
        end = self._model.native.token_get_text(ends[-1]) if ends else NO_END
        head, _, _ = parts[0].rpartition(end)
        written = head.partition(QUESTION)[2]
        is_whole = len(parts) == len(marks) + 1 and written.startswith(self._answer_start)
        if not ends or not is_whole:
            raise UnsupportedModelError(
                "the model's chat template does not show where a call of a tool ends"
            )
        rendered = self._render_results(text, calls).removeprefix(head + end)
        results = tokens_after(self._model, ends[-1], rendered)
        return written[len(self._answer_start) :], [ends[-1], *results]


def asked_for(
    model: Model, message: str, thinking: Thinking = USUAL
) -> tuple[list[int], list[str]]:
    """What to feed for a text that a message asks for, and the texts that end it.

    Raises:
        PyH2OError: the template refuses the message, or cannot be applied.
    """
    template = ChatTemplate(model, None, thinking=thinking)
    return template.first_turn(message), [stop.decode() for stop in template.stops]


def _messages(system: str | None, *contents: str) -> list[dict[str, Any]]:
    """Messages of the person and the model by turns, the person's first.

    Raises:
        TextError: a text is not Unicode.
    """
    utf8("".join([system or "", *contents]))
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    roles = ("user", "assistant")
    messages += [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return messages


def _around(text: str, placeholder: str) -> tuple[str, str]:
    """What is before and behind a placeholder.

    Raises:
        UnsupportedModelError: it is not there once.
    """
    parts = text.split(placeholder)
    if len(parts) != 2:
        raise with_format_advice(
            UnsupportedModelError(
                "the model's chat template does not write every message once: use another model "
                "file"
            )
        )
    return parts[0], parts[1]


def _fit(call: str, before_answer: str) -> bool:
    """Whether an answer can be called for by one text and be led in by another later.

    They may differ at the end: a call may open thoughts that are dropped later, and a template may
    write what the model is expected to begin with.
    """
    return call.startswith(before_answer) or before_answer.startswith(call)
