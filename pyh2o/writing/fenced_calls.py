"""Calls of tools in blocks of code, as small models write them whose template has other marks."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from .tools import Call

FENCE = "```"
# A block that may become a call, and one that is whole.
_BEGUN = re.compile(r"```(?:[a-z_]*|[a-z_]*\s+(?:\{.*)?)", re.DOTALL)
_WHOLE = re.compile(r"```[a-z_]*\s+(\{.*?\})\s*```", re.DOTALL)


class FencedCalls:
    """Reads what an answer says, and takes out the blocks of code that call a tool.

    Attributes:
        calls: found so far.

    Args:
        names: of the tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.calls: list[Call] = []
        self._names = names
        self._held = ""
        self._in_block = False  # of other code
        self._behind_call = False  # or the white space there

    def add(self, text: str) -> str:
        """What is said with the next piece of text; what may be a call is held back."""
        self._held += text
        said = ""
        while True:
            if self._behind_call:
                self._held = self._held.lstrip()
                self._behind_call = not self._held
            before, fence, behind = self._held.partition(FENCE)
            if not fence:
                break
            block = fence + behind
            found = None if self._in_block else _WHOLE.match(block)
            if found and self._take(found[1]):
                said, self._held, self._behind_call = said + before, block[found.end() :], True
            elif not found and not self._in_block and _BEGUN.fullmatch(block):
                self._held = block
                return said + before
            else:
                said, self._held = said + before + fence, behind
                self._in_block = not self._in_block
        end = len(self._held.rstrip("`"))
        said, self._held = said + self._held[:end], self._held[end:]
        return said

    def end(self) -> str:
        """What is held back still: no call comes of it."""
        said, self._held = self._held, ""
        return said

    def _take(self, text: str) -> bool:
        """Take a JSON object that is a call of a tool; whether it is one."""
        try:
            given: Any = json.loads(text)
        except ValueError:
            return False
        arguments = given.get("arguments", given.get("parameters"))
        if given.get("name") not in self._names or not isinstance(arguments, dict):
            return False
        self.calls.append(Call(given["name"], json.dumps(arguments, ensure_ascii=False)))
        return True
