"""The file of a story and its records: nothing that is in them is ever lost."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from hypothesis import strategies as st

from pyh2o.cli.errors import InputError
from pyh2o.cli.generate.story_file import (
    CHECKPOINT,
    RECORDS,
    NewStoryFile,
    ResumedStoryFile,
    beside,
)
from tries import Tries

Texts = st.lists(st.sampled_from(["once ", "upon", "é☺", "\n", " a"]), max_size=5).map("".join)
Contents = st.one_of(Texts.map(str.encode), st.binary(max_size=12))
Pieces = st.lists(Texts, max_size=4)


def emptied(folder: Path) -> Path:
    """The name of a story in a folder without files."""
    for path in folder.iterdir():
        path.unlink()
    return folder / "story.txt"


def is_somewhere(content: bytes, folder: Path) -> bool:
    """Whether a file has it, but for white space at its end."""
    return any(content.rstrip() in path.read_bytes() for path in folder.iterdir())


def test_a_story_that_is_resumed(tmp_path: Path, tries: Tries) -> None:
    """What somebody has put into the file stays there, or is kept beside it."""
    known = st.tuples(Texts, st.none() | Texts)
    edits = st.tuples(st.sampled_from(["as it was", "cut", "edited", "none"]), Contents)

    def is_kept(drawn: tuple[tuple[str, str | None], tuple[str, bytes], list[str]]) -> None:
        (text, end), (change, content), pieces = drawn
        path = emptied(tmp_path)
        beside(path, CHECKPOINT).write_bytes(b"a checkpoint")
        whole = (text + (end or "")).encode()
        found = {"as it was": whole + content, "cut": whole[: len(content)], "edited": content}
        if change in found:
            path.write_bytes(found[change])
        before = path.read_bytes() if path.exists() else b""
        file = ResumedStoryFile(path)
        try:
            edited = file.expect(text, end)
        except InputError:
            assert path.read_bytes() == before
            return
        with file:
            for piece in pieces:
                file.write(piece)
            file.settle()
        begins = (text if edited is None else edited).encode()
        assert path.read_bytes() == begins + "".join(pieces).encode()
        rest = before.removeprefix(begins).strip()
        if end is None or not end.encode().strip().startswith(rest):
            # what was behind the checkpoint has come again, or is aside
            behind = before[len(begins) :].decode(errors="ignore").strip()
            come = "".join(pieces)
            kept = file.aside.read_text(errors="ignore") if file.aside else ""
            assert behind in come + kept or is_somewhere(behind.encode(), tmp_path)

    tries.every(st.tuples(known, edits, Pieces), is_kept, examples=300)


def test_a_story_that_replaces_another(tmp_path: Path, tries: Tries) -> None:
    """The earlier one is there until the new one is complete, or again if that has no text."""
    drawn = st.tuples(Contents, Pieces, st.sampled_from(["complete", "left", "broken"]))

    def is_kept(drawn: tuple[bytes, list[str], str]) -> None:
        content, pieces, way = drawn
        path = emptied(tmp_path)
        path.write_bytes(content)
        beside(path, CHECKPOINT).write_bytes(b"of the earlier one")
        file = NewStoryFile(path, replace=True)
        with contextlib.suppress(KeyboardInterrupt), file:
            for piece in pieces:
                file.write(piece)
            if way == "complete":
                file.complete()
            if way == "broken":
                raise KeyboardInterrupt
        text = "".join(pieces).encode()
        files = {each.read_bytes() for each in tmp_path.iterdir()}
        if not text:
            assert files == {content, b"of the earlier one"}
            assert path.read_bytes() == content
        else:
            assert path.read_bytes() == text
            assert (content in files) == (way != "complete" or content == text)

    tries.every(drawn, is_kept, examples=100)


def test_records(tmp_path: Path, tries: Tries) -> None:
    """A line that was cut off goes, and spoils no other one."""

    def are_added(drawn: tuple[bytes, list[str]]) -> None:
        content, lines = drawn
        path = emptied(tmp_path)
        beside(path, RECORDS).write_bytes(content)
        file = NewStoryFile(path, replace=True)
        for line in lines:
            file.record({"line": line})
        data = beside(path, RECORDS).read_bytes()
        kept = content if is_json(content.rpartition(b"\n")[2]) else content[: whole(content)]
        assert data.startswith(kept if lines else content)
        added = data.split(b"\n")[-1 - len(lines) : -1] if lines else []
        assert [json.loads(line) for line in added] == [{"line": line} for line in lines]

    tries.every(st.tuples(st.binary(max_size=20), Pieces), are_added, examples=100)


def whole(content: bytes) -> int:
    """Bytes of lines that have an end."""
    return content.rfind(b"\n") + 1


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
