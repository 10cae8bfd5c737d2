"""`pyh2o generate --resume`: stories in the database, and their files."""

from __future__ import annotations

import fcntl
import re
import shlex
import shutil
from pathlib import Path

import pytest

from cli_fakes import Output, press_ctrl_c, run
from fake_story import (
    STORY,
    TALE,
    FakeModel,
    begin,
    names,
    now_there,
    report,
    resume,
    saved_stories,
    speed_of,
    wrote,
)
from full_disk import full_disk
from pyh2o.cli.generate import story_run
from pyh2o.errors import SessionError
from pyh2o.sessions.chats import locked, open_chats
from pyh2o.sessions.story import Story

pytestmark = pytest.mark.usefixtures("surroundings")

OTHER = "A tale without a loop, whatever comes: 1, 2, 4, 8, 16; x, y and (then) z."
BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize("length", [1, 5, 27, 28, 29, 30, 50])
def test_a_resumed_story_equals_an_uninterrupted_one(fake: FakeModel, length: int) -> None:
    """Also where a run ends amid a character, and in several passages."""
    fake.script = [TALE]
    assert begin("-n", str(length)).code == 0
    first = STORY.read_text()
    assert first.endswith("\n")
    assert f"I: {TALE}".startswith(first.removesuffix("\n"))
    output = resume("-n", "0")
    assert STORY.read_text() == f"I: {TALE}\n"
    rest = len(TALE.encode()) - length
    assert output.notes == f"the text is in {STORY.absolute()}\n" + report(
        fake, wrote=rest, after=length
    ).replace(speed_of(rest, rest), speed_of(rest, rest + 1))
    assert names() == [STORY.name]
    assert saved_stories() == [("story", f"I: {TALE}")]


def test_passages_do_not_change_the_text(fake: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story_run, "PASSAGE", 9)
    fake.script = [TALE]
    begin("-n", "31")
    assert resume("-n", "45").code == 0
    assert STORY.read_text() == f"I: {TALE.encode()[:45].decode()}\n"
    with open_chats() as database:
        passages = database.read(database.texts()[0].id).messages[1:]
    assert [len(each.tokens) // 4 for each in passages] == [9, 9, 9, 4, 9, 5]


def test_a_story_that_the_model_ended_can_be_resumed(fake: FakeModel) -> None:
    fake.script = ["The end."]
    assert "the model ended its text" in begin().notes
    fake.script = ["The end.", " Or not?"]
    output = resume("-n", "13")
    assert STORY.read_text() == "I: The end. Or n\n"
    assert "continued after 8 tokens · wrote 5 tokens" in output.notes


# -------------------------------------------------------------------------------------------------
# Killed and interrupted runs
# -------------------------------------------------------------------------------------------------


def kill(fake: FakeModel, *, after: int) -> None:
    """Leave what a killed run leaves after a number of bytes."""
    text = TALE.encode()
    there: dict[str, bytes] = {}

    def keep() -> None:
        there.update(now_there())
        shutil.copytree("chats", "kept")

    fake.script = [text[:after].decode(), keep, text[after:].decode()]
    begin()
    shutil.rmtree("chats")
    Path("kept").rename("chats")
    STORY.write_bytes(there["story.txt"])


@pytest.fixture
def stores_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story_run, "SECONDS", 0.0)


@pytest.mark.usefixtures("stores_each_token")
def test_file_grows_while_the_story_is_generated(fake: FakeModel) -> None:
    seen: list[tuple[list[tuple[str, str]], str]] = []

    def look() -> None:
        seen.append((saved_stories(), STORY.read_text() if STORY.exists() else ""))

    fake.script = [look, " a", look, " time", look]
    output = run("generate", "-p", "Once upon", "-o", "story.txt", "--seed", "7")
    texts = ["Once upon", "Once upon a", "Once upon a time"]
    assert seen == [
        ([("story", text)], text if number else "") for number, text in enumerate(texts)
    ]
    assert STORY.read_text() == "Once upon a time\n"
    assert output == Output(
        0,
        "",
        f"the text is in {STORY.absolute()}\n"
        + report(fake, read=fake.n_prompt("Once upon"), wrote=7),
    )


@pytest.mark.usefixtures("stores_each_token")
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text,
        lambda text: text[:-4],
        lambda text: text[:-4] + b"\0\0\0\0",  # the power failed
        lambda _: b"",
        None,
    ],
)
def test_a_killed_story_continues_with_the_same_text(fake: FakeModel, damage: object) -> None:
    kill(fake, after=20)
    if damage is None:
        STORY.unlink()
    else:
        assert callable(damage)
        STORY.write_bytes(damage(STORY.read_bytes()))
    fake.script = [TALE]
    output = resume()
    assert (output.code, STORY.read_text()) == (0, f"I: {TALE}\n")
    assert "was edited" not in output.notes
    assert saved_stories() == [("story", f"I: {TALE}")]


@pytest.mark.usefixtures("stores_each_token")
def test_an_edit_of_a_killed_story_is_read(fake: FakeModel) -> None:
    kill(fake, after=20)
    STORY.write_text(f"{STORY.read_text()} I wrote this.")
    fake.script = [OTHER]
    assert "story.txt was edited: reading" in resume("-n", "40").notes
    assert STORY.read_text().startswith(f"I: {TALE[:20]} I wrote this.{OTHER[34:38]}")


def test_a_story_killed_before_its_first_token_can_be_resumed(fake: FakeModel) -> None:
    fake.before_reading = lambda: shutil.copytree("chats", "kept") and None
    fake.script = [TALE]
    begin("-n", "12")
    fake.before_reading = lambda: None
    STORY.unlink()
    shutil.rmtree("chats")
    Path("kept").rename("chats")
    output = resume("-n", "12")
    assert wrote(output) == 12
    assert f"read {fake.n_prompt('I: ')} tokens at" in output.notes
    assert STORY.read_text() == f"I: {TALE[:12]}\n"


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_shows_how_to_resume(fake: FakeModel, presses: int) -> None:
    fake.script = [TALE[:9], *[press_ctrl_c] * presses, TALE[9:]]
    output = run("generate", "-p", "I: ", "-n", "20", "-o", "my story.txt")
    assert output.code == 130
    [line] = [line for line in output.notes.splitlines() if line.startswith("to resume: ")]
    command = line.removeprefix("to resume: pyh2o ")
    assert command == "generate --resume --output 'my story.txt'"
    fake.script = [TALE]
    assert run(*shlex.split(command)).code == 0
    assert Path("my story.txt").read_text() == f"I: {TALE[:20]}\n"


def test_ctrl_c_before_the_first_token_changes_nothing(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "10")
    fake.script = [TALE[:10], press_ctrl_c, TALE[10:]]
    fake.before_reading = press_ctrl_c
    STORY.write_text("I: An edit")
    before = now_there(), saved_stories()
    assert resume("-n", "0").code == 130
    assert (now_there(), saved_stories()) == before


def test_a_failing_save_ends_the_story_and_keeps_its_text(
    fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.script = [TALE]
    begin("-n", "10")
    store = Story.store

    def fail(_self: Story, **_: bool) -> None:
        raise SessionError("cannot use the session file: disk full")

    monkeypatch.setattr(Story, "store", fail)
    output = resume("-n", "0")
    assert (output.code, output.notes) == (1, "error: cannot use the session file: disk full\n")
    monkeypatch.setattr(Story, "store", store)
    assert STORY.read_text().startswith(f"I: {TALE[:11]}")
    assert resume("-n", "0").code == 0
    assert STORY.read_text() == f"I: {TALE}\n"


def test_a_file_on_a_full_disk_is_written_later(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "8")
    STORY.unlink()
    whole = STORY.absolute()
    with full_disk(5):
        output = resume("-n", "13")
    assert output.code == 1
    assert output.notes.startswith("error: cannot ")
    output = resume("-n", "13")
    assert "was edited" not in output.notes
    assert (output.code, whole.read_text()) == (0, "I: Once upon a t\n")


# -------------------------------------------------------------------------------------------------
# Files that were edited or are missing
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "echo"),
    [
        ("I: Twice upon", True),
        ("I: On", True),
        ("I: Once upo\nI wrote this.\n", True),
        ("I: Once upo\n\n", True),
        ("You: ", True),
        ("\N{SNOWMAN}", False),
    ],
)
def test_an_edited_file_is_read_from_where_it_differs(
    fake: FakeModel, changed: str, echo: bool
) -> None:
    fake.script = [TALE]
    begin("-n", "8", "--echo" if echo else "--no-echo")
    STORY.write_text(changed)
    kept = changed.removesuffix("\n")
    n_tokens = len(fake.llm.tokenize((kept if echo else f"I: {kept}").encode()))
    fake.script = [OTHER]
    output = resume("-n", "40")
    assert output.code == 0
    first, _, last = output.notes.splitlines()
    said = re.fullmatch(
        r"story\.txt was edited: reading (\d+) tokens? from where it differs", first
    )
    assert said is not None
    if said[1] != "1":
        assert last.startswith(f"read {said[1]} tokens at ")
    assert int(said[1]) < n_tokens  # the tokens before the edit are not read again
    assert STORY.read_text() == f"{kept}{OTHER[40 - wrote(output) : 40]}\n"
    before = STORY.read_text().removesuffix("\n")
    assert saved_stories() == [("story", before)]
    output = resume("-n", "0")
    assert "was edited" not in output.notes
    assert STORY.read_text() == f"{before}{OTHER[40:]}\n"


@pytest.mark.parametrize("mark", [b"", BOM])
def test_marks_of_a_windows_editor_are_not_an_edit(fake: FakeModel, mark: bytes) -> None:
    fake.script = [TALE]
    begin("-n", "50")
    STORY.write_bytes(mark + STORY.read_bytes().replace(b"\n", b"\r\n"))
    assert "was edited" not in resume("-n", "60").notes
    kept = f"I: {TALE[:44]}\nMore.\n\nA line"
    STORY.write_bytes(mark + kept.replace("\n", "\r\n").encode() + b"\r\n")
    fake.script = [OTHER]
    said = re.match(r"story\.txt was edited: reading (\d+) tokens", resume("-n", "70").notes)
    assert said is not None
    assert int(said[1]) < 20
    text = STORY.read_bytes().decode()
    assert text.startswith(kept)
    assert "\r" not in text
    assert "was edited" not in resume("-n", "0").notes


@pytest.mark.parametrize("changed", ["", "\n", "I: Once upo", None])
def test_a_missing_text_is_written_again(fake: FakeModel, changed: str | None) -> None:
    """A last line break is not an edit."""
    fake.script = [TALE]
    begin("-n", "8")
    STORY.unlink() if changed is None else STORY.write_text(changed)
    assert "the story has 8 tokens, and --max-tokens is 8" in resume().notes
    assert STORY.read_text().removesuffix("\n") == "I: Once upo"
    output = resume("-n", "13")
    assert "was edited" not in output.notes
    assert (output.code, STORY.read_text()) == (0, "I: Once upon a t\n")


def test_a_story_changed_elsewhere_is_written_to_its_file(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "8")
    with open_chats() as database:
        (info,) = database.texts()
        story = Story.open(database, info.id, fake.llm)
        story.edit("I: Once upon the page, and more")
        story.store()
    fake.script = [OTHER]
    output = resume("-n", "40")
    assert "was edited" not in output.notes
    assert STORY.read_text().startswith("I: Once upon the page, and more")


def test_a_file_that_is_not_text_is_refused(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "8")
    STORY.write_bytes("I: caé\n".encode("latin-1"))
    expected = "error: story.txt is not UTF-8 text (byte 5): save it as UTF-8\n"
    assert resume("-n", "0") == Output(1, "", expected)
    assert STORY.read_bytes() == "I: caé\n".encode("latin-1")


def test_a_story_is_generated_by_one_run_at_a_time(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "10")
    with STORY.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        message = "another run is writing story.txt: wait until it ends, or give another --output"
        assert resume("-n", "0") == Output(1, "", f"error: {message}\n")
    with open_chats() as database, locked(database, database.texts()[0].id):
        message = "session story is open in another chat: close that one first"
        assert resume("-n", "0") == Output(1, "", f"error: {message}\n")
    assert resume("-n", "0").code == 0
    assert STORY.read_text() == f"I: {TALE}\n"


# -------------------------------------------------------------------------------------------------
# What a story keeps
# -------------------------------------------------------------------------------------------------


def test_maximum_length_is_that_of_the_whole_story(fake: FakeModel) -> None:
    fake.script = [TALE[:10], press_ctrl_c, TALE[10:]]
    assert begin("-n", "20").code == 130
    fake.script = [TALE]
    output = resume()
    assert (output.code, wrote(output)) == (0, 9)
    assert STORY.read_text() == f"I: {TALE[:20]}\n"
    before = now_there(), saved_stories()
    assert resume() == Output(
        0,
        "",
        "the story has 20 tokens, and --max-tokens is 20: increase it to continue, or give 0 for "
        "no limit\n",
    )
    assert (now_there(), saved_stories()) == before
    assert wrote(resume("-n", "22")) == 2
    assert wrote(resume("-n", "0")) == len(TALE.encode()) - 22


def test_a_story_keeps_its_prompt_and_sampling(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "8", "--temp", "0.5", "--top-k", "7")
    sampling = fake.sampling
    message = (
        f"the story in {STORY.absolute()} has another prompt: remove the prompt to resume it, or "
        "give another --output"
    )
    assert resume("-p", "You: ") == Output(1, "", f"error: {message}\n")
    output = resume("-p", "I: ", "-n", "16", "--temp", "0.9", "--seed", "8", "--top-k", "7")
    assert fake.sampling == sampling
    own = "the story keeps its own sampling: temperature 0.5, seed 7\n"
    assert output.notes.startswith(own)
    assert " · seed 7 · " in output.notes
    assert "its own sampling" not in resume("-n", "24").notes
    assert STORY.read_text() == f"I: {TALE[:24]}\n"


def test_stop_texts_of_a_resumed_story_can_be_changed(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("--until", "The end", "--until", "day")
    for arguments, end in (
        ([], "day"),  # the same texts
        (["--until", "THE END"], "THE END"),
        (["--until", ""], None),
    ):
        assert resume(*arguments).code == 0
        text = TALE if end is None else TALE[: TALE.index(end)]
        assert STORY.read_text() == f"I: {text}\n"


def test_text_that_is_held_back_is_in_the_file(fake: FakeModel) -> None:
    """At the end, and at Ctrl-C."""
    fake.script = ["THE ENTRY. THE EN"]
    begin("--until", "THE END", "-n", "6")
    assert STORY.read_text() == "I: THE EN\n"
    fake.script = ["THE ENTRY. THE EN", press_ctrl_c, "DING"]
    resume("-n", "0", "--until", "THE ENDED")
    assert STORY.read_text() == "I: THE ENTRY. THE END"
    fake.script = ["THE ENTRY. THE ENDED"]
    resume()
    assert STORY.read_text() == "I: THE ENTRY. \n"


# -------------------------------------------------------------------------------------------------
# Other files
# -------------------------------------------------------------------------------------------------


def test_without_saving_only_the_text_is_written(fake: FakeModel) -> None:
    fake.script = [TALE[:9], press_ctrl_c, TALE[9:]]
    output = begin("--no-save")
    assert output.code == 130
    assert "to resume" not in output.notes
    assert STORY.read_text() == f"I: {TALE[:10]}"
    assert [path.name for path in Path().iterdir()] == ["story.txt"]
    assert resume().notes == (
        "error: no saved story was written to story.txt: continue its text with --prompt-file "
        "story.txt and another --output\n"
    )


def test_a_checkpoint_of_an_older_version_is_imported(fake: FakeModel) -> None:
    older = Path(__file__).parents[1] / "sessions" / "older_files" / "a tale.h2o"
    shutil.copy(older, "story.txt.h2o")
    output = resume("-n", "0", "-m", "other.gguf")
    [(title, text)] = saved_stories()
    assert title == "story"
    assert text.startswith("Once upon a time")
    assert "it was saved with another model" in output.notes
    assert "was edited" not in resume("-n", "0", "-m", "other.gguf").notes
    assert len(saved_stories()) == 1


def test_a_new_story_may_have_the_file_of_a_removed_text(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "8")
    assert begin().notes == (
        "error: story.txt exists: continue it with --resume, give another --output, or remove it\n"
    )
    STORY.write_text("")
    begin("-n", "9")
    assert resume("-n", "12").code == 0
    assert STORY.read_text() == f"I: {TALE[:12]}\n"
    assert saved_stories() == [("story (2)", f"I: {TALE[:12]}"), ("story", f"I: {TALE[:8]}")]
