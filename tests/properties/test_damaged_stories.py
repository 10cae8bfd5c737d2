"""Damaged story files and records: no content is ever lost."""

from __future__ import annotations

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
    """Return the name of a story in a folder without files."""
    for path in folder.iterdir():
        path.unlink()
    return folder / "story.txt"


def is_somewhere(content: bytes, folder: Path) -> bool:
    """Return whether a file contains the text, except for trailing white space."""
    return any(content.rstrip() in path.read_bytes() for path in folder.iterdir())


def test_resuming_an_edited_story_keeps_its_content(tmp_path: Path, tries: Tries) -> None:
    """Text that was added to the file stays or is kept in another file next to it."""
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
            # the text after the checkpoint was generated again or is in another file
            behind = before[len(begins) :].decode(errors="ignore").strip()
            come = "".join(pieces)
            asides = tmp_path.glob("*.old")
            kept = "".join(aside.read_text(errors="ignore") for aside in asides)
            assert behind in come + kept or is_somewhere(behind.encode(), tmp_path)

    tries.every(st.tuples(known, edits, Pieces), is_kept, examples=300)


def test_a_truncated_record_does_not_damage_others(tmp_path: Path, tries: Tries) -> None:
    def are_added(drawn: tuple[bytes, list[str]]) -> None:
        content, lines = drawn
        path = emptied(tmp_path)
        file = NewStoryFile(path)
        beside(path, RECORDS).write_bytes(content)
        for line in lines:
            file.record({"line": line})
        data = beside(path, RECORDS).read_bytes()
        all_but_the_last = content[: content[:-1].rfind(b"\n") + 1]
        assert data.startswith(all_but_the_last if lines else content)
        added = data.split(b"\n")[-1 - len(lines) : -1] if lines else []
        assert [json.loads(line) for line in added] == [{"line": line} for line in lines]

    tries.every(st.tuples(st.binary(max_size=20), Pieces), are_added, examples=100)
