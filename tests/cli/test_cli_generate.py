"""`pyh2o generate`: whole outputs, with a model that writes what the test wants."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli_fakes import Output, press_ctrl_c, run
from fake_story import CHECKPOINT, RECORDS, STORY, WHOLE, FakeModel, names, now_there, report
from pyh2o.errors import ModelError, SettingsError

pytestmark = pytest.mark.usefixtures("surroundings")


# -------------------------------------------------------------------------------------------------
# The text and the line after it
# -------------------------------------------------------------------------------------------------


def test_story_on_stdout(fake: FakeModel) -> None:
    fake.script = [" a time."]
    output = run("generate", "-p", "Once upon", "--seed", "7")
    expected = report(fake, read=fake.n_prompt("Once upon"), wrote=8)
    assert output == Output(0, "Once upon a time.\n", expected)
    assert fake.closed == 1


def test_story_without_its_prompt(fake: FakeModel) -> None:
    fake.script = ["a time\n"]
    assert run("generate", "-p", "Once upon ", "--no-echo").text == "a time\n"
    fake.script = []
    assert run("generate", "-p", "The end.", "--no-echo").text == ""


def test_number_of_tokens_asked_for(fake: FakeModel) -> None:
    fake.script = ["a time"]
    output = run("generate", "-p", "x", "-n", "3", "--seed", "7")
    assert output.text == "xa t\n"
    why = "the number of tokens asked for is reached"
    assert output.notes == report(fake, read=fake.n_prompt("x"), wrote=3, why=why)


def test_until(fake: FakeModel) -> None:
    fake.script = ["So it went. THE END. And so on"]
    output = run("generate", "-p", "x ", "--until", "THE", "--until", "THE END.", "--seed", "7")
    assert (output.code, output.text) == (0, "x So it went. \n")
    why = "a text of --until came"
    assert output.notes == report(fake, read=fake.n_prompt("x "), wrote=15, why=why)


def test_loops_are_told_and_end_a_story(fake: FakeModel) -> None:
    fake.script = ["Repeat! " * 400]
    output = run("generate", "-p", "I: ", "-o", "story.txt")
    assert output.code == 0
    last = output.notes.splitlines()[-1]
    assert "the model fell into one loop after another" in last
    record = json.loads(RECORDS.read_text().splitlines()[-1])
    assert (record["loops"] > 1, record["finish"]) == (True, "repetition")
    assert f"broke {record['loops']} loops" in last


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (b"Once", "Once"),
        (b"Once\n\n", "Once\n"),
        (b"Once\r\nupon\r\n", "Once\nupon"),
        ("\ufeffÉs".encode(), "És"),
    ],
)
def test_prompt_of_a_file_or_of_standard_input(
    fake: FakeModel, content: bytes, prompt: str
) -> None:
    Path("start.txt").write_bytes(content)
    for source, given in (("start.txt", None), ("-", content)):
        fake.script = ["."]
        output = run("generate", "-f", source, stdin=given)
        assert (output.code, output.text) == (0, f"{prompt}.\n")
        evaluated = fake.llm.input_ids[: fake.n_prompt(prompt)].tolist()
        assert evaluated == fake.llm.tokenize(prompt.encode())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-f", "none.txt"], "there is no prompt file none.txt"),
        (["-f", "folder"], "folder is a folder: give --prompt-file a text file"),
        (["-f", "/proc/self/mem"], "cannot read /proc/self/mem: Input/output error"),
        (["-f", "latin.txt"], "latin.txt is not UTF-8 text (byte 2): save it as UTF-8"),
        (
            ["-f", "empty.txt"],
            "the prompt is empty: give the model at least one word to go on with",
        ),
        (["-p", "\udcff"], "the prompt is not UTF-8 text"),
        (["-p", "x", "-o", "no/x"], "there is no folder no: create it, or give another --output"),
        (["-p", "x", "-o", "folder"], "folder is a folder: give --output the name of a file"),
        (
            ["-p", "x", "-o", "old.txt"],
            "old.txt exists: give another --output, or replace it with --force",
        ),
        (
            ["-p", "x", "-o", "left.txt"],
            "left.txt.jsonl exists: give another --output, or replace it with --force",
        ),
        (
            ["-p", "x", "-o", "story.txt"],
            "story.txt.h2o exists: go on with it with --resume, give another --output, or replace "
            "it with --force",
        ),
        (
            ["-f", "old.txt", "-o", "old.txt", "--force", "--no-echo"],
            "--no-echo would lose the prompt in old.txt: give another --output",
        ),
        (
            ["-p", "x", "-m", "old.txt", "-o", "./old.txt", "--force"],
            "old.txt is the model: give another --output",
        ),
        (
            ["--resume", "-o", "old.txt"],
            "there is no checkpoint old.txt.h2o: go on after its text with --prompt-file old.txt "
            "and another --output",
        ),
        (
            ["--resume", "-o", "none.txt"],
            "there is no checkpoint none.txt.h2o: start without --resume",
        ),
        (
            ["--resume", "-o", "story.txt"],
            "story.txt.h2o is not a session file of pyh2o: check the name",
        ),
        (
            ["--resume", "-o", "/dev/null"],
            "/dev/null is not a file: only a story in a file can be resumed",
        ),
    ],
)
def test_unusable_files(fake: FakeModel, arguments: list[str], message: str) -> None:
    Path("folder").mkdir()
    Path("latin.txt").write_bytes("caé".encode("latin-1"))
    Path("empty.txt").write_bytes(b"\n")
    Path("old.txt").write_text("old")
    Path("left.txt.jsonl").write_text("{}\n")
    CHECKPOINT.write_text("no session")
    output = run("generate", *arguments)
    assert (output.code, output.text) == (1, "")
    assert output.notes.replace(f"{Path().absolute()}/", "") == f"error: {message}\n"
    assert fake.options is None  # no model was loaded for it
    assert Path("old.txt").read_text() == "old"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --prompt TEXT or --prompt-file FILE, or --resume"),
        (["-p", "x", "-f", "y"], "give either --prompt TEXT or --prompt-file FILE"),
        (["--resume"], "--resume needs --output FILE"),
        (["--resume", "-o", "x", "--force"], "give either --resume or --force"),
        (["--resume", "-o", "x", "--no-echo"], "leave --echo out with --resume"),
    ],
)
def test_usage(fake: FakeModel, arguments: list[str], message: str) -> None:
    output = run("generate", *arguments)
    assert output.code == 2
    assert message in output.notes
    assert "Traceback" not in output.notes
    assert fake.options is None


# -------------------------------------------------------------------------------------------------
# A file for the text
# -------------------------------------------------------------------------------------------------


def test_file_grows_as_the_story_is_written(fake: FakeModel) -> None:
    seen: list[str] = []

    def look() -> None:
        seen.append(STORY.read_text())

    fake.script = [look, " a", look, " time", look]
    output = run("generate", "-p", "Once upon", "-o", "story.txt", "--seed", "7")
    assert seen == ["", "Once upon a", "Once upon a time"]
    assert STORY.read_text() == "Once upon a time\n"
    assert (output.code, output.text) == (0, "")
    first, last = output.notes.splitlines(keepends=True)
    assert first == f"the text is in {STORY.absolute()}\n"
    assert last == report(fake, read=fake.n_prompt("Once upon"), wrote=7)
    assert names() == WHOLE


def test_story_can_be_gone_on_with_in_place(fake: FakeModel) -> None:
    STORY.write_text("Once upon\n")
    STORY.chmod(0o600)
    fake.script = [" a time"]
    assert run("generate", "-f", "story.txt", "-o", "story.txt", "--force").code == 0
    assert STORY.read_text() == "Once upon a time\n"
    assert STORY.stat().st_mode & 0o777 == 0o600
    assert names() == WHOLE


def make_story(fake: FakeModel, text: str) -> dict[str, bytes]:
    """A story with its checkpoint and records; their names and contents."""
    fake.script = [text]
    assert run("generate", "-p", "old", "-o", "story.txt").code == 0
    return now_there()


@pytest.mark.parametrize("fails", ["loading", "reading"])
def test_replaced_story_comes_back_if_nothing_is_written(fake: FakeModel, fails: str) -> None:
    def fail() -> None:
        raise SettingsError("too long")

    old = make_story(fake, " text")
    if fails == "loading":
        fake.error = SettingsError("too long")
    fake.before_reading = fail
    output = run("generate", "-p", "x", "-o", "story.txt", "--force")
    assert output == Output(1, "", "error: too long\n")
    assert now_there() == old
    assert len(old) == 3


@pytest.mark.parametrize(("length", "is_replaced"), [(236, True), (239, False), (243, False)])
def test_a_story_whose_name_is_too_long_to_be_moved_stays(
    fake: FakeModel, length: int, is_replaced: bool
) -> None:
    """Or what lies beside it; that there is no archive whose name is even longer does not count."""
    story = "x" * (length - len(".txt")) + ".txt"
    fake.script = [" a b c d e f"]
    assert run("generate", "-p", "I: ", "-n5", "-o", story).code == 0
    before = now_there()
    fake.script = [" a b c d e f"]
    output = run("generate", "-p", "I: ", "-n9", "-o", story, "--force")
    assert (output.code == 0) == is_replaced, output.notes
    assert output.notes.endswith("File name too long\n") != is_replaced
    assert now_there().keys() == before.keys()
    assert (now_there() != before) == is_replaced


def test_replaced_story_is_removed_when_the_new_one_is_whole(fake: FakeModel) -> None:
    make_story(fake, " text")
    fake.script = [" a"]
    assert run("generate", "-p", "x", "-o", "story.txt", "--force").code == 0
    assert STORY.read_text() == "x a\n"
    assert names() == WHOLE
    assert len(RECORDS.read_text().splitlines()) == 2


def test_replaced_story_stays_if_the_new_one_is_cut_short(fake: FakeModel) -> None:
    old = make_story(fake, " text")
    fake.script = [" a", press_ctrl_c, "b c"]
    output = run("generate", "-p", "x", "-o", "story.txt", "--force")
    assert STORY.read_text() == "x ab"
    [aside] = Path().glob("story.txt.*.old")
    assert output.code == 130
    assert output.notes.splitlines()[:2] == [
        f"the earlier story.txt is kept as {aside.absolute()}",
        f"the text is in {STORY.absolute()}",
    ]
    for suffix in ("", ".h2o", ".jsonl"):
        assert Path(f"{aside}{suffix}").read_bytes() == old[f"story.txt{suffix}"]
    # what is kept can be gone on with
    fake.script = [" text", " and more"]
    assert run("generate", "--resume", "-o", str(aside)).code == 0
    assert aside.read_text() == "old text and more\n"


def test_link_is_followed_and_stays(fake: FakeModel) -> None:
    Path("real.txt").write_text("old")
    STORY.symlink_to("real.txt")
    fake.script = ["a"]
    assert run("generate", "-p", "x", "-o", "story.txt", "--force", "--no-echo").code == 0
    assert Path("real.txt").read_text() == "a\n"
    assert STORY.is_symlink()
    assert Path("real.txt.h2o").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_device_is_written_in_place(fake: FakeModel) -> None:
    fake.script = ["a"]
    assert run("generate", "-p", "x", "-o", "/dev/null").code == 0
    assert Path("/dev/null").is_char_device()
    assert not Path("/dev/null.h2o").exists()
    assert run("generate", "-p", "x", "-o", "/dev/full") == Output(
        1,
        "",
        "error: cannot write /dev/full: No space left on device; what is in it stays: make room, "
        "or give another --output\n",
    )


# -------------------------------------------------------------------------------------------------
# Ctrl-C
# -------------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_written(fake: FakeModel) -> None:
    fake.script = [" a", press_ctrl_c, "b c"]
    output = run("generate", "-p", "x", "--seed", "7")
    why = "stopped by Ctrl-C"
    expected = report(fake, read=fake.n_prompt("x"), wrote=3, why=why)
    assert output == Output(130, "x ab\n", expected)


@pytest.mark.parametrize("arguments", [[], ["-o", "story.txt"]])
def test_ctrl_c_while_reading(fake: FakeModel, arguments: list[str]) -> None:
    fake.script = ["never written"]
    fake.before_reading = press_ctrl_c
    output = run("generate", "-p", "x y", "--seed", "7", *arguments)
    n_read = fake.n_prompt("x y")
    assert output == Output(
        130,
        "",
        f"read {n_read} tokens · wrote 0 tokens · stopped by Ctrl-C · seed 7 · "
        f"{fake.llm.kv.summary()}\n",
    )
    assert names() == []


def test_second_ctrl_c_does_not_wait(fake: FakeModel) -> None:
    fake.script = [" a", press_ctrl_c, press_ctrl_c, " b"]
    before = signal.getsignal(signal.SIGINT)
    output = run("generate", "-p", "x")
    assert output == Output(130, "x a\n", "stopped by Ctrl-C\n")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "error",
    [ModelError("broken\nfile"), SettingsError("broken file"), OSError(5, "file", "broken")],
)
def test_library_errors_are_one_line(fake: FakeModel, error: Exception) -> None:
    fake.error = error
    expected = "error: broken: file\n" if isinstance(error, OSError) else "error: broken file\n"
    assert run("generate", "-p", "x") == Output(1, "", expected)


@pytest.mark.parametrize("aborted", [True, False])
def test_ctrl_c_while_loading(monkeypatch: pytest.MonkeyPatch, aborted: bool) -> None:
    """Whether the library can break off the load then or goes on to its end."""

    class SlowLlama:
        def __init__(self, _path: str, *, load_progress: Callable[[float], None], **_: Any) -> None:
            press_ctrl_c()
            with suppress(KeyboardInterrupt):  # a C callback passes no exception on
                load_progress(0.5)
            if aborted:
                raise ModelError("damaged")

    library = SimpleNamespace(Llama=SlowLlama)
    monkeypatch.setitem(sys.modules, "pyh2o.compat.llama", library)
    expected = Output(130, "", "stopped by Ctrl-C\n")
    assert run("generate", "-m", "m.gguf", "-p", "x") == expected
