"""Archives beside sessions, made wrong in any way: what is found is what was, or it is said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from archived_talk import archive_of, assert_equal, go_on, opened, seen_of, talk
from mutations import Edit, edited, edits
from pyh2o import Conversation, Llama
from tiny_chat import CHATML, write_chat_gguf
from tries import Tries


@dataclass
class Saved:
    """A conversation with an archive, and how it goes on."""

    file: Path
    archive: bytes
    seen: list[Any]
    after: list[Any]
    llm: Llama


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    folder = tmp_path_factory.mktemp("archive")
    path = write_chat_gguf(folder / "tiny.gguf", CHATML, n_layer=2)
    file = folder / "talk.h2o"
    conversation = talk(path)
    conversation.save(file)
    seen = seen_of(conversation)
    conversation.llm.model.close()
    archive = archive_of(file).read_bytes()
    with opened(path) as llm:
        after = go_on(Conversation.load(file, llm))
        yield Saved(file, archive, seen, after, llm)


def test_damaged_archives(saved: Saved, tries: Tries) -> None:
    """The conversation itself is none the worse."""

    def is_said(changes: list[Edit]) -> None:
        archive_of(saved.file).write_bytes(edited(saved.archive, changes, saved.archive[::-1]))
        loaded = Conversation.load(saved.file, saved.llm)
        assert_equal(seen_of(loaded), saved.seen)
        trouble = saved.llm.text.archive_trouble
        assert len(trouble.splitlines()) <= 1
        after = go_on(loaded)
        if not trouble and not saved.llm.text.archive_trouble:
            assert_equal(after, saved.after)

    tries.every(edits(len(saved.archive)), is_said, examples=12)
