"""`pyh2o generate`: stories that are told what to write, have a memory, or come from koboldcpp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_fakes import run
from fake_story import CHECKPOINT, STORY, TALE, FakeModel, resume
from pyh2o.sessions.session_file import read_session
from pyh2o.writing.chat_template import ChatTemplate

pytestmark = pytest.mark.usefixtures("surroundings")

TASK = ("generate", "-p", "Write of snow.", "--instruct", "-o", "story.txt")
SAVE = {
    "gamestarted": True,
    "prompt": "It was ",
    "actions": ["dark", " and cold"],
    "memory": "A tale of woe.\n",
    "authorsnote": "sad",
    "worldinfo": [{"key": "a", "content": "b"}],
}


def test_the_answer_to_a_prompt_is_the_story(fake: FakeModel) -> None:
    fake.script = [TALE]
    assert run("generate", "-p", "Write of snow.", "--instruct").text == f"{TALE}\n"
    whole = ChatTemplate(fake.llm.text.model, None).first_turn("Write of snow.")
    assert fake.llm.input_ids[: len(whole)].tolist() == whole


def test_such_a_story_goes_on(fake: FakeModel) -> None:
    """Also after an edit, and with the prompt typed again."""
    fake.script = [TALE]
    run(*TASK, "-n", "29")
    assert TALE.startswith(STORY.read_text().removesuffix("\n"))
    assert resume("-n", "50", "-p", "Write of snow.", "--instruct").code == 0
    assert resume("-n", "0").code == 0
    assert STORY.read_text() == f"{TALE}\n"
    other = resume("-n", "0", "-p", "Write of snow.")
    assert "has another prompt" in other.notes
    STORY.write_text("All new, ")
    assert resume("-n", "60").code == 0
    assert STORY.read_text().startswith("All new, ")
    whole = ChatTemplate(fake.llm.text.model, None).first_turn("Write of snow.")
    assert read_session(CHECKPOINT, "story").tokens[: len(whole)] == whole


def test_a_memory_is_not_in_the_text(fake: FakeModel) -> None:
    Path("memory.txt").write_text("It snows.\n")
    fake.script = [TALE]
    memory = ("--memory", "memory.txt")
    assert run("generate", "-p", "I: ", *memory, "-o", "story.txt", "-n", "9").code == 0
    read = fake.llm.detokenize(fake.llm.input_ids[:20].tolist())
    assert read.startswith(b"It snows.\nI: ")
    refused = resume(*memory)
    assert "a story keeps its memory" in refused.notes
    assert resume("-n", "0").code == 0
    assert STORY.read_text() == f"I: {TALE}\n"


def test_a_save_of_koboldcpp_goes_on(fake: FakeModel) -> None:
    Path("save.json").write_text(json.dumps(SAVE))
    fake.script = [" as stone."]
    output = run("generate", "-f", "save.json")
    assert output.text == "It was dark and cold as stone.\n"
    assert output.notes.startswith("left out of koboldcpp's save: author's note, world info\n")
    assert fake.llm.detokenize(fake.llm.input_ids[:40].tolist()).startswith(
        b"A tale of woe.\nIt was dark"
    )


@pytest.mark.parametrize("more", [("--echo",), ("--memory", "x")])
def test_what_goes_with_no_task(fake: FakeModel, more: tuple[str, ...]) -> None:
    assert "--instruct has neither" in run(*TASK, *more).notes
