"""Import chats that SillyTavern and ChatGPT have exported."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import SessionError

# SillyTavern's own message before a greeting.
OPENING = "[Start a new chat]"
PICTURE = "[picture]"
Message = tuple[bool, str]


@dataclass(frozen=True)
class ImportedChat:
    """A chat of another program.

    Attributes:
        title: title in that program.
        turns: pairs of a message and its answer.
        unanswered: the last message if it has no answer, or "".
    """

    title: str
    turns: tuple[tuple[str, str], ...]
    unanswered: str


def read_chats(text: str) -> list[ImportedChat]:
    """Return the chats of a file of SillyTavern (.jsonl) or of ChatGPT (conversations.json).

    Raises:
        SessionError: the file contains no chat.
    """
    try:
        records = _records(text)
        found = _of_openai(records) if _has(records, "mapping") else [_of_sillytavern(records)]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        found = []
    chats = [chat for chat in found if chat.turns]
    if not chats:
        raise SessionError(
            "no chats found in this file: give a SillyTavern chat (.jsonl), conversations.json of "
            "a ChatGPT export (unpack its ZIP file first), or a JSON file exported by pyh2o"
        )
    return chats


def _records(text: str) -> list[Any]:
    text = text.removeprefix("\ufeff")
    try:
        whole = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return whole if isinstance(whole, list) else [whole]


def _has(records: list[Any], field: str) -> bool:
    return any(isinstance(record, dict) and field in record for record in records)


def _chat(title: Any, messages: Iterable[Message]) -> ImportedChat:
    """Return a chat of (is_user, text) messages."""
    parts: list[Message] = []
    for is_user, text in messages:
        if parts and parts[-1][0] == is_user:
            parts[-1] = (is_user, f"{parts[-1][1]}\n\n{text}")
        else:
            parts.append((is_user, text))
    if parts and not parts[0][0]:
        parts.insert(0, (True, OPENING))
    # replace unpaired surrogates, which JSON may contain
    texts = [text.encode(errors="replace").decode() for _, text in parts]
    unanswered = texts.pop() if len(texts) % 2 else ""
    turns = tuple(zip(texts[::2], texts[1::2], strict=True))
    name = title.encode(errors="replace").decode() if isinstance(title, str) else ""
    return ImportedChat(name, turns, unanswered)


# -------------------------------------------------------------------------------------------------
# SillyTavern: a line about the chat, then a line for each message
# -------------------------------------------------------------------------------------------------


def _of_sillytavern(records: list[Any]) -> ImportedChat:
    found = [record for record in records if "mes" in record]
    messages = [
        (bool(message["is_user"]), str(message["mes"]))
        for message in found
        # remarks of the program, for example, are not shown to models
        if not message.get("is_system") and str(message["mes"]).strip()
    ]
    names = (message.get("name") for message in found if not message["is_user"])
    return _chat(records[0].get("character_name") or next(names, ""), messages)


# -------------------------------------------------------------------------------------------------
# OpenAI: trees of messages; the path to the current one is imported
# -------------------------------------------------------------------------------------------------


def _of_openai(records: list[Any]) -> list[ImportedChat]:
    trees = [record for record in records if isinstance(record.get("mapping"), dict)]
    return [_chat(tree.get("title"), list(_path(tree))[::-1]) for tree in trees]


def _path(tree: dict[str, Any]) -> Iterator[Message]:
    """Yield the messages from the current one up to the root."""
    nodes = dict(tree["mapping"])
    at = tree.get("current_node") or next(reversed(nodes), None)
    while node := nodes.pop(at, None):
        message = node.get("message")
        if message and (text := _text_of(message)):
            yield message["author"]["role"] == "user", text
        at = node.get("parent")


def _text_of(message: dict[str, Any]) -> str:
    """Return the visible text of a message: "" for tools, reasoning and instructions."""
    content = message.get("content") or {}
    is_shown = (
        message["author"]["role"] in ("user", "assistant")
        and message.get("recipient", "all") == "all"
        and content.get("content_type") in ("text", "multimodal_text")
        and not (message.get("metadata") or {}).get("is_visually_hidden_from_conversation")
    )
    parts = (content.get("parts") or []) if is_shown else []
    texts = [part if isinstance(part, str) else part.get("text") or PICTURE for part in parts]
    return "\n\n".join(text for text in texts if text.strip())
