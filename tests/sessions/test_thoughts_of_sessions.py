"""Whether models think in conversations and stories, and for how long."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from chat_templates import GEMMA4, GPT_OSS, QWEN3, QWEN25
from conversations import said, text_of
from pyh2o import Conversation, Llama, Sampling, Story, Thinking
from pyh2o.errors import SettingsError
from pyh2o.writing.chat_prompt import prompt_for_message
from spoken import let_say, write_speaker
from tiny_llama import tiny_llama

CACHE: dict[str, Any] = {"n_ctx": 1024, "hh": 200, "recent": 200, "slack": 64}
GREEDY = Sampling(temperature=0.0, repeat_penalty=1.0)
NO_THOUGHTS = "<think>\n\n</think>\n\n"
LONG = "<think>\n" + "a" * 60


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Llama]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: tiny_llama(write_speaker(folder / f"{name}.gguf", name), **CACHE)
        for name in (QWEN3, QWEN25, GPT_OSS, GEMMA4)
    }


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> deque[str]:
    return let_say(monkeypatch)


def shown(conversation: Conversation, start: int = 0) -> str:
    llm = Llama.of(conversation.llm)
    return llm.detokenize(text_of(conversation)[start:], special=True).decode()


def n_thought(conversation: Conversation) -> int:
    return conversation.turns[-1].reasoning.count("a")


def test_thoughts_of_an_answer_have_a_budget(
    models: dict[str, Llama], answers: deque[str], tmp_path: Path
) -> None:
    """Also of one that goes on, and of one that was saved."""
    talk = Conversation(models[QWEN3], sampling=GREEDY, thinking=Thinking(budget=9))
    answers.extend([LONG] * 2)
    said(talk.say("Hi", max_tokens=80))
    assert 5 <= n_thought(talk) <= 18
    assert talk.turns[0].answer.count("a") > 30
    talk.save(tmp_path / "talk")
    other = Conversation.load(tmp_path / "talk", models[QWEN3])
    assert other.thinking == Thinking(budget=9)
    said(other.say("And?", max_tokens=3))
    assert other.turns[-1].finish == "length"
    answers.append("a" * 60)
    said(other.resume(max_tokens=40))
    assert n_thought(other) <= 18
    other.set_thinking(Thinking(budget=-1))
    assert len(other.unread) <= 1
    answers.append(LONG)
    said(other.say("And?", max_tokens=80))
    assert n_thought(other) == 60


def test_models_may_be_told_not_to_think(
    models: dict[str, Llama], answers: deque[str], tmp_path: Path
) -> None:
    talk = Conversation(models[QWEN3], sampling=GREEDY, thinking=Thinking(enabled=False))
    answers.extend(["Yes."] * 2)
    said(talk.say("Hi"))
    assert shown(talk).endswith(f"{NO_THOUGHTS}Yes.")
    talk.save(tmp_path / "talk")
    talk = Conversation.load(tmp_path / "talk", models[QWEN3])
    n_before = len(text_of(talk))
    talk.set_thinking(Thinking())
    assert len(talk.unread) <= 1
    said(talk.say("Hi"))
    assert NO_THOUGHTS not in shown(talk, n_before)
    talk.set_thinking(Thinking(budget=0))
    answers.append("Yes.")
    said(talk.say("Hi"))
    assert shown(talk).endswith(f"{NO_THOUGHTS}Yes.")


def test_all_is_read_again_where_the_system_prompt_has_it(
    models: dict[str, Llama], answers: deque[str]
) -> None:
    talk = Conversation(models[GEMMA4], sampling=GREEDY)
    answers.append("Yes.")
    said(talk.say("Hi", max_tokens=9))
    assert "<|think|>" in shown(talk)
    talk.set_thinking(Thinking(enabled=False))
    assert "<|think|>" not in shown(talk)
    assert talk.unread == text_of(talk)


def test_what_the_template_lacks_is_refused(models: dict[str, Llama]) -> None:
    thinking, message = Thinking(enabled=False), "enable_thinking: .* cannot disable reasoning"
    with pytest.raises(SettingsError, match=message):
        Conversation(models[GPT_OSS], thinking=thinking)
    talk = Conversation(models[GPT_OSS])
    with pytest.raises(SettingsError, match=message):
        talk.set_thinking(thinking)
    assert talk.thinking == Thinking()


def test_a_model_without_thoughts_keeps_any_budget(
    models: dict[str, Llama], answers: deque[str]
) -> None:
    answers.append("Yes.")
    talk = Conversation(models[QWEN25], sampling=GREEDY, thinking=Thinking(budget=9))
    assert said(talk.say("Hi")) == "Yes."


def test_formats_of_llama_cpp_have_no_thoughts(tmp_path: Path) -> None:
    llm = tiny_llama(write_speaker(tmp_path / "a.gguf", QWEN3), chat_format="chatml", **CACHE)
    with pytest.raises(SettingsError, match=r"^reasoning_budget: .* no chat_format$"):
        Conversation(llm, thinking=Thinking(budget=9))


def test_another_model_may_have_none(
    models: dict[str, Llama], answers: deque[str], tmp_path: Path
) -> None:
    talk = Conversation(models[QWEN3], sampling=GREEDY, thinking=Thinking(budget=9))
    answers.append("Yes.")
    said(talk.say("Hi"))
    talk.save(tmp_path / "talk")
    other = Conversation.load(tmp_path / "talk", models[QWEN25])
    assert (other.turns[0].answer, other.thinking) == ("Yes.", Thinking())


def test_a_story_that_is_asked_for_thinks_no_longer(
    models: dict[str, Llama], answers: deque[str], tmp_path: Path
) -> None:
    """Also where it is left amid its thoughts."""
    llm, thinking = models[QWEN3], Thinking(budget=9)
    tokens, ends = prompt_for_message(llm.text.model, "Write.", thinking)
    story = Story(llm, tokens, sampling=GREEDY, until=ends, thinking=thinking, loop_guard=False)
    answers.extend([LONG, "a" * 30])
    said(story.write(12))
    story.save(tmp_path / "story")
    story = Story.load(tmp_path / "story", llm)
    said(story.write(30))
    thoughts, mark, told = story.text().partition("</think>")
    assert mark
    assert 5 <= thoughts.count("a") <= 18
    assert told.count("a") > 15
