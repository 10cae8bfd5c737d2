"""The turns of a conversation as prompts, in which answers keep the tokens that were sampled.

The model's chat template renders the history for each answer, with a unique word in place of each
earlier answer: the sampled tokens take its place. What the template writes between the answers is
new only at the end. If a template also changes earlier turns, the text is read again from there.

Most templates write the next turn in the same way after any number of turns. They render only the
first and the last turns of a long history, so that the time for a turn does not grow.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

from ..core.chat_formats import with_format_advice
from ..core.model import Model
from ..core.tokens import n_common
from ..core.vocabulary import is_mark, tokens_after
from ..errors import ChatError, SettingsError, UnsupportedModelError
from ..writing.chat_prompt import Prompt, rendered
from ..writing.rendering import refused
from ..writing.request import Request
from ..writing.thinking import USUAL, Thinking
from ..writing.tools import Call, Tool
from .turns import Step, Turn

# Stands for an answer; no template and no user writes it.
_KEY = f"sampled{secrets.token_hex(8)}"
_WORD = re.compile(f"{_KEY}n([0-9]+)x")
# Numbers of first and last turns that are rendered.
_FIRST, _LAST = 2, 3
# For an answer whose tokens have no characters.
UNREADABLE = "\ufffd"


@dataclass(frozen=True)
class Frames:
    """A rendered prompt without its answers.

    Attributes:
        prompt: the prompt.
        gaps: texts before the first answer, between answers, and after the last one.
    """

    prompt: Prompt
    gaps: list[str]

    def n_same(self, other: Frames, n_answers: int) -> int:
        """Return how many of the first answers have the same text before them in both prompts.

        Args:
            other: an earlier prompt.
            n_answers: number of answers of `other`, and of the one after it.
        """
        for n in range(n_answers):
            # Before its answer, a prompt may end with a start of reasoning that is removed later.
            is_same = fit if n == len(other.gaps) - 1 else operator.eq
            if not is_same(self.gaps[n], other.gaps[n]):
                return n
        return n_answers


class ChatTemplate:
    """How a model's chat template writes the turns of a conversation.

    Attributes:
        system: the given system prompt, or None.
        tools: tools that answers may call.
        thinking: reasoning settings.
        opening: tokens before the text of the first message.
        fingerprint: differs between templates.
    """

    def __init__(
        self,
        model: Model,
        system: str | None,
        tools: Sequence[Tool] = (),
        thinking: Thinking = USUAL,
    ) -> None:
        """Render trial conversations.

        Args:
            model: the model; its chat format or handler counts as in llama_cpp.
            system: system prompt; None for the template's default.
            tools: tools that the model may call.
            thinking: reasoning settings.

        Raises:
            SettingsError: the template does not support a system prompt, tools or the reasoning
                settings.
            UnsupportedModelError: the template cannot be used, or does not write all messages.
        """
        if model.tokenize(b"", add_bos=False, special=True):
            raise UnsupportedModelError(
                "this tokenizer adds tokens to every text, so a conversation cannot be continued "
                "token by token: use the model's own tokenizer"
            )
        self._model = model
        self.system = system
        self.tools, self.thinking = tuple(tools), thinking
        if system is not None:
            self._check_system()
        if tools:
            self._check_tools()
        one, other = self.first_turn("A"), self.first_turn("1")
        self.opening = one[: n_common(one, other)]
        self.fingerprint = self._fingerprint()
        self._is_regular = self._writes_turns_alike()

    def shortened(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the turns to render before a new one: not those between the first and the last."""
        if not self._is_regular or len(turns) <= _FIRST + _LAST:
            return [*turns]
        return [*turns[:_FIRST], *turns[-_LAST:]]

    def frames(self, turns: Sequence[Turn]) -> Frames:
        """Render a prompt for the last turn, with a word for each answer of the other turns.

        Args:
            turns: the turns, at least one; the last one may have steps.

        Raises:
            PyH2OError: the template refuses the messages, or does not write every answer once.
        """
        for in_names in (False, True):
            messages, words = self._messages(turns, in_names=in_names)
            prompt = self._rendered(messages)
            parts = _WORD.split(prompt.text)
            if parts[1::2] == [str(n) for n in range(sum(words))]:
                ends = [sum(words[:n]) for n in range(len(words) + 1)]
                # an answer of several steps has words at its start and its end
                gaps = [parts[2 * end] for end in ends]
                return Frames(prompt, gaps)
        raise _not_once()

    def first_turn(self, message: str) -> list[int]:
        """Return the tokens of a prompt with one message.

        Raises:
            PyH2OError: the template refuses the message.
        """
        return self.lead(self.frames([open_turn(message)]))

    def lead(self, frames: Frames, answer: Sequence[int] = (), n: int = -1) -> list[int]:
        """Return the tokens before answer `n` of a prompt, after the tokens of the previous answer.

        Marks that end the previous answer and start the text are not repeated.
        """
        prompt, text = frames.prompt, frames.gaps[n]
        if text is frames.gaps[0]:
            return self._model.tokenize(text.encode(), add_bos=prompt.add_bos, special=True)
        tokens = tokens_after(self._model, -1, text)
        n_marks = len(list(takewhile(partial(is_mark, self._model), tokens)))
        overlaps = range(min(n_marks, len(answer)), 0, -1)
        return tokens[next((n for n in overlaps if [*answer[-n:]] == tokens[:n]), 0) :]

    def results(self, turns: Sequence[Turn], frames: Frames) -> list[int]:
        """Return the tokens after the last calls of an answer: their end, and their results.

        Args:
            turns: turns whose last one ends with a step.
            frames: their prompt.

        Raises:
            PyH2OError: the template refuses the calls, or does not show where they end.
        """
        *steps, last = turns[-1].steps
        marked = replace(last, calls=(replace(last.calls[0], result=f"{_KEY}r"), *last.calls[1:]))
        before, with_mark = (
            self.frames([*turns[:-1], replace(turns[-1], steps=tuple(each))]).gaps[-1]
            for each in (steps, [*steps, marked])
        )
        head, mark, _ = with_mark.partition(f"{_KEY}r")
        # The model writes up to its end, which is the last one before a result.
        tokens = tokens_after(self._model, -1, head[_n_common(before, head) :])
        ends = [token for token in tokens if self._model.is_end(token)]
        if not mark or not ends:
            raise UnsupportedModelError(
                "the model's chat template does not show where a tool call ends: use another "
                "model, or no tools"
            )
        end = self._model.native.token_get_text(ends[-1])
        rest = frames.gaps[-1].removeprefix(head.rpartition(end)[0] + end)
        return [ends[-1], *tokens_after(self._model, ends[-1], rest)]

    def answer(self, turns: Sequence[Turn], frames: Frames, last: int) -> tuple[Turn, list[int]]:
        """Return the last of the turns with numbers of tokens, and the tokens of its answer.

        Args:
            turns: turns whose last one has an answer as text.
            frames: their prompt up to that answer.
            last: the token before it.

        Raises:
            PyH2OError: the template refuses the calls.
        """
        turn, tokens, steps = turns[-1], list[int](), list[Step]()
        before = frames.gaps[-1]
        for n, step in enumerate(turn.steps, 1):
            opened = replace(turn, steps=turn.steps[:n])
            text = self.frames([*turns[:-1], opened]).gaps[-1]
            new = tokens_after(self._model, [last, *tokens][-1], text[_n_common(before, text) :])
            steps.append(replace(step, n_tokens=len(new)))
            tokens, before = tokens + new, text
        if turn.answer or not steps:
            text = turn.answer or UNREADABLE
            tokens += tokens_after(self._model, [last, *tokens][-1], text, special=False)
        return replace(turn, steps=tuple(steps)), tokens

    # ---------------------------------------------------------------------------------------------
    # Messages
    # ---------------------------------------------------------------------------------------------

    def _messages(
        self, turns: Sequence[Turn], *, in_names: bool
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the messages of a prompt for the last turn, and the number of words per answer.

        With `in_names`, the words of tool calls are the names of the tools, for templates that omit
        the text of an answer with calls.
        """
        messages: list[dict[str, Any]] = []
        words: list[int] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for n_after, turn in zip(reversed(range(len(turns))), turns, strict=True):
            is_open = n_after == 0
            messages.append({"role": "user", "content": turn.message})
            for number, step in enumerate(turn.steps):
                called = _called(step)
                if number == 0 and not is_open:
                    word = f"{_KEY}n{sum(words)}x"
                    if in_names:
                        called[0]["tool_calls"][0]["function"]["name"] = word
                    else:
                        called[0]["content"] = word
                messages += called
            if not is_open:
                words.append(2 if turn.steps else 1)
                messages.append({"role": "assistant", "content": f"{_KEY}n{sum(words) - 1}x"})
        return messages, words

    def _rendered(self, messages: list[dict[str, Any]]) -> Prompt:
        tools = [tool.for_template() for tool in self.tools]
        request = Request(messages=messages, tools=tools, reasoning=self.thinking)
        try:
            return rendered(self._model, request)
        except ChatError as error:
            raise refused(error) from error

    # ---------------------------------------------------------------------------------------------
    # Checks
    # ---------------------------------------------------------------------------------------------

    def _check_system(self) -> None:
        cure = "put its text into your first message"
        messages = [{"role": "system", "content": _KEY}, {"role": "user", "content": "?"}]
        try:
            prompt = self._rendered(messages)
        except UnsupportedModelError as error:
            self._rendered(messages[1:])
            raise SettingsError(f"with a system prompt {error}: {cure}") from error
        if _KEY not in prompt.text:
            raise SettingsError(f"the model's chat template ignores a system prompt: {cure}")

    def _check_tools(self) -> None:
        cure = "use another model, or no tools"
        name, turn = self.tools[0].name, open_turn("?")
        if self._model.chat.inert.hide(name) not in self.frames([turn]).prompt.text:
            raise SettingsError(f"the model's chat template does not support tools: {cure}")
        turn = replace(turn, steps=(Step("", (Call(name, "", ""),), 0),))
        try:
            self.results([turn], self.frames([turn]))
        except UnsupportedModelError as error:
            raise SettingsError(f"with tools {error}: {cure}") from error

    def _trial(self, n_messages: int) -> Prompt:
        """Render a conversation whose messages and answers are words."""
        messages = [
            {"role": ("user", "assistant")[n % 2], "content": f"{_KEY}n{n}x"}
            for n in range(n_messages)
        ]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return self._rendered(messages)

    def _writes_turns_alike(self) -> bool:
        """Return whether the texts between messages and answers are the same in all later turns."""
        longer, shorter = (_WORD.split(self._trial(n).text)[::2] for n in (9, 7))
        head, *between, end = longer
        pairs = list(zip(between[1::2], between[2::2], strict=False))
        return shorter == [head, *between[:-2], end] and len(set(pairs)) == 1

    def _fingerprint(self) -> str:
        """Return a hash of the texts after an answer and after a message, and of the stops.

        Raises:
            UnsupportedModelError: the template does not write every message once.
        """
        prompt = self._trial(3)
        parts = _WORD.split(prompt.text)
        if parts[1::2] != ["0", "1", "2"]:
            raise _not_once()
        parts = [*parts[4::2], [stop.decode() for stop in prompt.stops]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _not_once() -> UnsupportedModelError:
    return with_format_advice(
        UnsupportedModelError(
            "the model's chat template does not write every message once: use another model file"
        )
    )


def open_turn(message: str) -> Turn:
    """Return a turn without an answer."""
    return Turn(message, "", "", 0, 0, 0)


def _called(step: Step) -> list[dict[str, Any]]:
    """Return the messages of an answer's step: the calls and their results."""
    ids = [f"call{number:05}" for number in range(len(step.calls))]
    calls = [
        {
            "type": "function",
            "id": name,
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for name, call in zip(ids, step.calls, strict=True)
    ]
    results = [
        {"role": "tool", "name": call.name, "tool_call_id": name, "content": call.result or ""}
        for name, call in zip(ids, step.calls, strict=True)
    ]
    return [{"role": "assistant", "content": step.text, "tool_calls": calls}, *results]


def fit(text: str, other: str) -> bool:
    """Return whether one of two texts starts with the other."""
    return text.startswith(other) or other.startswith(text)


def _n_common(text: str, other: str) -> int:
    """Return the number of common first characters."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(text), len(other)))
