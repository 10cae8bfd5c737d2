"""Exports of stored texts, and their first words, without a model."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from .database import Database
from .messages import STORY, Contents, Message

# Maximum characters of the first words, and of tool results in an export.
FIRST_WORDS = 80
MAX_RESULT = 200


def first_words(database: Database, text: int) -> str:
    """Return the first words of a text, in one line."""
    words = _for_people(database.start_of(text, 4 * FIRST_WORDS))
    return textwrap.shorten(words, FIRST_WORDS, placeholder="...")


def story_text(contents: Contents) -> str:
    """Return the text of a story, with the prompt if that is a part of it."""
    prompt, *passages = contents.messages or [Message("", "")]
    text = "".join(passage.answer for passage in passages)
    return prompt.user + text if contents.info.settings.get("echo") else text


def text_of(contents: Contents, form: str) -> str:
    """Export a text as "text", "markdown" or "json", which can be imported with any model."""
    info, turns = contents.info, contents.messages
    settings = info.settings
    if form == "json":
        about: dict[str, Any] = {
            "format": "pyh2o export",
            "version": 1,
            "name": info.title,
            "kind": info.kind,
            "sampling": settings.get("sampling", {}),
        }
        about |= {name: settings[name] for name in ("memory", "note") if settings.get(name)}
        if info.kind == STORY:
            about["text"] = story_text(contents)
        else:
            about["system"] = settings.get("system")
            about["turns"] = [
                {"user": turn.user, "answer": turn.answer, "finish": turn.finish}
                | ({"told": told} if (told := turn.about.get("told")) else {})
                | ({"called": called} if (called := [*_called(turn)]) else {})
                for turn in turns
            ]
        return json.dumps(about, ensure_ascii=False, indent=2) + "\n"
    if info.kind == STORY:
        text = story_text(contents)
        return text if text.endswith("\n") else f"{text}\n"
    system = settings.get("system")
    if form == "markdown":
        parts = [f"# {info.title}", *([f"> {system}"] if system else [])]
        for turn in turns:
            calls = (f"*{text}*" for text in _called(turn))
            parts += [f"**You:** {_for_people(turn.user)}", *calls, turn.answer.strip()]
    else:
        parts = [] if system is None else [f"({system})"]
        for turn in turns:
            parts += [f"> {_for_people(turn.user)}", *_called(turn), turn.answer.strip()]
    return "\n\n".join(parts) + "\n"


def _for_people(message: str) -> str:
    """Return a message with short marks of its pictures."""
    return re.sub("<picture:[0-9a-f]{64}>", "[picture]", message)


def _called(turn: Message) -> Iterator[str]:
    """Yield the texts of an answer's steps, and their tool calls with shortened results."""
    for step in turn.about.get("steps", ()):
        if step["text"].strip():
            yield step["text"].strip()
        for call in step["calls"]:
            result = textwrap.shorten(call["result"] or "", MAX_RESULT, placeholder="...")
            yield f"({call['name']} {call['arguments']}: {result})"
