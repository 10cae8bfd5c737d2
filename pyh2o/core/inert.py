"""Keep the texts of special tokens in messages and tools from becoming these tokens.

The tokenizer parses `<|im_end|>` as a special token, also in messages of a user. Therefore such
texts are replaced by placeholders before the chat template is applied, and `Model.tokenize`
replaces the placeholders by ordinary tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import llama_cpp

from ..errors import ClosedError
from .vocabulary import check_vocabulary

_CONTROL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
_USER_DEFINED = llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
# Escapes in JSON, which llama.cpp parses before it applies a template.
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)", re.DOTALL)
_CHARACTER = re.compile(rf"{_ESCAPE.pattern}|.", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class InertTexts:
    """Placeholders for the texts of a model's special tokens.

    Special tokens are control tokens, and user-defined tokens that occur in a chat template of the
    model (all of them without a template). Other user-defined tokens, such as runs of spaces and
    HTML tags, are ordinary text: the model was trained with these tokens.

    A placeholder is a random key and the text in hexadecimal. Templates do not change it with
    `tojson`, `trim` and similar filters. The first chat reads the vocabulary.
    """

    def __init__(self, native: Any, templates: Sequence[str]) -> None:
        self._native, self._templates = native, templates
        self._key = f"inert{secrets.token_hex(8)}"
        # some templates change case
        self._words = re.compile(f"((?:{self._key}[0-9a-f]*x)+)".encode(), re.IGNORECASE)

    def hide(self, value: Any) -> Any:
        """Replace the texts of special tokens in all strings of a JSON value."""
        return self._hidden(value, self._any)

    def hide_messages(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Replace the texts of special tokens in messages.

        In messages of the assistant, only texts of control tokens are replaced, as templates search
        for others, such as `</think>`.
        """
        return [self._hidden_message(message) for message in messages]

    def split(self, text: bytes) -> list[bytes]:
        """Split a prompt at placeholders, and return text and hidden texts alternately."""
        parts = self._words.split(text)
        for n in range(1, len(parts), 2):
            words = parts[n].decode().lower().replace(self._key, "")
            parts[n] = bytes.fromhex(words.replace("x", ""))
        return parts

    def cut(self, text: str) -> list[str]:
        """Split a text after the first character of each special token's text."""
        cuts = [found.start() + 1 for found in self._any.finditer(text)]
        return [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]

    @cached_property
    def tokens(self) -> frozenset[int]:
        return frozenset(token for token, _, _ in self._special)

    @cached_property
    def _any(self) -> re.Pattern[str]:
        return _pattern(text for _, text, _ in self._special)

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return _pattern(text for _, text, is_control in self._special if is_control)

    @cached_property
    def _special(self) -> list[tuple[int, str, bool]]:
        """The special tokens, their texts, and whether they are control tokens."""
        if self._native.model is None:
            raise ClosedError("the model is closed: load it again")
        vocab, found = self._native.vocab, []
        check_vocabulary(vocab)
        for token in range(llama_cpp.llama_vocab_n_tokens(vocab)):
            kind = llama_cpp.llama_vocab_get_attr(vocab, token)
            if kind & (_CONTROL | _USER_DEFINED):
                data = llama_cpp.llama_vocab_get_text(vocab, token)
                text, is_control = data.decode(errors="surrogateescape"), bool(kind & _CONTROL)
                is_named = any(text in template for template in self._templates or [text])
                if len(text.strip()) > 1 and (is_control or is_named):
                    found.append((token, text, is_control))
        return found

    def _hidden_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        hidden: dict[str, Any] = self.hide(message)
        pattern = self._control if message.get("role") == "assistant" else self._any
        for name in {"content", "reasoning_content"} & message.keys():
            hidden[name] = self._hidden(message[name], pattern)
        content = hidden.get("content")
        parts = [
            part
            for part in (content if isinstance(content, list) else ())
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        if pattern.search("".join(part["text"] for part in parts)):
            for part in parts:  # a special token's text may be split across parts
                part["text"] += self._word_for("")
        return hidden

    def _hidden(self, value: Any, pattern: re.Pattern[str], *, is_json: bool = False) -> Any:
        if isinstance(value, str):
            return self._hidden_text(value, pattern, is_json=is_json)
        if isinstance(value, Mapping):
            return {
                self._hidden(name, pattern): self._hidden(v, pattern, is_json=name == "arguments")
                for name, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._hidden(each, pattern) for each in value]
        return value

    def _hidden_text(self, text: str, pattern: re.Pattern[str], *, is_json: bool) -> str:
        text = pattern.sub(lambda found: self._word_for(found[0]), text)
        if not pattern.search(_ESCAPE.sub(lambda found: _unescaped(found[0]), text)):
            return text
        characters = _CHARACTER.findall(text)
        for found in pattern.finditer("".join(map(_unescaped, characters))):
            begin, end = found.span()
            word = self._word_for(found[0] if is_json else "".join(characters[begin:end]))
            characters[begin:end] = [word, *[""] * (end - begin - 1)]
        return "".join(characters)

    def _word_for(self, text: str) -> str:
        return f"{self._key}{text.encode().hex()}x"


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for any of the texts, longer ones first.

    Texts with the same first characters share a branch, as there can be thousands.
    """
    grouped = groupby(sorted(set(texts), reverse=True), lambda text: text[:3])
    branches = []
    for head, group in grouped:
        ends = "|".join(re.escape(text[3:]) for text in group)
        branches.append(f"{re.escape(head)}(?:{ends})")
    return re.compile("|".join(branches) or "(?!)")


def _unescaped(character: str) -> str:
    """Return the character that a character or escape in a JSON string stands for."""
    if len(character) > 2:
        return chr(int(character[2:], 16))
    return _ESCAPED.get(character[1:], character[-1])
