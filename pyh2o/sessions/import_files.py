"""Import files into a database: sessions, exports of pyh2o, and chats of other programs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import SessionError
from ..writing.finish import FINISH_STOP
from ..writing.sampling import Sampling
from .database import Database
from .identity import IMPORTED
from .imports import read_chats
from .layout import RowShares
from .messages import STORY, Contents, Message, TextInfo
from .older import is_older, read_older
from .records import record_of, value_of
from .text_settings import (
    ConversationSettings,
    StorySettings,
    TextSettings,
    damage_found,
    messages_of,
)
from .turns import Dialogue, Turn


def import_file(database: Database, path: Path) -> list[tuple[int, str]]:
    """Add the texts of a file to a database.

    Returns:
        the id of each text, and its last message if that has no answer and is left out, or "".

    Raises:
        SessionError: the file cannot be read, is damaged, or has no texts.
    """
    if is_older(path):
        return [(database.add(read_older(path)), "")]
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SessionError(f"cannot read {path}: {error.strerror}") from None
    if data.startswith(b"SQLite format 3\0"):
        with Database(path, single=True, read_only=True) as file:
            return [(file.copy(info.id, database), "") for info in file.texts()]
    text = data.decode("utf-8-sig", errors="replace")
    with damage_found(path):
        try:
            record = json.loads(text)
        except ValueError:  # SillyTavern writes a line per message
            record = None
        if isinstance(record, dict) and record.get("format") == "pyh2o export":
            return [(database.add(_exported(record)), "")]
        chats = read_chats(text)
        return [
            (database.add(_conversation(chat.title or path.stem, chat.turns)), chat.unanswered)
            for chat in chats
        ]


def _exported(record: dict[str, Any]) -> Contents:
    """Return the text of a JSON export."""
    if record["version"] != 1:
        raise ValueError(f"its format version is {record['version']!r}")
    title = value_of(str, record["name"], "name")
    common = {
        "sampling": record_of(Sampling, record["sampling"], "sampling"),
        "note": value_of(str, record.get("note", ""), "note"),
    }
    if record["kind"] != STORY:
        turns = [
            (each["user"], each["answer"], each["finish"] or FINISH_STOP, each.get("inserted", ""))
            for each in record["turns"]
        ]
        return _conversation(title, turns, system=record["system"], **common)
    text = value_of(str, record["text"], "text")
    settings = StorySettings(
        model=IMPORTED, settings={}, prompt_tokens=0, echo=True, opening=0, text_bytes=0, held="",
        unsearched=0, finish=FINISH_STOP, ended=False, until=[], loop_guard=True, ignore_eos=False,
        seconds=0.0, memory=value_of(str, record.get("memory", ""), "memory"), **common,
    )  # fmt: skip
    return _contents(title, settings, [Message(text, "", FINISH_STOP)])


def _conversation(
    title: str,
    said: Sequence[tuple[str, ...]],
    *,
    system: str | None = None,
    sampling: Sampling | None = None,
    note: str = "",
) -> Contents:
    """Return a conversation of messages, answers, and perhaps finish reasons and inserted texts."""
    names = ("user", "answer", "finish", "inserted")
    empty = {"finish": FINISH_STOP, "start": 0, "answer_start": 0, "end": 0}
    values = (empty | dict(zip(names, each, strict=False)) for each in said)
    turns = tuple(record_of(Turn, each, "turn") for each in values)
    settings = ConversationSettings(
        model=IMPORTED, settings={}, sampling=sampling or Sampling(), template="", note=note,
        system=value_of(str | None, system, "system"), tools=(), places=RowShares(True, False),
    )  # fmt: skip
    return _contents(title, settings, messages_of(Dialogue(turns), [])[0])


def _contents(title: str, settings: TextSettings, messages: list[Message]) -> Contents:
    now = time.time()
    info = TextInfo(0, settings.kind, title, now, now, asdict(settings), len(messages), 0)
    return Contents(info, messages, [])
