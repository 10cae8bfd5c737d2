"""Session files of older versions: ZIP archives with a header, tokens and pictures.

Their KV cache and archive are not read: the text is read again. An answer in progress that was
recorded when the program was killed is included, as interrupted.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np

from ..core.tokens import n_common
from ..errors import SessionError
from ..writing.finish import FINISH_INTERRUPTED
from .messages import CONVERSATION, STORY, Contents, Message, TextInfo, packed
from .records import in_one_line, record_of
from .story_notes import n_with_notes
from .text_settings import ConversationSettings, StorySettings, damage_found, messages_of
from .turns import Dialogue, KeptAnswer, Turn

_MAGIC = b"PK\x03\x04"
_PICTURES = "pictures/"
# Suffix of the record of an answer in progress, next to the session.
_UNFINISHED = ".unfinished"
# Present names of fields.
_RENAMED = {"forgotten": "dropped", "told": "inserted", "thoughts": "reasoning"}
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
        header: dict[str, Any] = _renamed(about["header"])
        tokens = np.frombuffer(_member(archive, "tokens.bin"), "<i4").tolist()
        pictures = {
            name.removeprefix(_PICTURES): _member(archive, name)
            for name in archive.namelist()
            if name.startswith(_PICTURES)
        }
        header, tokens, more = _with_unfinished(path, header, tokens)
        pictures |= more
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


def _renamed(value: Any) -> Any:
    """Return a JSON value with the present names of its fields."""
    if isinstance(value, list):
        return [_renamed(each) for each in value]
    if isinstance(value, dict):
        return {_RENAMED.get(name, name): _renamed(each) for name, each in value.items()}
    return value


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a member, after a check of its size: damaged sizes may be huge."""
    info = archive.getinfo(name)
    assert archive.filename is not None
    if info.file_size > Path(archive.filename).stat().st_size:
        raise ValueError(f"{name} does not have {info.file_size} bytes")
    return archive.read(info)


def _with_unfinished(
    path: Path, header: dict[str, Any], tokens: list[int]
) -> tuple[dict[str, Any], list[int], dict[str, bytes]]:
    """Return header and tokens with an answer in progress, and the pictures of its message.

    While it was generated, it was recorded in a file next to the session.
    """
    try:
        record = _renamed(json.loads(path.with_name(path.name + _UNFINISHED).read_bytes()))
        if record["session"] != zlib.crc32(packed(tokens)):
            return header, tokens, {}  # the session was saved after the record
        text = [*tokens[: record["start"]], *record["tokens"]]
        pictures = {name: b64decode(data) for name, data in record["pictures"].items()}
        if (changes := record["story"]) is None:
            turns = [*header["turns"][: record["n_turns"]], record["turn"]]
            changes = {"turns": turns, "kept": record["kept"]}
        else:
            before = header["notes"].get("text", "")[: record["n_characters"]]
            changes["notes"]["text"] = before + changes["notes"]["text"]
    except (OSError, ValueError, LookupError, TypeError):
        return header, tokens, {}
    n_same = n_common(text, tokens)
    for name in ("pins", "dropped"):
        changes[name] = [span for span in header.get(name, ()) if span[1] <= n_same]
    return header | changes, text, pictures


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
    end = n_with_notes(header["prompt_tokens"], header.get("inserted", ()))
    prompt = Message(opening, "", "stop", n_before=end, tokens=packed(tokens[:end]))
    finish = header["finish"] or FINISH_INTERRUPTED
    passage = Message("", text.removeprefix(opening), finish, tokens=packed(tokens[end:]))
    return [prompt, passage] if len(tokens) > end else [prompt]
