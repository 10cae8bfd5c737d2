"""Incremental parser of an answer: reasoning, content and tool calls.

llama.cpp's parser of the template always parses the whole text. Most tokens only extend plain text:
they are emitted at once, and the text is parsed again when one of the template's marks appears.
Within a call it is parsed again each time the call has grown by a fraction of its length. So the
work per token hardly depends on the length of the answer.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ..core.native_chat import ChatPrompt
from ..errors import ChatError
from .events import Content, Reasoning, ToolCall
from .fenced_calls import FencedCalls

# A call is parsed again when it has grown by 1 / _GROWTH of its length.
_GROWTH = 64
# The only length that Mistral's templates accept.
ID_LENGTH = 9
_NEVER = re.compile(r"(?!)")

Part = Content | Reasoning | ToolCall


@dataclass
class ParsedCall:
    """A tool call; `arguments` is JSON, truncated if the answer was."""

    id: str
    name: str
    arguments: str = ""

    def message(self) -> dict[str, Any]:
        """Return the call as in OpenAI's messages."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ChatParser:
    """Parses one answer, which may continue text at the end of the prompt.

    Attributes:
        content: content so far, without line breaks between reasoning and content.
        is_trimmed: whether such line breaks were removed.
    """

    def __init__(self, prompt: ChatPrompt, tools: Collection[str] = ()) -> None:
        """`tools` are the names of functions that may also be called in a fenced block."""
        self._prompt = prompt
        self._fenced = FencedCalls(tools)
        self._marks = [mark for mark in prompt.marks if mark]
        self._mark = re.compile("|".join(map(re.escape, self._marks))) if self._marks else _NEVER
        self._has_ids = '"tool-id"' in prompt.parser
        self._parts: list[str] = []
        self._length = 0
        # Kind of the current plain text, and its end, which may contain the start of a mark.
        self._open: str | None = None
        self._tail = ""
        self._parse_at, self._stretch_start = 1, 0
        # Number of characters that match the template.
        self._fits = 0
        self._reasoning: list[str] = []
        # Content as parsed, and as emitted: without white space before a call, which templates add.
        self._content: list[str] = []
        self._emitted: list[str] = []
        self._space = ""
        self._may_call = bool(tools) or '"tool-name"' in prompt.parser
        self.calls: list[ParsedCall] = []
        self.is_trimmed = False
        self._n_marked = 0  # calls in the template's format
        self._after_reasoning: int | None = 0
        self._prefilled = _Prefilled(prompt, self._parsed(""))

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        return "".join(self._emitted)

    def add(self, text: str) -> list[Part]:
        """Add text; return the new parts of the answer that are certain."""
        if not text:
            return []
        self._parts.append(text)
        self._length += len(text)
        if self._open:
            self._tail += text
            if not self._mark.search(self._tail):
                return self._extend(len(self._tail) - self._undecided())
            self._open, self._stretch_start = None, self._length
        elif self._length < self._parse_at:
            return []
        return self._parse(is_end=False)

    def end(self) -> list[Part]:
        """Return the remaining parts of the answer."""
        if self._open:
            deltas = self._extend(len(self._tail))
        else:
            deltas = self._parse(is_end=True) if self._length else []
        deltas += self._emit("", is_end=True)
        return deltas

    def _extend(self, size: int) -> list[Part]:
        """Emit the first `size` characters of the tail as plain text."""
        text, self._tail = self._tail[:size], self._tail[size:]
        if not text:
            return []
        if self._open == "reasoning":
            self._reasoning.append(text)
            return [Reasoning(text)]
        self._content.append(text)
        return self._emit(text)

    def _emit(self, text: str, *, is_end: bool = False) -> list[Part]:
        deltas = []
        for part in self._fenced.add(text, is_end=is_end):
            if isinstance(part, str):
                deltas += self._emit_plain(part)
            else:
                deltas += self._start_call("", *part)
        if is_end and self._space and not self.calls:
            self._may_call = False
            deltas += self._emit_plain("")
        return deltas

    def _emit_plain(self, text: str) -> list[Part]:
        text, self._space = self._space + text, ""
        if not self._emitted and (self._reasoning or (self._after_reasoning or 0) > 0):
            content = text.lstrip("\r\n")
            self.is_trimmed |= content != text
            text = content
        if self._may_call:
            content = text.rstrip()
            text, self._space = content, text[len(content) :]
        if not text:
            return []
        self._emitted.append(text)
        return [Content(text)]

    def _start_call(self, id_: str, name: str, arguments: str = "") -> list[Part]:
        call = ParsedCall(id_ or uuid.uuid4().hex[:ID_LENGTH], name, arguments)
        self.calls.append(call)
        index = len(self.calls) - 1
        start: list[Part] = [ToolCall(index, call.id, call.name)]
        return [*start, ToolCall(index, arguments=arguments)] if arguments else start

    def _undecided(self) -> int:
        """Return the length of the longest end of the tail that may start a mark."""
        tail = self._tail
        longest = min(len(tail), max(map(len, self._marks), default=1) - 1)
        return next(
            (
                size
                for size in range(longest, 0, -1)
                if any(mark.startswith(tail[-size:]) for mark in self._marks)
            ),
            0,
        )

    # ---------------------------------------------------------------------------------------------
    # Parsing
    # ---------------------------------------------------------------------------------------------

    def _parse(self, *, is_end: bool) -> list[Part]:
        text = "".join(self._parts)
        self._parts = [text]
        self._parse_at = self._length + max(1, (self._length - self._stretch_start) // _GROWTH)
        parsed = self._parsed(text)
        if parsed is None:
            return self._give_up(text)
        self._fits = self._length
        deltas, nodes, offsets = self._take(parsed, text, is_end=is_end)
        return deltas + self._resume_plain(text, nodes, offsets, is_end=is_end)

    def _parsed(self, text: str) -> dict[str, Any] | None:
        """Return the parsed text; None if no continuation of it can match the template."""
        try:
            parsed = self._prompt.parse(text)
        except ChatError:
            return None
        return None if parsed["failed"] else parsed

    def _take(
        self, parsed: dict[str, Any], text: str, *, is_end: bool
    ) -> tuple[list[Part], list[dict[str, Any]], _Offsets]:
        offsets = _Offsets(self._prompt, text)
        nodes = [node for node in parsed["nodes"] if node["begin"] < node["end"]]
        self._after_reasoning = offsets.after_reasoning(nodes)
        reasoning, content = (
            self._prefilled.after(parsed, name) for name in ("reasoning_content", "content")
        )
        deltas = [
            *[Reasoning(more) for more in _grown(self._reasoning, reasoning)],
            *[delta for more in _grown(self._content, content) for delta in self._emit(more)],
            *self._grown_calls(parsed["tool_calls"], is_end=is_end),
        ]
        return deltas, nodes, offsets

    def _grown_calls(self, found: list[dict[str, str]], *, is_end: bool) -> list[Part]:
        deltas: list[Part] = []
        n_fenced = len(self.calls) - self._n_marked  # fenced calls come first
        for index, now in enumerate(found, n_fenced):
            is_last = not is_end and index == n_fenced + len(found) - 1
            # until the call is complete, the parser guesses the end of its name and arguments
            arguments = now["arguments"].rstrip('"]} \n') if is_last else now["arguments"]
            if index == len(self.calls):
                if is_last and (len(arguments) < 2 or (self._has_ids and not now["id"])):
                    continue
                deltas += self._start_call(now["id"], now["name"])
                self._n_marked += 1
            call = self.calls[index]
            if len(arguments) > len(call.arguments) and arguments.startswith(call.arguments):
                more = arguments[len(call.arguments) :]
                deltas.append(ToolCall(index, arguments=more))
                call.arguments = arguments
        return deltas

    def _resume_plain(
        self, text: str, nodes: list[dict[str, Any]], offsets: _Offsets, *, is_end: bool
    ) -> list[Part]:
        """Switch to plain text if the text ends with it; emit what is certain."""
        last: dict[str, Any] = {"tag": "content", "plain": True, "end": 0}
        if nodes:
            last = nodes[-1]
        if last["end"] < 0:  # a mark may span the prompt and the text
            return []
        tail = text[max(0, offsets.character(last["end"])) :]
        if last["tag"] == "tool" or not last["plain"] or self._mark.search(tail):
            return []
        # without a node, the kind of text is not yet known
        is_written = self._reasoning if last["tag"] == "reasoning" else self._content
        if not is_end and not is_written:
            return []
        self._open, self._tail = last["tag"], tail
        return self._extend(len(tail) if is_end else len(tail) - self._undecided())

    def _give_up(self, text: str) -> list[Part]:
        """Treat the rest of a text that does not match the template as content."""
        wrong = self._length  # bisect: the result must not depend on how the text was split
        while wrong - self._fits > 1:
            middle = (self._fits + wrong) // 2
            if self._parsed(text[:middle]) is None:
                wrong = middle
            else:
                self._fits = middle
        deltas: list[Part] = []
        parsed = self._parsed(text[: self._fits])
        if parsed is not None:
            deltas, _, _ = self._take(parsed, text[: self._fits], is_end=True)
        left, emitted = text[self._fits :], ""
        if not self.calls:
            end = self._after_reasoning
            left = text[self._fits if end is None else max(0, end) :]
            emitted = "".join(self._content)
            left = left if left.startswith(emitted) else left.lstrip()
        self._open, self._tail, self._marks = "content", left[len(emitted) :], []
        self._mark = _NEVER
        return deltas + self._extend(len(self._tail))


def _grown(parts: list[str], now: str) -> list[str]:
    """Return the text that `now` adds to joined `parts`, in a list; update the parts."""
    before = "".join(parts)
    if len(now) <= len(before) or not now.startswith(before):
        return []
    parts[:] = [now]
    return [now[len(before) :]]


class _Prefilled:
    """The part of the answer that the prompt contains."""

    def __init__(self, prompt: ChatPrompt, parsed: dict[str, Any] | None) -> None:
        parsed = parsed or {"reasoning_content": "", "content": "", "nodes": []}
        self._certain = {name: str(parsed[name]) for name in ("reasoning_content", "content")}
        # The prompt may end with a start of a mark, or with text that looks like one.
        self._end = ""
        if parsed["nodes"] and (end := parsed["nodes"][-1]["end"]) < 0:
            self._end = prompt.generation_prompt.encode()[end:].decode(errors="replace")

    def after(self, parsed: dict[str, Any], name: str) -> str:
        """Return the reasoning or content after this part."""
        text, certain = str(parsed[name]), self._certain[name]
        whole = certain + self._end
        return text[len(whole if text.startswith(whole) else certain) :]


class _Offsets:
    """Converts the parser's offsets, which are bytes, to characters of the answer."""

    def __init__(self, prompt: ChatPrompt, text: str) -> None:
        self._prompt = prompt
        self._text = prompt.generation_prompt + text
        self._data = self._text.encode(errors="replace")
        self._before = len(prompt.generation_prompt)
        self._bytes_before = len(prompt.generation_prompt.encode())

    def character(self, offset: int) -> int:
        before = self._data[: offset + self._bytes_before]
        return len(before.decode(errors="replace")) - self._before

    def after_reasoning(self, nodes: list[dict[str, Any]]) -> int | None:
        """Return where the last reasoning ends; 0 without any, None while that is not known."""
        found: int | None = 0
        for node, after in zip_longest(nodes, nodes[1:]):
            if node["tag"] == "reasoning":
                is_content = after is not None and after["tag"] == "content"
                content = self.character(after["begin"]) if is_content else None
                found = self._closed(self.character(node["end"]), content)
        return found

    def _closed(self, end: int, content: int | None) -> int | None:
        """Return the offset after the mark that closes reasoning, and before the content."""
        rest = self._text[end + self._before :]
        mark = next((m for m in self._prompt.thinking_end_tags if rest.lstrip().startswith(m)), "")
        if not mark:
            return None
        after = rest[rest.index(mark) + len(mark) :].lstrip()
        if self._prompt.generation_prompt.startswith(after) and content is None:
            return None  # the template may repeat the generation prompt here
        after = after.removeprefix(self._prompt.generation_prompt)
        offset = len(self._text) - len(after) - self._before
        return offset if content is None else min(offset, content)
