"""`pyh2o generate --resume`: checkpoints, stories that were cut off, and what a story keeps."""

from __future__ import annotations

import fcntl
import json
import shlex
from pathlib import Path

import pytest

from cli_fakes import Output, press_ctrl_c, run
from fake_story import (
    CHECKPOINT,
    RECORDS,
    STORY,
    TALE,
    WHOLE,
    FakeModel,
    begin,
    names,
    now_there,
    report,
    resume,
    speed_of,
    wrote,
)
from pyh2o.errors import SessionError
from pyh2o.sessions.database import Database
from pyh2o.sessions.story import Story

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.mark.parametrize("length", [1, 5, 27, 28, 29, 30, 50])
def test_resumed_story_is_the_uninterrupted_one(fake: FakeModel, length: int) -> None:
    """Also where a run ends amid a character."""
    fake.script = [TALE]
    output = begin("-n", str(length))
    assert output.code == 0
    first = STORY.read_text()
    assert first.endswith("\n")
    assert f"I: {TALE}".startswith(first.removesuffix("\n"))
    output = resume("-n", "0")
    assert STORY.read_text() == f"I: {TALE}\n"
    rest = len(TALE.encode()) - length
    assert output.notes == f"the text is in {STORY.absolute()}\n" + report(
        fake, wrote=rest, after=length
    ).replace(speed_of(rest, rest), speed_of(rest, rest + 1))
    assert names() == WHOLE


@pytest.mark.parametrize("damage", ['{"tok', "\0" * 40, "\0" * 40 + "5}\n"])
def test_records_are_lines_of_json(fake: FakeModel, damage: str) -> None:
    fake.script = [TALE]
    begin("-n", "25", "--checkpoint", "10")
    with RECORDS.open("a") as file:
        file.write(damage)  # the power failed
    resume("-n", "45")
    lines = RECORDS.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["tokens"] for record in records] == [1, 10, 20, 25, 30, 40, 45]
    assert [record["finish"] for record in records] == [
        *[None] * 3,
        "length",
        *[None] * 2,
        "length",
    ]
    assert all(record["tokens_per_second"] == 2.0 for record in records[1:])
    n_prompt = fake.n_prompt("I: ")
    assert [record["position"] for record in records[:3]] == [n_prompt, n_prompt + 9, n_prompt + 19]
    assert records[2]["text_bytes"] == len("I: ") + 20
    kv = fake.llm.kv
    assert records[-1]["cells_used"] == kv.used
    assert records[-1]["capacity"] == kv.capacity
    assert records[-1]["kv_bytes"] == kv.bytes_total
    assert records[-1]["resident_bytes"] > 2**20
    assert {"time", "seconds", "loops", "tokens_evicted", "compactions", "rebases"} < {*records[0]}


def test_story_that_the_model_ended_goes_on(fake: FakeModel) -> None:
    fake.script = ["The end."]
    assert "the model ended its text" in begin().notes
    fake.script = ["The end.", " Or not?"]
    output = resume("-n", "13")
    assert STORY.read_text() == "I: The end. Or n\n"
    assert "continued after 8 tokens · wrote 5 tokens" in output.notes


@pytest.mark.parametrize("finish", ["ended", "cut off"])
def test_ctrl_c_before_the_first_token_of_a_resumed_story_leaves_the_text(
    fake: FakeModel, finish: str
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    fake.script = [TALE]
    begin("-n", "10")
    if finish == "cut off":
        cut_off(fake, after=10)
    before = STORY.read_text()
    fake.script = [TALE[:10], press_ctrl_c, interrupt]
    assert resume("-n", "0").code == 130
    assert STORY.read_text() == before
    fake.script = [TALE]
    assert resume("-n", "0").code == 0
    assert STORY.read_text() == f"I: {TALE}\n"
    assert names() == WHOLE


def cut_off(fake: FakeModel, *, after: int, tail: str | None = None) -> None:
    """Leave the story as a crash would: a checkpoint after so many tokens, and text behind it."""
    saved: dict[str, bytes] = {}
    text = TALE.encode()
    for name in names():
        Path(name).unlink()
    fake.script = [text[:after].decode(), lambda: saved.update(now_there()), text[after:].decode()]
    begin("--checkpoint", str(after))
    for name, data in saved.items():
        Path(name).write_bytes(data)
    rest = text[after : after + 12].decode() if tail is None else tail
    STORY.write_text(f"I: {text[:after].decode()}{rest}")


def test_text_after_the_checkpoint_comes_again(fake: FakeModel) -> None:
    cut_off(fake, after=10)
    before = STORY.read_text()
    seen: list[str] = []
    fake.script = [TALE[:15], lambda: seen.append(STORY.read_text()), TALE[15:]]
    assert resume().code == 0
    assert seen == [before]  # what is there already stays while it comes again
    assert STORY.read_text() == f"I: {TALE}\n"
    assert names() == WHOLE


@pytest.mark.parametrize(
    ("tail", "kept"),
    [("n a tima", "a"), ("n a time I wrote this", "I wrote this"), ("!", "!"), ("\n", None)],
)
def test_text_after_the_checkpoint_that_does_not_come_again_is_kept(
    fake: FakeModel, tail: str, kept: str | None
) -> None:
    cut_off(fake, after=8, tail=tail)
    fake.script = [TALE]
    output = resume()
    assert (output.code, STORY.read_text()) == (0, f"I: {TALE}\n")
    asides = list(Path().glob("story.txt.*.old"))
    assert [aside.read_text() for aside in asides] == ([] if kept is None else [kept])
    for aside in asides:
        assert output.notes.startswith(
            "text of story.txt after the checkpoint that was not generated again is saved as "
            f"{aside.absolute()}\nthe text is in "
        )


def test_text_after_the_checkpoint_is_kept_if_the_story_ends_before_it(fake: FakeModel) -> None:
    cut_off(fake, after=8)
    fake.script = [TALE]
    assert resume("-n", "12").code == 0
    assert STORY.read_text() == f"I: {TALE[:12]}\n"
    [aside] = Path().glob("story.txt.*.old")
    assert aside.read_text() == TALE[12:20]


# -------------------------------------------------------------------------------------------------
# What was asked for is remembered
# -------------------------------------------------------------------------------------------------


def test_length_means_the_whole_story_and_is_remembered(fake: FakeModel) -> None:
    fake.script = [TALE[:10], press_ctrl_c, TALE[10:]]
    assert begin("-n", "20", "--checkpoint", "4").code == 130
    fake.script = [TALE]
    output = resume()
    assert (output.code, wrote(output)) == (0, 9)
    assert STORY.read_text() == f"I: {TALE[:20]}\n"
    records = RECORDS.read_text().splitlines()
    assert [json.loads(line)["tokens"] for line in records] == [1, 4, 8, 11, 12, 16, 20]
    # a story that has its length is left alone
    there = now_there()
    assert resume() == Output(
        0,
        "",
        "the story has 20 tokens, and --max-tokens is 20: increase it to continue, or give 0 for "
        "no limit\n",
    )
    assert now_there() == there
    assert wrote(resume("-n", "22", "--checkpoint", "1")) == 2
    assert wrote(resume("-n", "0")) == len(TALE.encode()) - 22


def test_a_checkpoint_without_its_length_is_damaged(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "20")
    with Database("story.txt.h2o", single=True) as database:
        (info,) = database.texts()
        settings = info.settings | {"notes": {"max_tokens": "many"}}
        database.write(info.id, database.read(info.id).messages, settings=settings)
    damage = "its max_tokens is 'many'"
    assert resume() == Output(
        1, "", f"error: the checkpoint is damaged ({damage}): use another copy of it\n"
    )


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_says_how_to_go_on(fake: FakeModel, presses: int) -> None:
    fake.script = [TALE[:9], *[press_ctrl_c] * presses, TALE[9:]]
    output = run("generate", "-p", "I: ", "-n", "20", "-o", "my story.txt")
    assert output.code == 130
    [line] = [line for line in output.notes.splitlines() if line.startswith("to resume: ")]
    command = line.removeprefix("to resume: pyh2o ")
    assert command == "generate --resume --output 'my story.txt'"
    fake.script = [TALE]
    assert run(*shlex.split(command)).code == 0
    assert Path("my story.txt").read_text() == f"I: {TALE[:20]}\n"


# -------------------------------------------------------------------------------------------------
# What a story keeps
# -------------------------------------------------------------------------------------------------


def test_prompt_may_be_given_again(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "8")
    there = now_there()
    output = resume("-p", "You: ")
    assert output == Output(
        1,
        "",
        f"error: the story in {STORY.absolute()} has another prompt: remove the prompt to "
        "resume it, or give another --output\n",
    )
    assert now_there() == there
    assert resume("-p", "I: ", "-n", "11").code == 0
    assert STORY.read_text() == "I: Once upon a\n"


def test_story_keeps_its_sampling(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "8", "--temp", "0.5", "--top-k", "7")
    sampling = fake.sampling
    output = resume("-n", "16", "--temp", "0.9", "--seed", "8", "--top-k", "7")
    assert fake.sampling == sampling
    own = "the story keeps its own sampling: temperature 0.5, seed 7\n"
    assert output.notes.startswith(own)
    assert " · seed 7 · " in output.notes
    assert "its own sampling" not in resume("-n", "24").notes


def test_until_of_a_resumed_story(fake: FakeModel) -> None:
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


def test_text_held_back_is_in_the_file(fake: FakeModel) -> None:
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


def test_a_failed_checkpoint_ends_the_story_and_keeps_the_text(
    fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Story, path: Path) -> None:
        raise SessionError(f"cannot save the session to {path}: no room")

    fake.script = [TALE]
    begin("-n", "10")
    checkpoint = CHECKPOINT.read_bytes()
    monkeypatch.setattr(Story, "save", fail)
    output = resume("-n", "0")
    assert output.code == 1
    assert output.notes.startswith("error: cannot save the session")
    assert STORY.read_text().startswith(f"I: {TALE[:10]}")
    assert CHECKPOINT.read_bytes() == checkpoint


def test_a_story_that_is_being_written_is_refused(fake: FakeModel) -> None:
    fake.script = [TALE]
    begin("-n", "10")
    there = now_there()
    with STORY.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        output = resume("-n", "0")
    assert output == Output(
        1,
        "",
        "error: another run is writing story.txt: wait until it ends, or give another --output\n",
    )
    assert now_there() == there
