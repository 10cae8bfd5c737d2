"""The story of an output file in the chats database."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyh2o.sessions.chats import locked, open_chats
from pyh2o.sessions.messages import STORY, TextInfo

from ..errors import InputError
from .story_file import StoryFile

if TYPE_CHECKING:
    from pyh2o.core.text import HasText
    from pyh2o.sessions.story import Story

# Name of the output file in the notes of a story, and suffix of checkpoints of older versions.
OUTPUT = "output"
OLDER = ".h2o"


class SavedStory:
    """A context manager for the story, which is locked from `find` or `add` on.

    Attributes:
        was_killed: whether the program that wrote the story was killed.
    """

    def __init__(self, file: StoryFile) -> None:
        self._file = file
        self._output = str(file.path)
        self._older = Path(f"{self._output}{OLDER}")
        self._database = open_chats()
        self._open = ExitStack()
        self._open.callback(self._database.close)
        self._new: Story | None = None
        self.was_killed = False

    def __enter__(self) -> SavedStory:
        return self

    def __exit__(self, *_error: object) -> None:
        with self._open:
            if self._new is not None and self._new.place and not self._new.written:
                self._database.remove(self._new.place.text)

    @property
    def exists(self) -> bool:
        """Whether there is a story of this file."""
        return self._older.exists() or self._info() is not None

    def find(self) -> dict[str, Any]:
        """Return the settings of the story, which is imported if an older version saved it.

        Raises:
            InputError: there is no story of this file.
            SessionError: it is open elsewhere, or a checkpoint of an older version is damaged.
        """
        info = self._info()
        if info is None and self._older.exists():
            self._import()
            info = self._info()
        if info is None:
            cure = "start without --resume"
            if self._file.exists:
                name = self._file.name
                cure = f"continue its text with --prompt-file {name} and another --output"
            raise InputError(f"no saved story was written to {self._file.name}: {cure}")
        self._text = info.id
        self._open.enter_context(locked(self._database, info.id))
        self.was_killed = info.settings.get("finish") is None
        return info.settings

    def open(self, llm: HasText) -> Story:
        """Load the story that was found."""
        from pyh2o.sessions.story import Story

        return Story.open(self._database, self._text, llm)

    def add(self, story: Story) -> None:
        """Add a new story; it is removed at the end if it has no text."""
        story.notes[OUTPUT] = self._output
        text = story.keep_in(self._database, self._file.path.stem)
        self._new = story
        self._open.enter_context(locked(self._database, text))

    def _info(self) -> TextInfo | None:
        """Return the story of the file that was changed last."""
        stories = (info for info in self._database.texts() if info.kind == STORY)
        notes = ((info, info.settings.get("notes", {})) for info in stories)
        return next((info for info, each in notes if each.get(OUTPUT) == self._output), None)

    def _import(self) -> None:
        # imported here because it loads llama.cpp, which would delay `--help`
        from pyh2o.sessions.text_session import read_file

        contents, _ = read_file(self._older)
        info = contents.info
        settings = info.settings | {"notes": info.settings["notes"] | {OUTPUT: self._output}}
        info = replace(info, title=self._file.path.stem, settings=settings)
        self._database.add(replace(contents, info=info))
