"""`pyh2o generate`: instructions, memories, and saves of koboldcpp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chat_templates import QWEN3
from chat_turns import ChatTurns
from cli_fakes import run
from fake_story import STORY, TALE, FakeModel, fake_model, resume
from pyh2o.sessions.chats import open_chats
from pyh2o.sessions.messages import unpacked
from pyh2o.writing.thinking import Thinking
from spoken import write_speaker
from tiny_llama import tiny_llama

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


def test_the_answer_to_an_instruction_is_the_story(fake: FakeModel) -> None:
    fake.script = [TALE]
    assert run("generate", "-p", "Write of snow.", "--instruct").text == f"{TALE}\n"
    whole = ChatTurns(fake.llm.text.model, None).first_turn("Write of snow.")
    assert fake.llm.input_ids[: len(whole)].tolist() == whole


def test_a_story_from_an_instruction_is_resumed(fake: FakeModel) -> None:
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
    whole = ChatTurns(fake.llm.text.model, None).first_turn("Write of snow.")
    with open_chats() as database:
        messages = database.read(database.texts()[0].id).messages
    tokens = unpacked(b"".join(message.tokens for message in messages))
    assert tokens[: len(whole)] == whole


def test_reasoning_options_require_an_instruction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_speaker(tmp_path / "tiny.gguf", QWEN3)
    fake = fake_model(tiny_llama(path, n_ctx=1000, hh=100, recent=100), monkeypatch)
    fake.script = [TALE]
    quiet = ("--no-thinking", "--reasoning-budget", "9")
    assert run(*TASK, *quiet, "-n", "29").code == 0
    thinking = Thinking(enabled=False, budget=9)
    whole = ChatTurns(fake.llm.text.model, None, thinking=thinking).first_turn("Write of snow.")
    assert fake.llm.input_ids[: len(whole)].tolist() == whole
    assert resume("-n", "50", "-p", "Write of snow.", "--instruct").code == 0
    for output, why in (
        (resume(*quiet), "cannot be changed with --resume"),
        (run("generate", "-p", "I", *quiet), "and --no-thinking require --instruct"),
    ):
        assert (output.code, output.text) == (2, "")
        assert why in output.notes


def test_a_memory_is_not_in_the_text(fake: FakeModel) -> None:
    Path("memory.txt").write_text("It snows.\n")
    fake.script = [TALE]
    memory = ("--memory", "memory.txt")
    assert run("generate", "-p", "I: ", *memory, "-o", "story.txt", "-n", "9").code == 0
    read = fake.llm.detokenize(fake.llm.input_ids[:20].tolist())
    assert read.startswith(b"It snows.\nI: ")
    refused = resume(*memory)
    assert "--memory cannot be changed" in refused.notes
    assert resume("-n", "0").code == 0
    assert STORY.read_text() == f"I: {TALE}\n"


def test_a_save_of_koboldcpp_is_continued(fake: FakeModel) -> None:
    Path("save.json").write_text(json.dumps(SAVE))
    fake.script = [" as stone."]
    output = run("generate", "-f", "save.json")
    assert output.text == "It was dark and cold as stone.\n"
    assert output.notes.startswith("ignored in koboldcpp's save: author's note, world info\n")
    assert fake.llm.detokenize(fake.llm.input_ids[:40].tolist()).startswith(
        b"A tale of woe.\nIt was dark"
    )


@pytest.mark.parametrize("more", [("--echo",), ("--memory", "x")])
def test_options_that_contradict_an_instruction_are_refused(
    fake: FakeModel, more: tuple[str, ...]
) -> None:
    assert "--instruct cannot be combined" in run(*TASK, *more).notes
