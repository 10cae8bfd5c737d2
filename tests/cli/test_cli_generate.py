"""`pyh2o generate`: outputs with a scripted model, and the real program, killed and resumed."""

from __future__ import annotations

import fcntl
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cli_fakes import (
    ENDLESS,
    PATIENCE,
    Output,
    Screen,
    press_ctrl_c,
    run,
    run_program,
    start_program,
    wait_until,
)
from fake_story import FakeModel, fake_model, open_tiny, tiny_model
from pyh2o import Llama
from pyh2o.cache.settings import DEFAULT_POLICY
from pyh2o.cli.options import KVType
from pyh2o.errors import ModelError, SessionError, SettingsError
from pyh2o.llama import KV_TYPES
from pyh2o.sessions.story import Story
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    llm = open_tiny(tmp_path_factory.mktemp("model"))
    yield llm
    llm.close()


@pytest.fixture
def fake(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    return fake_model(llm, monkeypatch)


def tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def report(
    fake: FakeModel,
    *,
    wrote: int,
    why: str = "the model ended its text",
    read: int | None = None,
    after: int = 0,
    seed: int = 7,
) -> str:
    """The last line: half a second for the reading, and for each token after the first."""
    begin = f"went on after {tokens(after)}" if read is None else _read(read)
    # an end of text takes its time, too
    steps = wrote if why == "the model ended its text" or after else wrote - 1
    speed = "" if min(wrote - (not after), steps) < 1 else _speed(wrote - (not after), steps)
    return (
        f"{begin} · wrote {tokens(wrote)}{speed} · {why} · seed {seed} · {fake.llm.kv.summary()}\n"
    )


def _read(count: int) -> str:
    return f"read {tokens(count)} at {count / 0.5:.1f} tokens/s"


def _speed(count: int, steps: int) -> str:
    return f" at {count / (steps / 2):.1f} tokens/s"


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


def test_model_with_nothing_to_add(fake: FakeModel) -> None:
    output = run("generate", "-p", "The end.", "--seed", "7")
    expected = report(fake, read=fake.n_prompt("The end."), wrote=0)
    assert output == Output(0, "The end.\n", expected)


def test_seed_is_new_each_run_and_shown(fake: FakeModel) -> None:
    seeds = []
    for _ in range(2):
        fake.script = ["a"]
        notes = run("generate", "-p", "x").notes
        assert fake.sampling is not None
        assert f" · seed {fake.sampling.seed} · " in notes
        seeds.append(fake.sampling.seed)
    assert seeds[0] != seeds[1]


def test_number_of_tokens_asked_for(fake: FakeModel) -> None:
    fake.script = ["a time"]
    output = run("generate", "-p", "x", "-n", "3", "--seed", "7")
    assert output.text == "xa t\n"
    why = "the number of tokens asked for is reached"
    assert output.notes == report(fake, read=fake.n_prompt("x"), wrote=3, why=why)


def test_tokens_are_counted_where_a_character_takes_several(fake: FakeModel) -> None:
    fake.script = ["a\N{PARTY POPPER}"]
    output = run("generate", "-p", "x")
    assert " · wrote 5 tokens " in output.notes
    assert output.text == "xa\N{PARTY POPPER}\n"


def test_until(fake: FakeModel) -> None:
    fake.script = ["So it went. THE END. And so on"]
    output = run("generate", "-p", "x ", "--until", "THE", "--until", "THE END.", "--seed", "7")
    assert (output.code, output.text) == (0, "x So it went. \n")
    why = "a text of --until came"
    assert output.notes == report(fake, read=fake.n_prompt("x "), wrote=15, why=why)


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (b"Once", "Once"),
        (b"Once\n", "Once"),
        (b"Once\n\n", "Once\n"),
        (b"Once\r\nupon\r\n", "Once\nupon"),
        ("\ufeffÉs".encode(), "És"),
    ],
)
@pytest.mark.parametrize("source", ["file", "stdin"])
def test_prompt_file(
    fake: FakeModel, tmp_path: Path, content: bytes, prompt: str, source: str
) -> None:
    fake.script = ["."]
    (tmp_path / "start.txt").write_bytes(content)
    if source == "file":
        output = run("generate", "-f", "start.txt")
    else:
        output = run("generate", "-f", "-", stdin=content)
    assert (output.code, output.text) == (0, f"{prompt}.\n")
    evaluated = fake.llm.input_ids[: fake.n_prompt(prompt)].tolist()
    assert evaluated == fake.llm.tokenize(prompt.encode())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-f", "none.txt"], "there is no prompt file none.txt"),
        (["-f", "folder"], "folder is a folder: give --prompt-file a text file"),
        (["-f", "latin.txt"], "latin.txt is not UTF-8 text (byte 2): save it as UTF-8"),
        (
            ["-f", "empty.txt"],
            "the prompt is empty: give the model at least one word to go on with",
        ),
        (["-p", ""], "the prompt is empty: give the model at least one word to go on with"),
        (["-p", "\udcff"], "the prompt is not UTF-8 text"),
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
            ["--resume", "-o", "old.txt"],
            "there is no checkpoint old.txt.h2o: nothing to go on from; start without --resume",
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
def test_unusable_files(
    fake: FakeModel, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.txt").write_bytes("caé".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"\n")
    (tmp_path / "old.txt").write_text("old")
    (tmp_path / "left.txt.jsonl").write_text("{}\n")
    (tmp_path / "story.txt.h2o").write_text("no session")
    output = run("generate", *arguments)
    assert (output.code, output.text) == (1, "")
    assert output.notes.replace(f"{tmp_path}/", "") == f"error: {message}\n"
    assert fake.options is None  # no model was loaded for it
    assert (tmp_path / "old.txt").read_text() == "old"


def test_output_folder_that_is_not_there(fake: FakeModel, tmp_path: Path) -> None:
    expected = f"error: there is no folder {tmp_path}/no: create it, or give another --output\n"
    assert run("generate", "-p", "x", "-o", "no/story.txt") == Output(1, "", expected)
    assert fake.options is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --prompt TEXT or --prompt-file FILE, or --resume"),
        (["-p", "x", "-f", "y"], "give either --prompt TEXT or --prompt-file FILE"),
        (["--resume"], "--resume needs --output FILE"),
        (["--resume", "-o", "x", "--force"], "give either --resume or --force"),
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


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_grows_as_the_story_is_written(fake: FakeModel, tmp_path: Path) -> None:
    story = tmp_path / "story.txt"
    seen: list[str] = []

    def look() -> None:
        seen.append(story.read_text())

    fake.script = [look, " a", look, " time", look]
    output = run("generate", "-p", "Once upon", "-o", "story.txt", "--seed", "7")
    assert seen == ["", "Once upon a", "Once upon a time"]
    assert story.read_text() == "Once upon a time\n"
    assert (output.code, output.text) == (0, "")
    first, last = output.notes.splitlines(keepends=True)
    assert first == f"the text is in {story}\n"
    assert last == report(fake, read=fake.n_prompt("Once upon"), wrote=7)
    assert names(tmp_path) == ["story.txt", "story.txt.h2o", "story.txt.jsonl"]


def test_story_can_be_gone_on_with_in_place(fake: FakeModel, tmp_path: Path) -> None:
    story = tmp_path / "story.txt"
    story.write_text("Once upon\n")
    story.chmod(0o600)
    fake.script = [" a time"]
    assert run("generate", "-f", "story.txt", "-o", "story.txt", "--force").code == 0
    assert story.read_text() == "Once upon a time\n"
    assert story.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["story.txt", "story.txt.h2o", "story.txt.jsonl"]


def make_story(fake: FakeModel, text: str, *arguments: str) -> dict[str, bytes]:
    """A story with its checkpoint and records; their names and contents."""
    fake.script = [text]
    assert run("generate", "-p", "old", "-o", "story.txt", *arguments).code == 0
    return {path.name: path.read_bytes() for path in Path().iterdir()}


def now_there() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path().iterdir()}


def too_long(fake: FakeModel) -> None:
    fake.error = SettingsError("too long")


def raise_when_read(fake: FakeModel) -> None:
    def fail() -> None:
        raise SettingsError("too long")

    fake.before_reading = fail


@pytest.mark.parametrize("fail", [too_long, raise_when_read])
def test_replaced_story_comes_back_if_nothing_is_written(
    fake: FakeModel, fail: Callable[[FakeModel], None]
) -> None:
    old = make_story(fake, " text")
    fail(fake)
    output = run("generate", "-p", "x", "-o", "story.txt", "--force")
    assert output == Output(1, "", "error: too long\n")
    assert now_there() == old
    assert len(old) == 3


def test_replaced_file_comes_back_if_the_model_is_silent(fake: FakeModel) -> None:
    old = make_story(fake, " text")
    fake.script = []
    assert run("generate", "-p", "x", "-o", "story.txt", "--force", "--no-echo").code == 0
    assert now_there() == old


def test_no_file_is_left_if_nothing_is_written(fake: FakeModel, tmp_path: Path) -> None:
    raise_when_read(fake)
    assert run("generate", "-p", "x", "-o", "story.txt").code == 1
    assert names(tmp_path) == []


def test_replaced_story_is_removed_when_the_new_one_is_whole(fake: FakeModel) -> None:
    make_story(fake, " text")
    fake.script = [" a"]
    assert run("generate", "-p", "x", "-o", "story.txt", "--force").code == 0
    assert Path("story.txt").read_text() == "x a\n"
    assert names(Path()) == ["story.txt", "story.txt.h2o", "story.txt.jsonl"]
    assert len(Path("story.txt.jsonl").read_text().splitlines()) == 2


def test_replaced_story_stays_if_the_new_one_is_cut_short(fake: FakeModel, tmp_path: Path) -> None:
    old = make_story(fake, " text")
    fake.script = [" a", press_ctrl_c, "b c"]
    output = run("generate", "-p", "x", "-o", "story.txt", "--force")
    assert (tmp_path / "story.txt").read_text() == "x ab"
    [aside] = tmp_path.glob("story.txt.*.old")
    assert output.code == 130
    assert output.notes.splitlines()[:2] == [
        f"the earlier story.txt is kept as {aside}",
        f"the text is in {tmp_path / 'story.txt'}",
    ]
    for suffix in ("", ".h2o", ".jsonl"):
        assert Path(f"{aside}{suffix}").read_bytes() == old[f"story.txt{suffix}"]
    # what is kept can be gone on with
    fake.script = [" text", " and more"]
    assert run("generate", "--resume", "-o", str(aside)).code == 0
    assert aside.read_text() == "old text and more\n"


def test_link_is_followed_and_stays(fake: FakeModel, tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "story.txt").symlink_to("real.txt")
    fake.script = ["a"]
    assert run("generate", "-p", "x", "-o", "story.txt", "--force", "--no-echo").code == 0
    assert (tmp_path / "real.txt").read_text() == "a\n"
    assert (tmp_path / "story.txt").is_symlink()
    assert (tmp_path / "real.txt.h2o").exists()


def test_device_is_written_in_place(fake: FakeModel, tmp_path: Path) -> None:
    fake.script = ["a"]
    assert run("generate", "-p", "x", "-o", "/dev/null").code == 0
    assert Path("/dev/null").is_char_device()
    assert not Path("/dev/null.h2o").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk(fake: FakeModel) -> None:
    fake.script = ["a"]
    output = run("generate", "-p", "x", "-o", "/dev/full")
    assert output == Output(
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
def test_ctrl_c_while_reading(fake: FakeModel, tmp_path: Path, arguments: list[str]) -> None:
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
    assert names(tmp_path) == []


def test_second_ctrl_c_does_not_wait(fake: FakeModel) -> None:
    fake.script = [" a", press_ctrl_c, press_ctrl_c, " b"]
    output = run("generate", "-p", "x")
    assert output == Output(130, "x a\n", "stopped by Ctrl-C\n")


def test_ctrl_c_works_as_before_afterwards(fake: FakeModel) -> None:
    fake.script = [" a"]
    before = signal.getsignal(signal.SIGINT)
    run("generate", "-p", "x")
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

    library = SimpleNamespace(Llama=SlowLlama, KV_TYPES={"f16": 1})
    monkeypatch.setitem(sys.modules, "pyh2o.llama", library)
    expected = Output(130, "", "stopped by Ctrl-C\n")
    assert run("generate", "-m", "m.gguf", "-p", "x") == expected


# -------------------------------------------------------------------------------------------------
# Checkpoints and --resume
# -------------------------------------------------------------------------------------------------

TALE = "Once upon a time there was \N{SNOWMAN}. The end.\n\nNo: another day came. THE END. So."


def resume(*arguments: str) -> Output:
    return run("generate", "--resume", "-o", "story.txt", *arguments)


def begin(*arguments: str) -> Output:
    return run("generate", "-p", "I: ", "-o", "story.txt", "--seed", "7", *arguments)


@pytest.mark.parametrize("length", [1, 5, 27, 28, 29, 30, 50])
def test_resumed_story_is_the_uninterrupted_one(
    fake: FakeModel, tmp_path: Path, length: int
) -> None:
    """Also where a run ends amid a character."""
    fake.script = [TALE]
    output = begin("-n", str(length))
    assert output.code == 0
    first = (tmp_path / "story.txt").read_text()
    assert first.endswith("\n")
    assert f"I: {TALE}".startswith(first.removesuffix("\n"))
    output = resume()
    assert (tmp_path / "story.txt").read_text() == f"I: {TALE}\n"
    rest = len(TALE.encode()) - length
    assert output.notes == f"the text is in {tmp_path / 'story.txt'}\n" + report(
        fake, wrote=rest, after=length
    ).replace(_speed(rest, rest), _speed(rest, rest + 1))
    assert names(tmp_path) == ["story.txt", "story.txt.h2o", "story.txt.jsonl"]


def test_records_are_lines_of_json(fake: FakeModel, tmp_path: Path) -> None:
    fake.script = [TALE]
    begin("-n", "25", "--checkpoint", "10")
    with (tmp_path / "story.txt.jsonl").open("a") as file:
        file.write('{"tok')  # the power failed
    resume("-n", "20", "--checkpoint", "10")
    lines = (tmp_path / "story.txt.jsonl").read_text().splitlines()
    assert lines.pop(4) == '{"tok'
    records = [json.loads(line) for line in lines]
    assert [record["tokens"] for record in records] == [1, 10, 20, 25, 30, 40, 45]
    assert [record["finish"] for record in records] == [
        *[None] * 3,
        "length",
        *[None] * 2,
        "length",
    ]
    assert all(record["tokens_per_second"] == 2.0 for record in records[1:])
    assert records[1]["tokens_per_second_overall"] == pytest.approx(10 / 4.5, abs=0.01)
    n_prompt = fake.n_prompt("I: ")
    assert [record["position"] for record in records[:3]] == [n_prompt, n_prompt + 9, n_prompt + 19]
    assert records[2]["text_bytes"] == len("I: ") + 20
    kv = fake.llm.kv
    assert records[-1]["cells_used"] == kv.used
    assert records[-1]["capacity"] == kv.capacity
    assert records[-1]["kv_bytes"] == kv.bytes_total
    assert records[-1]["resident_bytes"] > 2**20
    assert {"time", "seconds", "loops", "tokens_evicted", "compactions", "rebases"} < {*records[0]}


def test_story_that_the_model_ended_goes_on(fake: FakeModel, tmp_path: Path) -> None:
    fake.script = ["The end."]
    assert "the model ended its text" in begin().notes
    fake.script = ["The end.", " Or not?"]
    output = resume("-n", "5")
    assert (tmp_path / "story.txt").read_text() == "I: The end. Or n\n"
    assert "went on after 8 tokens · wrote 5 tokens" in output.notes


def test_story_that_was_ended_by_ctrl_c_goes_on(fake: FakeModel, tmp_path: Path) -> None:
    fake.script = ["Once", press_ctrl_c, " upon a time"]
    assert begin().code == 130
    assert (tmp_path / "story.txt").read_text() == "I: Once "
    fake.script = ["Once upon a time"]
    assert resume().code == 0
    assert (tmp_path / "story.txt").read_text() == "I: Once upon a time\n"


@pytest.mark.parametrize("finish", ["ended", "cut off"])
def test_ctrl_c_before_the_first_token_of_a_resumed_story_leaves_the_text(
    fake: FakeModel, tmp_path: Path, finish: str
) -> None:
    fake.script = [TALE]
    begin("-n", "10")
    if finish == "cut off":
        cut_off(fake, tmp_path, after=10)
    before = (tmp_path / "story.txt").read_text()
    fake.script = [TALE[:10], press_ctrl_c, interrupt]
    assert resume().code == 130
    assert (tmp_path / "story.txt").read_text() == before
    fake.script = [TALE]
    assert resume().code == 0
    assert (tmp_path / "story.txt").read_text() == f"I: {TALE}\n"
    assert names(tmp_path) == ["story.txt", "story.txt.h2o", "story.txt.jsonl"]


def interrupt() -> None:
    raise KeyboardInterrupt


def cut_off(fake: FakeModel, folder: Path, *, after: int, tail: str | None = None) -> None:
    """Leave the story as a crash would: a checkpoint after so many tokens, and text behind it."""
    saved: dict[str, bytes] = {}

    def keep() -> None:
        saved.update({path.name: path.read_bytes() for path in folder.iterdir()})

    text = TALE.encode()
    for path in folder.iterdir():
        path.unlink()
    fake.script = [text[:after].decode(), keep, text[after:].decode()]
    begin("--checkpoint", str(after))
    for name, data in saved.items():
        (folder / name).write_bytes(data)
    rest = text[after : after + 12].decode() if tail is None else tail
    (folder / "story.txt").write_text(f"I: {text[:after].decode()}{rest}")


def test_text_after_the_checkpoint_comes_again(fake: FakeModel, tmp_path: Path) -> None:
    cut_off(fake, tmp_path, after=10)
    story = tmp_path / "story.txt"
    before = story.read_text()
    seen: list[str] = []
    fake.script = [TALE[:15], lambda: seen.append(story.read_text()), TALE[15:]]
    assert resume().code == 0
    assert seen == [before]  # what is there already stays while it comes again
    assert story.read_text() == f"I: {TALE}\n"
    assert names(tmp_path) == ["story.txt", "story.txt.h2o", "story.txt.jsonl"]


@pytest.mark.parametrize(
    ("tail", "kept"), [("n a tima", "a"), ("n a time I wrote this", "I wrote this"), ("!", "!")]
)
def test_text_after_the_checkpoint_that_does_not_come_again_is_kept(
    fake: FakeModel, tmp_path: Path, tail: str, kept: str
) -> None:
    cut_off(fake, tmp_path, after=8, tail=tail)
    fake.script = [TALE]
    output = resume()
    assert (tmp_path / "story.txt").read_text() == f"I: {TALE}\n"
    [aside] = tmp_path.glob("story.txt.*.old")
    assert aside.read_text() == kept
    assert output.notes.startswith(
        "what story.txt had after the checkpoint, and did not come again, is kept as "
        f"{aside}\nthe text is in "
    )


def test_a_line_break_after_the_checkpoint_is_no_text_to_keep(
    fake: FakeModel, tmp_path: Path
) -> None:
    cut_off(fake, tmp_path, after=8, tail="\n")
    fake.script = [TALE]
    assert resume().code == 0
    assert (tmp_path / "story.txt").read_text() == f"I: {TALE}\n"
    assert names(tmp_path) == ["story.txt", "story.txt.h2o", "story.txt.jsonl"]


def test_text_after_the_checkpoint_is_kept_if_the_story_ends_before_it(
    fake: FakeModel, tmp_path: Path
) -> None:
    cut_off(fake, tmp_path, after=8)
    fake.script = [TALE]
    assert resume("-n", "4").code == 0
    assert (tmp_path / "story.txt").read_text() == f"I: {TALE[:12]}\n"
    [aside] = tmp_path.glob("story.txt.*.old")
    assert aside.read_text() == TALE[12:20]


@pytest.mark.parametrize(
    "changed",
    [
        "I: Twice upon",
        "I: Once upo\nI wrote this.\n",
        "I: Once upo\n\n",
        "I: Once upo ",
        "",  # is not a change: the text comes back
        "I: On",
        "I: Once upo",
        None,
    ],
)
def test_file_that_was_changed_is_not_touched(
    fake: FakeModel, tmp_path: Path, changed: str | None
) -> None:
    fake.script = [TALE]
    begin("-n", "8")
    story = tmp_path / "story.txt"
    assert story.read_text() == "I: Once upo\n"
    story.unlink() if changed is None else story.write_text(changed)
    there = now_there()
    output = resume("-n", "5")
    if changed is None or "I: Once upo".startswith(changed):
        assert (output.code, story.read_text()) == (0, "I: Once upon a t\n")
        return
    assert output == Output(
        1,
        "",
        "error: story.txt was changed since it was written: undo the changes, or begin a new "
        "story with it (--prompt-file story.txt and another --output)\n",
    )
    assert now_there() == there


def test_prompt_may_be_given_again(fake: FakeModel, tmp_path: Path) -> None:
    fake.script = [TALE]
    begin("-n", "8")
    there = now_there()
    output = resume("-p", "You: ")
    assert output == Output(
        1,
        "",
        f"error: the story in {tmp_path / 'story.txt'} has another prompt: leave the prompt out to "
        "go on with it, or give another --output\n",
    )
    assert now_there() == there
    assert resume("-p", "I: ", "-n", "3").code == 0
    assert (tmp_path / "story.txt").read_text() == "I: Once upon a\n"


def test_story_keeps_its_sampling(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "8", "--temp", "0.5", "--top-k", "7")
    sampling = fake.sampling
    output = resume("-n", "8", "--temp", "0.9", "--seed", "8", "--top-k", "7")
    assert fake.sampling == sampling
    own = "the story goes on with its own sampling: temperature 0.5, seed 7\n"
    assert output.notes.startswith(own)
    assert " · seed 7 · " in output.notes
    assert "its own sampling" not in resume("-n", "8").notes


def test_settings_come_from_the_checkpoint_unless_they_are_given(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "8")
    resume("-n", "8")
    assert fake.options is not None
    kept = fake.options.eviction
    assert (fake.options.ctx, kept.hh, kept.recent, kept.slack) == (1024, 20, 20, 8)
    assert not fake.options.no_evict
    assert fake.options.model == Path(fake.llm.model_path)
    assert fake.options.threads is None
    resume("-n", "8", "--hh", "5", "--threads", "2")
    assert (fake.options.eviction.hh, fake.options.threads) == (5, 2)


def test_until_of_a_resumed_story(fake: FakeModel, tmp_path: Path) -> None:
    fake.script = [TALE]
    story = tmp_path / "story.txt"
    begin("--until", "The end", "--until", "day")
    assert story.read_text() == f"I: {TALE[: TALE.index('The end')]}\n"
    assert resume().code == 0  # the same texts
    assert story.read_text() == f"I: {TALE[: TALE.index('day')]}\n"
    assert resume("--until", "THE END").code == 0
    assert story.read_text() == f"I: {TALE[: TALE.index('THE END')]}\n"
    output = resume("--until", "")
    assert "the model ended its text" in output.notes
    assert story.read_text() == f"I: {TALE}\n"


def test_text_held_back_at_the_end_is_in_the_file(fake: FakeModel, tmp_path: Path) -> None:
    story = tmp_path / "story.txt"
    fake.script = ["THE ENTRY. THE EN"]
    begin("--until", "THE END", "-n", "6")
    assert story.read_text() == "I: THE EN\n"
    resume()
    assert story.read_text() == "I: THE ENTRY. THE EN\n"


def test_text_held_back_at_ctrl_c_is_in_the_file(fake: FakeModel, tmp_path: Path) -> None:
    story = tmp_path / "story.txt"
    fake.script = ["THE EN", press_ctrl_c, "DING"]
    begin("--until", "THE ENDED")
    assert story.read_text() == "I: THE END"
    fake.script = ["THE ENDED"]
    resume()
    assert story.read_text() == "I: \n"


def test_a_failed_checkpoint_ends_the_story_and_keeps_the_text(
    fake: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Story, path: Path) -> None:
        raise SessionError(f"cannot save the session to {path}: no room")

    fake.script = [TALE]
    begin("-n", "10")
    checkpoint = (tmp_path / "story.txt.h2o").read_bytes()
    monkeypatch.setattr(Story, "save", fail)
    output = resume()
    assert output.code == 1
    assert output.notes.startswith("error: cannot save the session")
    assert (tmp_path / "story.txt").read_text().startswith(f"I: {TALE[:10]}")
    assert (tmp_path / "story.txt.h2o").read_bytes() == checkpoint


@pytest.mark.parametrize("arguments", [["--resume"], ["-p", "x", "--force"]])
def test_a_story_that_is_being_written_is_refused(
    fake: FakeModel, tmp_path: Path, arguments: list[str]
) -> None:
    fake.script = [TALE]
    begin("-n", "10")
    there = now_there()
    with (tmp_path / "story.txt").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        output = run("generate", "-o", "story.txt", *arguments)
    assert output == Output(
        1,
        "",
        "error: story.txt is being written by another run: wait for its end, or give another "
        "--output\n",
    )
    assert now_there() == there


# -------------------------------------------------------------------------------------------------
# The real program
# -------------------------------------------------------------------------------------------------

real = pytest.mark.real


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def small(tiny: Path) -> list[str]:
    """Options for the tiny model and a small cache."""
    return ["-m", str(tiny), "--ctx", "1024", "--hh", "32", "--recent", "32", "--slack", "8"]


def test_same_seed_same_story(tiny: Path, tmp_path: Path) -> None:
    arguments = ["generate", "-p", "Once upon a time", *small(tiny), "-n", "300", "--seed", "3"]
    printed = run(*arguments)
    written = run(*arguments, "-o", "story.txt")
    assert (printed.code, written.code, written.text) == (0, 0, "")
    assert printed.text.startswith("Once upon a time")
    assert (tmp_path / "story.txt").read_bytes().decode() == printed.text
    assert re.search(r" [1-9]\d* evicted", printed.notes)


def test_written_tokens_are_exact(tiny: Path) -> None:
    for count in (1, 2, 37):
        output = run("generate", "-m", str(tiny), "-p", "a", "-n", str(count), *ENDLESS)
        assert f"wrote {count} token" in output.notes
        assert "the number of tokens asked for is reached" in output.notes


def test_story_of_a_model_whose_positions_end(tmp_path: Path) -> None:
    short = write_tiny_gguf(
        tmp_path / "short.gguf", seed=17, n_ctx_train=600, arch_variant="learned_positions"
    )
    arguments = ["generate", "-m", str(short), "--hh", "32", "--recent", "32", "--no-loop-guard"]
    output = run(*arguments, "-p", "Once", *ENDLESS)
    assert output.code == 0
    assert "all 600 positions the model was trained for are used up" in output.notes
    output = run(*arguments, "-f", "-", "-o", "s.txt", stdin="word " * 700)
    assert (output.code, output.text) == (1, "")
    assert re.fullmatch(r"error: Requested tokens .*\n", output.notes)
    assert not (tmp_path / "s.txt").exists()


def test_story_that_fills_a_full_cache(tiny: Path) -> None:
    output = run(
        "generate",
        "-m",
        str(tiny),
        "-p",
        "x",
        "--ctx",
        "256",
        "--no-evict",
        "--no-loop-guard",
        *ENDLESS,
    )
    assert output.code == 0
    assert "the window of 256 tokens is full, and --no-evict drops nothing" in output.notes


def test_story_that_the_model_may_not_end(tmp_path: Path) -> None:
    """The tiny model as it is draws the end of the text like any other token."""
    path = write_tiny_gguf(tmp_path / "ending.gguf", seed=17)
    arguments = ["generate", "-m", str(path), "-n", "2000", "--temp", "2", "--seed", "1"]
    assert "the model ended its text" in run(*arguments, "-p", "x").notes
    output = run(*arguments, "-p", "x", "--ignore-eos", "-o", "s.txt")
    assert "wrote 2,000 tokens" in output.notes
    assert run(*arguments, "--resume", "-o", "s.txt").notes.count("wrote 2,000 tokens") == 1


def test_a_long_prompt_can_be_read_exactly(tiny: Path) -> None:
    arguments = ["generate", *small(tiny), "-f", "-", "-n", "20", "--seed", "3", *ENDLESS]
    prompt = "word " * 150
    plain = run(*arguments, stdin=prompt)
    exact = run(*arguments, "--prefill", "exact", stdin=prompt)
    assert (plain.code, exact.code) == (0, 0)
    said = re.search(r"^reading ([\d,]+) tokens in full takes [1-9]\d* MiB", exact.notes, re.M)
    assert said is not None
    assert "in full" not in plain.notes
    n_read = re.search(r"read ([\d,]+) tokens at", exact.notes)
    assert n_read is not None
    assert n_read[1] == said[1]
    assert "KV 67/72 cells" in exact.notes
    refused = run(*arguments, "--prefill", "exact", "--prefill-mib", "1", stdin="word " * 2000)
    assert (refused.code, refused.text) == (1, "")
    assert re.fullmatch(r"error: an exact prefill of .* 1 allowed: .*\n", refused.notes)


def test_every_kv_type(tiny: Path) -> None:
    for kv_type in KVType:
        output = run("generate", "-m", str(tiny), "-p", "x", "-n", "20", "--kv-type", kv_type.value)
        assert output.code == 0, output.notes


def test_loops_are_told_and_end_a_story(tiny: Path, tmp_path: Path) -> None:
    arguments = ["generate", *small(tiny), "-p", "Once upon a time", *ENDLESS, "--no-echo"]
    output = run(*arguments, "-o", "story.txt")
    assert output.code == 0
    *loops, _, last = output.notes.splitlines()
    assert len(loops) > 5
    for line in loops:
        assert re.fullmatch(
            r"a loop of \d+ tokens? at token [\d,]+: the model has to write something else", line
        )
    assert "the model fell into one loop after another" in last
    assert f"broke {len(loops)} loops" in last
    record = json.loads((tmp_path / "story.txt.jsonl").read_text().splitlines()[-1])
    assert (record["loops"], record["finish"]) == (len(loops), "repetition")
    # on stdout, where a line amid the text would belong to it, they come after it
    printed = run(*arguments)
    assert printed.text == (tmp_path / "story.txt").read_text()
    assert printed.notes.splitlines()[:-1] == loops


def open_like(tiny: Path, sampling: Sequence[str]) -> Llama:
    kv_type = KV_TYPES["q8_0" if "q8_0" in sampling else "f16"]
    settings = {"n_ctx": 1024, "hh": 32, "recent": 32, "slack": 8, "policy": DEFAULT_POLICY}
    return tiny_llama(tiny, type_k=kv_type, type_v=kv_type, **settings)


def kill(program: subprocess.Popen[bytes]) -> None:
    program.send_signal(signal.SIGKILL)
    program.communicate(timeout=PATIENCE)
    assert program.returncode == -signal.SIGKILL


@real
@pytest.mark.parametrize(
    "sampling",
    [["--seed", "3", "--temp", "1"], ENDLESS, ["--temp", "0", "--kv-type", "q8_0"]],
    ids=["drawn", "looping", "quantised"],
)
def test_killed_story_goes_on_at_the_exact_token(
    tiny: Path, tmp_path: Path, rng: np.random.Generator, sampling: list[str]
) -> None:
    """kill -9 again and again at random moments: nothing before the last checkpoint is lost."""
    story, records = tmp_path / "story.txt", tmp_path / "story.txt.jsonl"
    begin = ["-p", "Once upon a time", *small(tiny), *sampling]
    llm = open_like(tiny, sampling)
    written = 0
    for _ in range(3):
        arguments = ["--resume"] if written else begin
        program = start_program("generate", *arguments, "-o", story, "--checkpoint", "40")
        wanted = count_lines(records) + int(rng.integers(1, 9))
        wait_until(lambda wanted=wanted: count_lines(records) >= wanted)  # type: ignore[misc]
        with suppress(subprocess.TimeoutExpired):
            program.wait(rng.uniform(0, 0.03))  # between two checkpoints, or amid one
        kill(program)
        saved = Story.load(tmp_path / "story.txt.h2o", llm)
        assert story.read_bytes().startswith(saved.text().encode())
        *_, last = [json.loads(line) for line in records.read_text().splitlines()]
        assert written < last["tokens"] <= saved.written
        written = saved.written
    more = 100
    output = run_program("generate", "--resume", "-o", story, "-n", str(more))
    assert output.code == 0, output.notes
    whole = run_program("generate", *begin, "-o", "whole.txt", "-n", str(written + more))
    assert whole.code == 0, whole.notes
    assert story.read_bytes() == (tmp_path / "whole.txt").read_bytes()
    assert [name for name in names(tmp_path) if name.endswith(".old")] == []


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


@real
def test_ctrl_c_leaves_the_text_and_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    story = tmp_path / "story.txt"
    program = start_program(
        "generate", "-m", tiny, "-p", "Once upon", "-o", story, "--no-loop-guard", *ENDLESS
    )
    wait_until(lambda: story.exists() and story.stat().st_size > 100)
    program.send_signal(signal.SIGINT)
    text, notes = program.communicate(timeout=PATIENCE)
    assert (program.returncode, text) == (130, b"")
    written = story.read_text()
    assert written.startswith("Once upon")
    assert len(written) > 100
    lines = notes.decode().splitlines()
    assert lines[0] == f"the text is in {story}"
    assert " · stopped by Ctrl-C · " in lines[1]
    assert len(lines) == 2
    assert run_program("generate", "--resume", "-o", story, "-n", "10").code == 0
    assert story.read_text().startswith(written)


@real
def test_reader_that_leaves_early(tiny: Path) -> None:
    program = start_program("generate", "-m", tiny, "-p", "Once upon", "--no-loop-guard", *ENDLESS)
    assert program.stdout is not None
    assert program.stderr is not None
    assert program.stdout.read(9) == b"Once upon"
    program.stdout.close()
    assert program.wait(timeout=PATIENCE) == 141
    assert program.stderr.read() == b""
    program.stderr.close()


@real
def test_bars_on_a_terminal_only(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 1500)
    arguments = ["generate", "-m", str(tiny), "-f", "long.txt", "-n", "300", "--no-loop-guard"]
    screen = Screen(*arguments, "-o", "story.txt")
    screen.wait_for("reading the prompt")
    screen.wait_for(r"[\d,]+ of [\d,]+ tokens")
    screen.wait_for(r"writing.*[\d,]+ of 300 tokens.* tokens/s.* \d:\d\d:\d\d left")
    screen.wait_for("the number of tokens asked for is reached")
    assert screen.end() == 0
    piped = run_program(*arguments)
    assert piped.code == 0
    assert piped.notes.count("\n") == 1
    assert "\x1b" not in piped.notes + piped.text
