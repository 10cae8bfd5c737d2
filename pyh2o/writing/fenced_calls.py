"""Tool calls that a model writes as JSON in a fenced block instead of its template's format."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress

_OPEN = re.compile(r"^```(?:json|tool_call)?[ \t]*\n\s*(?=\{)", re.MULTILINE)
_CLOSE = re.compile(r"\n?[ \t]*```[ \t]*(?:\n|\Z)")
# A possible start of a fence, at the end of the text.
_OPENING = re.compile(r"^`(?:`(?:`[a-z_]*[ \t]*(?:\n\s*)?)?)?\Z", re.MULTILINE)
# A possible start of a call.
_CALL = re.compile(r'\{\s*(?:"(?:n(?:a(?:m(?:e(?:"(?:\s*(?::.*)?)?)?)?)?)?)?)?\Z', re.DOTALL)


class FencedCalls:
    """Separates calls in fenced blocks from content.

    A block is held back while it may be a call.
    """

    def __init__(self, names: Collection[str]) -> None:
        """`names` are the functions that may be called."""
        self._names = names
        self._held = ""
        self._in_line = False

    def add(self, text: str, *, is_end: bool = False) -> list[str | tuple[str, str]]:
        """Add text; return what is certain: strings, and calls as (name, arguments)."""
        if not self._names:
            return [text] if text else []
        self._held += text
        ready: list[str | tuple[str, str]] = []
        while self._held:
            # a fence starts a line
            start = self._held.find("\n") + 1 if self._in_line else 0
            found = None if self._in_line and not start else _OPEN.search(self._held, start)
            if found is None:
                opening = _OPENING.search(self._held, start) if start or not self._in_line else None
                self._give(ready, opening.start() if opening and not is_end else len(self._held))
                return ready
            self._give(ready, found.start())
            begin = found.end() - found.start()
            closed = _CLOSE.search(self._held, begin)
            body = self._held[begin : closed.start() if closed else None]
            if closed is None and not is_end and _CALL.match(body):
                return ready
            call = self._call(body) if closed or is_end else None
            if call is None:
                self._give(ready, closed.end() if closed else len(self._held))
            else:
                ready.append(call)
                self._held = self._held[closed.end() :] if closed else ""
                self._in_line = False
        return ready

    def _give(self, ready: list[str | tuple[str, str]], size: int) -> None:
        text, self._held = self._held[:size], self._held[size:]
        if text:
            ready.append(text)
            self._in_line = not text.endswith("\n")

    def _call(self, text: str) -> tuple[str, str] | None:
        with suppress(json.JSONDecodeError):
            match json.loads(text):
                case {"name": str(name), "arguments": dict(given)} if name in self._names:
                    return name, json.dumps(given, ensure_ascii=False)
        return None
