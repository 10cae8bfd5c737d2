"""Copies of a saved conversation: of its file and of the archive beside it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from archived_talk import archive_of, assert_equal, go_on, names, opened, talk
from full_disk import full_disk
from pyh2o import Conversation
from pyh2o.errors import SessionError
from pyh2o.sessions import saved
from pyh2o.sessions.saved import SavedChat, copy_session
from pyh2o.sessions.session_file import Session


def test_copied_files_go_on_as_the_saved_ones(path: Path, tmp_path: Path) -> None:
    """In the models that have them open at once, which have a file each."""
    file, copy = tmp_path / "chat", tmp_path / "copy"
    memory, conversation = talk(path), talk(path)
    conversation.save(file)
    with pytest.raises(SessionError, match=r"chat\.archive is in use by another chat") as error:
        copy_session(file, copy)
    assert "\n" not in str(error.value)
    assert names(tmp_path) == {"chat", "chat.archive"}
    conversation.llm.model.close()
    assert copy_session(file, copy)
    assert names(tmp_path) == {"chat", "chat.archive", "copy", "copy.archive"}
    assert copy.read_bytes() == file.read_bytes()
    assert archive_of(copy).read_bytes() == archive_of(file).read_bytes()
    assert archive_of(copy).stat().st_mode == archive_of(file).stat().st_mode
    first, second = (Conversation.load(each, opened(path)) for each in (file, copy))
    for word in ("why", "when"):
        expected = go_on(memory, word)
        for loaded in (first, second):
            assert_equal(expected, go_on(loaded, word))
            loaded.save(tmp_path / ("chat" if loaded is first else "copy"))
    assert memory.llm.kv.found_share > 0
    assert (first.llm.archive_trouble, second.llm.archive_trouble) == ("", "")
    assert names(tmp_path) == {"chat", "chat.archive", "copy", "copy.archive"}


def test_a_copy_has_the_archive_that_its_session_needs(path: Path, tmp_path: Path) -> None:
    """Which has another name where a program was killed, or is gone."""
    file, conversation = tmp_path / "chat", talk(path)
    conversation.save(file)
    conversation.llm.model.close()
    archive_of(file).rename(tmp_path / "chat.archive.0a1b2c3d.new")
    archive_of(file).write_text("of another text")
    copy_session(file, tmp_path / "copy")
    loaded = Conversation.load(tmp_path / "copy", opened(path))
    assert loaded.llm.archive_trouble == ""
    (tmp_path / "chat.archive.0a1b2c3d.new").unlink()
    other = tmp_path / "other"
    assert not copy_session(file, other)
    assert not archive_of(other).exists()


def test_a_copy_that_fails_leaves_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, conversation = tmp_path / "chat", talk(path)
    conversation.save(file)
    conversation.llm.model.close()
    before = archive_of(file).stat().st_size
    with full_disk(before - 1), pytest.raises(SessionError, match="File too large") as error:
        copy_session(file, tmp_path / "copy")
    assert "\n" not in str(error.value)
    assert names(tmp_path) == {"chat", "chat.archive"}

    def stop(target: Path, _session: Session) -> None:
        assert archive_of(target).stat().st_size == before  # it comes first
        raise KeyboardInterrupt

    monkeypatch.setattr(saved, "write_session", stop)
    with pytest.raises(KeyboardInterrupt):
        copy_session(file, tmp_path / "copy")
    assert names(tmp_path) == {"chat", "chat.archive"}


@pytest.mark.parametrize("where", ["beside", "not moved yet", "no hard links"])
def test_the_archive_goes_along_with_a_new_name(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Whatever its own name is, and whatever somebody has left under the new one."""
    monkeypatch.setenv("PYH2O_CHATS", str(tmp_path))
    old, new = SavedChat("old"), SavedChat("new")
    conversation = talk(path)
    conversation.save(old.path)
    conversation.llm.model.close()
    mode = archive_of(old.path).stat().st_mode
    archive_of(new.path).write_text("of a session that was removed by hand")
    if where == "not moved yet":
        archive_of(old.path).rename(tmp_path / "old.h2o.archive.0a1b2c3d.new")
    if where == "no hard links":
        monkeypatch.setattr(os, "link", refuse_links)
    old.rename(new)
    assert not {name for name in names(tmp_path) if name.startswith("old")}
    loaded = Conversation.load(new.path, opened(path))
    assert loaded.llm.archive_trouble == ""
    loaded.save(new.path)
    assert names(tmp_path) == {"new.h2o", "new.h2o.archive"}
    assert archive_of(new.path).stat().st_mode == mode


def refuse_links(*_: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")
