"""Archives: a saved conversation continues with the rows that left the cache."""

from __future__ import annotations

from pathlib import Path

from archived_talk import assert_equal, go_on, names, opened, talk
from pyh2o import Conversation


def test_going_on_from_a_file_is_going_on(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat"
    memory, going = Conversation(opened(path)), Conversation(opened(path))
    for i in range(4):
        again = i == 2
        mine = go_on(memory, f"turn {i}", again=again)
        assert_equal(mine, go_on(going, f"turn {i}", again=again))
        going.save(file)
    assert names(tmp_path) == {"chat", "chat.kv"}
    assert going.llm.kv.archived > 500
    loaded = Conversation.load(file, opened(path))
    expected = go_on(memory)
    assert_equal(expected, go_on(loaded))
    assert_equal(expected, go_on(going))
    assert loaded.llm.archive_trouble == ""


def test_an_archive_is_built_anew_by_reading_the_text_again(path: Path, tmp_path: Path) -> None:
    conversation = talk(path)
    conversation.save(tmp_path / "chat")
    (tmp_path / "chat.kv").unlink()
    loaded = Conversation.load(tmp_path / "chat", opened(path))
    assert loaded.turns == conversation.turns
    go_on(loaded)
    assert loaded.llm.kv.archived > conversation.llm.kv.archived
