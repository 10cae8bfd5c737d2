"""Session files of older versions: ZIP archives with a header, tokens and pictures.

Their KV cache and archive are not read: the text is read again.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SessionError
from ..writing.finish import FINISH_INTERRUPTED
from .messages import CONVERSATION, STORY, Contents, Message, TextInfo, packed
from .records import in_one_line, record_of
from .story_notes import n_with_notes
from .text_settings import ConversationSettings, StorySettings, damage_found, messages_of
from .turns import Dialogue, KeptAnswer, Turn

_MAGIC = b"PK\x03\x04"
_PICTURES = "pictures/"
# Header fields that the settings do not have.
_OTHER = {"cached", "archive", "known", "turns", "kept", "opening"}


def is_older(path: Path) -> bool:
    """Return whether a file is a session of an older version."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_older(path: Path) -> Contents:
    """Return the contents of a session file of an older version.

    Raises:
        SessionError: the file is damaged.
    """
    with damage_found(path), zipfile.ZipFile(path) as archive:
        about = json.loads(_member(archive, "header.json"))
        if not isinstance(about, dict) or about.get("format") != "pyh2o session":
            raise SessionError(f"{path} is not a session file of pyh2o: check the name")
        if about["version"] != 1:
            raise ValueError(f"its format version is {in_one_line(ascii(about['version']))}")
        header: dict[str, Any] = about["header"]
        tokens = np.frombuffer(_member(archive, "tokens.bin"), "<i4").tolist()
        pictures = {
            name.removeprefix(_PICTURES): _member(archive, name)
            for name in archive.namelist()
            if name.startswith(_PICTURES)
        }
        settings = {name: value for name, value in header.items() if name not in _OTHER}
        kind, changed = str(about["kind"]), path.stat().st_mtime
        replaced = list[Message]()
        if kind == CONVERSATION:
            record_of(ConversationSettings, settings)
            messages, replaced = _turns(header, tokens)
        elif kind == STORY:
            messages = _passages(header, settings, tokens)
            record_of(StorySettings, settings)
        else:
            raise ValueError(f"it is a {in_one_line(kind)}")
    size = len(messages), len(tokens)
    info = TextInfo(0, kind, path.stem, changed, changed, settings, *size)
    return Contents(info, messages, replaced, pictures)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a member, after a check of its size: damaged sizes may be huge."""
    info = archive.getinfo(name)
    assert archive.filename is not None
    if info.file_size > Path(archive.filename).stat().st_size:
        raise ValueError(f"{name} does not have {info.file_size} bytes")
    return archive.read(info)


def _turns(header: dict[str, Any], tokens: list[int]) -> tuple[list[Message], list[Message]]:
    turns = tuple(record_of(Turn, each, "turn") for each in header["turns"])
    kept = tuple(record_of(KeptAnswer, each, "answer") for each in header["kept"])
    if turns and turns[-1].end != len(tokens):
        raise ValueError("its turns do not end where its text ends")
    return messages_of(Dialogue(turns, kept), tokens)


def _passages(header: dict[str, Any], settings: dict[str, Any], tokens: list[int]) -> list[Message]:
    """Return prompt and text of a story, and complete its settings."""
    opening, notes = header["opening"], dict(header["notes"])
    text = notes.pop("text", opening)
    notes.pop("passages", None)
    settings |= {"echo": bool(opening), "opening": len(opening), "notes": notes}
    end = n_with_notes(header["prompt_tokens"], header.get("told", ()))
    prompt = Message(opening, "", "stop", n_before=end, tokens=packed(tokens[:end]))
    finish = header["finish"] or FINISH_INTERRUPTED
    passage = Message("", text.removeprefix(opening), finish, tokens=packed(tokens[end:]))
    return [prompt, passage] if len(tokens) > end else [prompt]
