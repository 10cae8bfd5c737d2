"""What saved sessions say of themselves, without a model: for lists, searches and exports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import SessionError
from .headers import CONVERSATION, STORY, SavedConversation, SavedStory, SessionHeader
from .records import record_of
from .saved import SavedChat
from .session_file import damage_found, read_overview
from .turns import Turn

# Characters of the first words.
FIRST_WORDS = 80


@dataclass(frozen=True)
class SavedText:
    """A session as its file has it.

    Attributes:
        name: of the session.
        kind: "conversation" or "story"; "" if the file is damaged.
        changed: when, in seconds since 1970.
        n_bytes: of its file and its archive.
        n_tokens: of its text.
        header: of its file; None if that is damaged.
        system: prompt of a conversation.
        sampling: how its text is drawn.
        turns: of a conversation.
        attempts: of the answers to its last message that are kept.
        text: of a story.
        passages: where each begins that was written of a story, in characters.
        trouble: why it cannot be read; "" if it can.
    """

    name: str
    kind: str
    changed: float
    n_bytes: int
    n_tokens: int = 0
    header: SessionHeader | None = None
    system: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    turns: tuple[Turn, ...] = ()
    attempts: tuple[int, ...] = ()
    text: str = ""
    passages: tuple[int, ...] = ()
    trouble: str = ""

    @property
    def first(self) -> str:
        """Its first words."""
        text = self.turns[0].user if self.turns else self.text
        words = " ".join(text[: 4 * FIRST_WORDS].split())
        return words if len(words) <= FIRST_WORDS else f"{words[: FIRST_WORDS - 3]}..."

    def has(self, words: str) -> bool:
        """Whether all of these words are in its name or its text."""
        said = [text for turn in self.turns for text in (turn.user, turn.answer)]
        whole = "\n".join([self.name, self.text, *said]).casefold()
        return all(word in whole for word in words.casefold().split())


def read_saved_text(chat: SavedChat) -> SavedText:
    """Read what a session's file says; one that is damaged says why.

    Raises:
        OSError: there is no such file.
    """
    about = chat.path.stat()
    place: dict[str, Any] = {
        "name": chat.name,
        "changed": about.st_mtime,
        "n_bytes": about.st_size + chat.archive_bytes,
    }
    try:
        return _read(chat, **place)
    except SessionError as error:
        return SavedText(kind="", trouble=" ".join(str(error).split()), **place)


def _read(chat: SavedChat, **place: Any) -> SavedText:
    overview = read_overview(chat.path)
    place |= {"kind": overview.kind, "n_tokens": overview.n_tokens}
    with damage_found(chat.path):
        if overview.kind == CONVERSATION:
            talk = record_of(SavedConversation, overview.header)
            return SavedText(
                header=talk,
                system=talk.system,
                sampling=asdict(talk.sampling),
                turns=talk.turns,
                attempts=tuple(talk.attempts),
                **place,
            )
        if overview.kind != STORY:
            raise ValueError(f"it is no session but a {overview.kind}")
        story = record_of(SavedStory, overview.header)
        return SavedText(
            header=story,
            sampling=asdict(story.sampling),
            text=str(story.notes.get("text", story.opening)),
            passages=tuple(int(start) for start in story.notes.get("passages", ())),
            **place,
        )


def text_of(saved: SavedText, form: str) -> str:
    """A session as a text: "text", "markdown" or "json"."""
    if form == "json":
        return json.dumps(export_of(saved), ensure_ascii=False, indent=2) + "\n"
    if saved.kind == STORY:
        return saved.text if saved.text.endswith("\n") else f"{saved.text}\n"
    if form == "markdown":
        parts = [f"# {saved.name}", *([f"> {saved.system}"] if saved.system else [])]
        for turn in saved.turns:
            parts += [f"**You:** {turn.user}", turn.answer.strip()]
    else:
        parts = [] if saved.system is None else [f"({saved.system})"]
        for turn in saved.turns:
            parts += [f"> {turn.user}", turn.answer.strip()]
    return "\n\n".join(parts) + "\n"


def export_of(saved: SavedText) -> dict[str, Any]:
    """A session fit for JSON: all that another model needs to go on with the text."""
    about: dict[str, Any] = {
        "format": "pyh2o export",
        "version": 1,
        "name": saved.name,
        "kind": saved.kind,
        "sampling": saved.sampling,
    }
    if saved.kind == STORY:
        return {**about, "text": saved.text}
    turns = [
        {"user": turn.user, "answer": turn.answer, "finish": turn.finish} for turn in saved.turns
    ]
    return {**about, "system": saved.system, "turns": turns}
