"""Archives: a saved conversation continues with the rows that left the cache."""

from __future__ import annotations

from pathlib import Path

from archived_talk import assert_equal, names, opened, resume, talk
from pyh2o import Conversation


def test_going_on_from_a_file_is_going_on(path: Path, tmp_path: Path) -> None:
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
    assert loaded.llm.archive_trouble == ""


def test_an_archive_is_built_anew_by_reading_the_text_again(path: Path, tmp_path: Path) -> None:
    conversation = talk(path)
    conversation.save(tmp_path / "chat")
    (tmp_path / "chat.kv").unlink()
    loaded = Conversation.load(tmp_path / "chat", opened(path))
    assert loaded.turns == conversation.turns
    resume(loaded)
    assert loaded.llm.kv.archived > conversation.llm.kv.archived
