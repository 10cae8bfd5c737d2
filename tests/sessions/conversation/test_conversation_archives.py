"""Archives of saved conversations."""

from __future__ import annotations

from pathlib import Path

from archived_talk import assert_equal, names, opened, resume, talk
from pyh2o import Conversation


def test_a_loaded_conversation_continues_as_the_saved_one(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat"
    memory, going = Conversation(opened(path)), Conversation(opened(path))
    for i in range(4):
        again = i == 2
        mine = resume(memory, f"turn {i}", again=again)
        assert_equal(mine, resume(going, f"turn {i}", again=again))
        going.save(file)
    assert names(tmp_path) == {"chat", "chat.kv"}
    assert going.llm.kv.archived > 500
    loaded = Conversation.load(file, opened(path))
    expected = resume(memory)
    assert_equal(expected, resume(loaded))
    assert_equal(expected, resume(going))
    assert loaded.reread_reason == ""


def test_reading_the_text_again_rebuilds_the_archive(path: Path, tmp_path: Path) -> None:
    conversation = talk(path)
    conversation.save(tmp_path / "chat")
    (tmp_path / "chat.kv").unlink()
    loaded = Conversation.load(tmp_path / "chat", opened(path))
    assert loaded.turns == conversation.turns
    resume(loaded)
    assert loaded.llm.kv.archived > conversation.llm.kv.archived


def test_a_text_whose_archive_file_is_missing_is_read_again(path: Path, tmp_path: Path) -> None:
    conversation = Conversation(opened(path, recall_archive=tmp_path / "archive"))
    for i in range(3):
        resume(conversation, f"turn {i}")
    conversation.save(tmp_path / "chat")
    loaded = Conversation.load(tmp_path / "chat", opened(path))
    assert "the archive's file lacks rows" in loaded.reread_reason
    resume(loaded)
    assert loaded.llm.archive_trouble == ""
    assert loaded.llm.kv.archived > conversation.llm.kv.archived
