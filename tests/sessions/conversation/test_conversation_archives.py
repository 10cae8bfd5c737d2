"""Archives: the rows that left the cache lie in a file beside the session."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from archived_talk import archive_of, assert_equal, go_on, names, opened, talk
from conversations import in_cache
from full_disk import full_disk
from pyh2o import Conversation


def test_going_on_from_two_files_is_going_on(path: Path, tmp_path: Path) -> None:
    """In another process, or while the first one still has the archive open."""
    file = tmp_path / "chat"
    memory, going = Conversation(opened(path)), Conversation(opened(path))
    for i in range(4):
        again = i == 2
        mine = go_on(memory, f"turn {i}", again=again)
        assert_equal(mine, go_on(going, f"turn {i}", again=again))
        going.save(file)
    assert names(tmp_path) == {"chat", "chat.archive"}
    assert going.llm.kv.archived > 500
    loaded = Conversation.load(file, opened(path))  # of a copy, as the file is in use
    expected = go_on(memory)
    assert_equal(expected, go_on(loaded))
    assert_equal(expected, go_on(going))
    going.llm.model.close()
    loaded.save(file)
    loaded.llm.model.close()
    assert names(tmp_path) == {"chat", "chat.archive"}
    last = Conversation.load(file, opened(path))
    assert_equal(go_on(memory, "last"), go_on(last, "last"))
    assert last.llm.archive_trouble == ""


def test_a_turn_writes_no_more_than_what_is_new(path: Path, tmp_path: Path) -> None:
    conversation, file = talk(path), tmp_path / "chat"
    conversation.save(file)
    whole = archive_of(file).read_bytes()
    page = (len(whole) - 4096) // (conversation.llm.kv.archived // 128)
    sizes = []
    for i in range(3):
        go_on(conversation, f"more {i}")
        conversation.save(file)
        sizes.append(file.stat().st_size)
    kv, data = conversation.llm.kv, archive_of(file).read_bytes()
    assert data[: len(whole)] == whole
    assert len(data) == 4096 + kv.archived // 128 * page
    assert len(data) > len(whole) + 6 * page
    assert max(sizes) - min(sizes) < 3 * page
    conversation.save(tmp_path / "portable", portable=True)
    assert (tmp_path / "portable").stat().st_size > len(data)


def test_a_portable_file_needs_no_other(path: Path, tmp_path: Path) -> None:
    conversation = talk(path)
    conversation.save(tmp_path / "chat")
    conversation.save(tmp_path / "portable", portable=True)
    assert names(tmp_path) == {"chat", "chat.archive", "portable"}
    for other in ("chat", "chat.archive"):
        (tmp_path / other).unlink()
    loaded = Conversation.load(tmp_path / "portable", opened(path))
    assert loaded.llm.archive_trouble == ""
    assert_equal(go_on(conversation), go_on(loaded))


def test_what_is_saved_stays_until_the_next_save(path: Path, tmp_path: Path) -> None:
    """Also when the text is cleared, or read again."""
    file, kept = tmp_path / "chat", tmp_path / "kept"
    kept.mkdir()
    memory, conversation = talk(path), talk(path)
    conversation.save(file)
    before = archive_of(file).read_bytes()
    conversation.clear()
    for i in range(3):
        go_on(conversation, f"other {i}", again=i == 1)
    conversation.undo()
    assert archive_of(file).read_bytes() == before
    assert len(names(tmp_path)) == 4  # the new one has another name
    for name in ("chat", "chat.archive"):
        shutil.copy(tmp_path / name, kept)
    conversation.save(file)
    assert names(tmp_path) == {"chat", "chat.archive", "kept"}
    assert archive_of(file).read_bytes() != before
    assert_equal(go_on(memory), go_on(Conversation.load(kept / "chat", opened(path))))
    loaded = Conversation.load(file, opened(path))
    assert_equal(go_on(conversation), go_on(loaded))


def test_a_file_that_no_session_needs_goes_with_the_model(path: Path, tmp_path: Path) -> None:
    conversation = talk(path)
    conversation.save(tmp_path / "chat")
    conversation.clear()
    go_on(conversation)
    conversation.llm.model.close()
    assert names(tmp_path) == {"chat", "chat.archive"}


def damage_nothing_left(archive: Path) -> None:
    archive.unlink()


def damage_rows(archive: Path) -> None:
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)


@pytest.mark.parametrize("damage", [damage_nothing_left, damage_rows])
def test_a_session_opens_whatever_has_become_of_its_archive(
    path: Path, tmp_path: Path, damage: Any
) -> None:
    file, conversation = tmp_path / "chat", talk(path)
    conversation.save(file)
    cached, turns = in_cache(conversation.llm), conversation.turns
    archived = conversation.llm.kv.archived
    conversation.llm.model.close()
    damage(archive_of(file))
    loaded = Conversation.load(file, opened(path))
    assert (in_cache(loaded.llm), loaded.turns) == (cached, turns)
    assert 0 < loaded.llm.kv.archived < archived
    lost = archived - loaded.llm.kv.archived
    trouble = loaded.llm.archive_trouble
    assert f"{lost} tokens before position {lost} cannot be found" in trouble
    assert trouble.endswith("; read the text again (--reread) to rebuild the archive")
    assert "\n" not in trouble
    go_on(loaded)
    loaded.save(file)
    again = Conversation.load(file, opened(path))
    assert_equal(go_on(loaded, "next"), go_on(again, "next"))


@pytest.mark.parametrize("damage", [damage_nothing_left, damage_rows])
def test_an_archive_is_built_anew_by_reading_the_text_again(
    path: Path, tmp_path: Path, damage: Any
) -> None:
    """Meanwhile, what is saved stays as it is."""
    file, conversation = tmp_path / "chat", talk(path)
    conversation.save(file)
    archived, turns = conversation.llm.kv.archived, conversation.turns
    conversation.llm.model.close()
    damage(archive_of(file))
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    loaded = Conversation.load(file, opened(path), reread=True)
    assert loaded.turns == turns
    go_on(loaded)
    assert loaded.llm.archive_trouble == ""
    assert loaded.llm.kv.archived > archived
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_another_archive_is_not_taken(path: Path, tmp_path: Path) -> None:
    one, two = talk(path), talk(path, 4)
    one.save(tmp_path / "one")
    two.save(tmp_path / "two")
    one.llm.model.close()
    two.llm.model.close()
    shutil.copy(tmp_path / "two.archive", tmp_path / "one.archive")
    loaded = Conversation.load(tmp_path / "one", opened(path))
    assert "cannot be found" in loaded.llm.archive_trouble


def test_a_full_disk_ends_archiving_and_not_the_conversation(path: Path, tmp_path: Path) -> None:
    file, conversation = tmp_path / "chat", talk(path)
    conversation.save(file)
    archived = conversation.llm.kv.archived
    with full_disk(archive_of(file).stat().st_size + 100):
        for i in range(3):
            go_on(conversation, f"full {i}")
    trouble = conversation.llm.archive_trouble
    assert "nothing is archived any more" in trouble
    assert "File too large" in trouble
    assert "\n" not in trouble
    stopped = conversation.llm.kv.archived
    assert archived < stopped < len(in_cache(conversation.llm)) - 300
    conversation.save(file)
    loaded = Conversation.load(file, opened(path))
    assert loaded.turns == conversation.turns
    assert in_cache(loaded.llm) == in_cache(conversation.llm)
    go_on(loaded, "more")
    kv = loaded.llm.kv
    assert kv.archived > 0
    assert loaded.llm.archive_trouble == ""


KILLED = """
import os, signal, sys
sys.path[:0] = {helpers!r}
from pathlib import Path
from pyh2o import Conversation
from pyh2o.cache.kv_cache import KVCache
from test_conversation_archives import go_on, opened

conversation = Conversation.load(sys.argv[1], opened(Path({model!r})))
before, moment, n = sys.argv[2], sys.argv[3], int(sys.argv[4])
OF = {{"replace": (os, "replace"), "flush": (KVCache, "flush_archive")}}

def kill_at(of, name):
    call = getattr(of, name)
    def killing(*args, **kwargs):
        global n
        n -= 1
        if n == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    setattr(of, name, killing)

if before == "clear":
    conversation.clear()
kill_at(*OF[moment])
go_on(conversation, "new")
go_on(conversation, "newer")
conversation.save(sys.argv[1])
"""


# The second file that is renamed is the archive, which has another name after a clearing.
@pytest.mark.parametrize("moment", ["go flush 1", "go replace 1", "clear replace 2"])
def test_a_program_that_is_killed_loses_nothing_that_was_saved(
    path: Path, tmp_path: Path, moment: str
) -> None:
    file, conversation = tmp_path / "chat", talk(path)
    conversation.save(file)
    conversation.llm.model.close()
    helpers = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "helpers")]
    script = KILLED.format(helpers=helpers, model=str(path))
    ended = subprocess.run(
        [sys.executable, "-c", script, str(file), *moment.split()], cwd=tmp_path, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    loaded = Conversation.load(file, opened(path))
    assert len(loaded.turns) == (2 if moment == "clear replace 2" else 3)
    assert loaded.llm.archive_trouble == ""
    assert loaded.llm.kv.archived > 128
    go_on(loaded)
    loaded.save(file)
    loaded.llm.model.close()
    assert names(tmp_path) == {"chat", "chat.archive"}
