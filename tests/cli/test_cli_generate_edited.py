"""`pyh2o generate --resume` where files were edited, are missing or were left by a killed run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli_fakes import Output, press_ctrl_c, run
from fake_story import STORY, TALE, WHOLE, FakeModel, begin, names, now_there, resume, wrote
from full_disk import full_disk

pytestmark = pytest.mark.usefixtures("surroundings")


OTHER = "A tale without a loop, whatever comes: 1, 2, 4, 8, 16; x, y and (then) z."


@pytest.mark.parametrize(
    ("changed", "echo"),
    [
        ("I: Twice upon", True),
        ("I: Once upo\nI wrote this.\n", True),
        ("I: Once upo\n\n", True),
        ("You: ", True),
        ("\N{SNOWMAN}", False),
    ],
)
def test_file_that_was_edited_is_read_again(fake: FakeModel, changed: str, echo: bool) -> None:
    fake.script = [TALE]
    begin("-n", "8", "--echo" if echo else "--no-echo")
    STORY.write_text(changed)
    kept = changed.removesuffix("\n")
    n_tokens = len(fake.llm.tokenize((kept if echo else f"I: {kept}").encode()))
    # Before anything new is written, nothing is changed.
    there = now_there()
    fake.before_reading = press_ctrl_c
    assert resume("-n", "0").code == 130
    assert now_there() == there
    fake.before_reading = lambda: None
    fake.script = [OTHER]
    output = resume("-n", "40")
    assert output.code == 0
    first, _, last = output.notes.splitlines()
    said = re.fullmatch(r"story\.txt was edited: reading (\d+) tokens from where it differs", first)
    assert said is not None
    assert last.startswith(f"read {said[1]} tokens at ")
    assert int(said[1]) < n_tokens  # what stays is not read again
    assert STORY.read_text() == f"{kept}{OTHER[40 - wrote(output) : 40]}\n"
    assert names() == WHOLE
    # It is a story like any other from now on.
    before = STORY.read_text().removesuffix("\n")
    output = resume("-n", "0")
    assert "was edited" not in output.notes
    assert STORY.read_text() == f"{before}{OTHER[40:]}\n"


def test_a_story_that_was_made_shorter_goes_on_where_it_ends(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "8")
    STORY.write_text("I: On")
    output = resume("-n", "20")
    assert output.notes.startswith("story.txt was edited: reading 1 token from where it differs\n")
    assert STORY.read_text() == f"I: {TALE[:20]}\n"


@pytest.mark.parametrize("changed", ["", "\n", "I: Once upo", None])
def test_text_that_is_missing_comes_back(fake: FakeModel, changed: str | None) -> None:
    """A last line break is no edit, and an empty file holds nothing to go on with."""
    fake.script = [TALE]
    begin("-n", "8")
    STORY.unlink() if changed is None else STORY.write_text(changed)
    output = resume("-n", "13")
    assert "was edited" not in output.notes
    assert (output.code, STORY.read_text()) == (0, "I: Once upon a t\n")


def test_text_that_comes_back_to_a_full_disk_comes_back_later(fake: FakeModel) -> None:
    """A beginning of it would be taken for what somebody has made of it."""
    fake.script = [TALE]
    begin("-n", "8")
    STORY.unlink()
    with full_disk(5):
        output = resume("-n", "13")
    assert output == Output(
        1,
        "",
        "error: cannot write story.txt: File too large; its text is kept: free some space and "
        "continue with --resume, or give another --output\n",
    )
    output = resume("-n", "13")
    assert "was edited" not in output.notes
    assert (output.code, STORY.read_text()) == (0, "I: Once upon a t\n")


def test_last_line_break_that_an_editor_has_added_is_no_edit(fake: FakeModel) -> None:
    fake.script = [TALE[:5], press_ctrl_c, TALE[5:]]
    begin()
    with STORY.open("a") as file:
        file.write("\n")
    fake.script = [TALE]
    assert "was edited" not in resume().notes
    assert STORY.read_text() == f"I: {TALE}\n"


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize("mark", [b"", BOM])
@pytest.mark.parametrize("is_killed", [False, True])
def test_marks_of_a_windows_editor_are_no_edit(
    fake: FakeModel, mark: bytes, is_killed: bool
) -> None:
    """Neither a byte order mark nor CRLF; also where a killed run has written more."""
    killed: dict[str, bytes] = {}
    fake.script = [TALE[:60], lambda: killed.update(now_there()), TALE[60:]]
    begin("-n", "70", "--checkpoint", "50")
    for name, data in (killed if is_killed else now_there()).items():
        Path(name).write_bytes(data)
    STORY.write_bytes(mark + STORY.read_bytes().replace(b"\n", b"\r\n"))
    assert b"\r\n\r\n" in STORY.read_bytes()
    fake.script = [TALE]
    assert "was edited" not in resume("-n", "0").notes
    assert STORY.read_bytes().decode() == f"I: {TALE}\n"
    assert names() == WHOLE


@pytest.mark.parametrize("mark", [b"", BOM])
def test_what_a_windows_editor_has_edited_is_read_without_its_marks(
    fake: FakeModel, mark: bytes
) -> None:
    fake.script = [TALE]
    begin("-n", "50")
    kept = f"I: {TALE[:44]}\nMore.\n\nA line"
    STORY.write_bytes(mark + kept.replace("\n", "\r\n").encode() + b"\r\n")
    fake.script = [OTHER]
    output = resume("-n", "70")
    said = re.match(r"story\.txt was edited: reading (\d+) tokens", output.notes)
    assert said is not None
    assert int(said[1]) < 20
    text = STORY.read_bytes().decode()
    assert text.startswith(kept)
    assert "\r" not in text
    assert "was edited" not in resume("-n", "0").notes


def test_file_that_is_no_text_any_more_is_refused(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "8")
    STORY.write_bytes("I: caé\n".encode("latin-1"))
    there = now_there()
    assert resume("-n", "0") == Output(
        1,
        "",
        "error: story.txt is not UTF-8 text (byte 5): save it as UTF-8\n",
    )
    assert now_there() == there


# -------------------------------------------------------------------------------------------------
# Killed before the first token
# -------------------------------------------------------------------------------------------------


def test_a_story_killed_before_its_first_token_can_be_resumed(fake: FakeModel) -> None:
    there: dict[str, bytes] = {}
    fake.before_reading = lambda: there.update(now_there())
    fake.script = [TALE]
    begin("-n", "12")
    for name in now_there():
        Path(name).unlink()
    assert sorted(there) == ["story.txt", "story.txt.h2o"]
    for name, data in there.items():
        Path(name).write_bytes(data)
    assert run("generate", "-p", "I: ", "-o", "story.txt").notes == (
        "error: story.txt.h2o exists: continue it with --resume, give another --output, or "
        "remove it\n"
    )
    output = resume()
    assert wrote(output) == 12
    assert f"read {fake.n_prompt('I: ')} tokens at" in output.notes
    assert STORY.read_text() == f"I: {TALE[:12]}\n"


def test_an_empty_file_may_be_begun_in(fake: FakeModel) -> None:
    STORY.touch()
    fake.script = [TALE]
    assert begin().code == 0
    assert STORY.read_text() == f"I: {TALE}\n"
