"""Read saved sessions without a model, for lists, searches and exports."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import SessionError
from .headers import CONVERSATION, STORY, SavedConversation, SavedStory
from .records import record_of
from .saved import SavedChat
from .session_file import Session, damage_found, read_session
from .turns import Turn

# Maximum characters of the first words, and of tool results in an export.
FIRST_WORDS = 80
MAX_RESULT = 200


@dataclass(frozen=True)
class SavedText:
    """The contents of a session file.

    Attributes:
        changed: time of the last change, in seconds since 1970.
        n_bytes: size of the file and its archive.
        header: header of the file; None if the file is damaged.
        turns: turns of a conversation.
        text: text of a story.
        passages: starts of the generated passages of a story, in characters.
        trouble: why the file cannot be read; "" if it can.
    """

    name: str
    changed: float
    n_bytes: int
    n_tokens: int = 0
    header: SavedConversation | SavedStory | None = None
    turns: tuple[Turn, ...] = ()
    text: str = ""
    passages: tuple[int, ...] = ()
    trouble: str = ""

    @property
    def kind(self) -> str:
        """ "conversation" or "story"; "" if the file is damaged."""
        return "" if self.header is None else self.header.kind

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling settings."""
        return {} if self.header is None else asdict(self.header.sampling)

    @property
    def system(self) -> str | None:
        """The system prompt of a conversation."""
        return self.header.system if isinstance(self.header, SavedConversation) else None

    @property
    def first(self) -> str:
        """The first words of the text, in one line."""
        text = self.turns[0].user if self.turns else self.text
        text = _for_people(text[: 4 * FIRST_WORDS])
        return textwrap.shorten(text, FIRST_WORDS, placeholder="...")

    def has(self, words: str) -> bool:
        """Return whether the name and the text contain all of these words."""
        messages = [text for turn in self.turns for text in (turn.user, turn.answer)]
        whole = "\n".join([self.name, self.text, *messages]).casefold()
        return all(word in whole for word in words.casefold().split())


def read_saved_text(chat: SavedChat, *, in_progress: bool = True) -> SavedText:
    """Read a session's file; `in_progress` as for `read_session`. Damage is reported in `trouble`.

    Raises:
        OSError: the file does not exist.
    """
    text = SavedText(chat.name, chat.path.stat().st_mtime, chat.n_bytes)
    try:
        session = read_session(chat.path, state=False, in_progress=in_progress)
        with damage_found(chat.path):
            return replace(text, n_tokens=len(session.tokens), **_contents(session))
    except SessionError as error:
        return replace(text, trouble=" ".join(str(error).split()))


def _contents(session: Session) -> dict[str, Any]:
    if session.kind == CONVERSATION:
        talk = record_of(SavedConversation, session.header)
        return {"header": talk, "turns": talk.turns}
    if session.kind != STORY:
        raise ValueError(f"unknown kind of session: {session.kind}")
    story = record_of(SavedStory, session.header)
    return {
        "header": story,
        "text": str(story.notes.get("text", story.opening)),
        "passages": tuple(int(start) for start in story.notes.get("passages", ())),
    }


def text_of(saved: SavedText, form: str) -> str:
    """Export a session as "text", "markdown" or "json", which can be imported with any model."""
    if form == "json":
        about: dict[str, Any] = {
            "format": "pyh2o export",
            "version": 1,
            "name": saved.name,
            "kind": saved.kind,
            "sampling": saved.sampling,
        }
        texts = {name: getattr(saved.header, name, "") for name in ("memory", "note")}
        about |= {name: text for name, text in texts.items() if text}
        if saved.kind == STORY:
            about["text"] = saved.text
        else:
            about["system"] = saved.system
            about["turns"] = [
                {name: getattr(turn, name) for name in ("user", "answer", "finish")}
                | ({"told": turn.told} if turn.told else {})
                | ({"called": called} if (called := [*_called(turn)]) else {})
                for turn in saved.turns
            ]
        return json.dumps(about, ensure_ascii=False, indent=2) + "\n"
    if saved.kind == STORY:
        return saved.text if saved.text.endswith("\n") else f"{saved.text}\n"
    if form == "markdown":
        parts = [f"# {saved.name}", *([f"> {saved.system}"] if saved.system else [])]
        for turn in saved.turns:
            calls = (f"*{text}*" for text in _called(turn))
            parts += [f"**You:** {_for_people(turn.user)}", *calls, turn.answer.strip()]
    else:
        parts = [] if saved.system is None else [f"({saved.system})"]
        for turn in saved.turns:
            parts += [f"> {_for_people(turn.user)}", *_called(turn), turn.answer.strip()]
    return "\n\n".join(parts) + "\n"


def _for_people(message: str) -> str:
    """Return a message with short marks of its pictures."""
    return re.sub("<picture:[0-9a-f]{64}>", "[picture]", message)


def _called(turn: Turn) -> Iterator[str]:
    """Yield the texts of an answer's steps, and their tool calls with shortened results."""
    for step in turn.steps:
        if step.text.strip():
            yield step.text.strip()
        for call in step.calls:
            result = textwrap.shorten(call.result or "", MAX_RESULT, placeholder="...")
            yield f"({call.name} {call.arguments}: {result})"
