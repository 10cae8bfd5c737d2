"""Passages that are pinned: found by their words, and kept through all that comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from conversations import EVICTING, FULL, SHORT, SYSTEM, held_by_all, said, text_of
from pyh2o import Conversation, Llama, Story
from pyh2o.errors import PyH2OError, SettingsError
from pyh2o.sessions.passages import pin_sentences, pinned_passages, unpin_passages
from tiny_llama import tiny_llama

PINNING = {**EVICTING, "hh": 120}
MESSAGE = "Hello there! The code is 4711. Do not\ntell it. Bye."


@pytest.fixture
def llm(path: Path) -> Llama:
    return tiny_llama(path, **PINNING)


def texts(conversation: Conversation) -> list[str]:
    return [passage.text for passage in pinned_passages(conversation)]


def said_at(conversation: Conversation, start: int, end: int) -> str:
    return conversation.llm.model.detokenize(text_of(conversation)[start:end]).decode()


@pytest.mark.parametrize(
    ("words", "passage"),
    [
        ("code", "The code is 4711."),
        ("CODE  is", "The code is 4711."),
        ("4711. Do", "The code is 4711. Do not"),
        ("not\n tell", "Do not\ntell it."),
        ("bye", "Bye."),
        ("Bye.", "Bye."),
        ("Hello", "Hello there!"),
    ],
)
def test_the_sentences_with_the_words_are_pinned(llm: Llama, words: str, passage: str) -> None:
    conversation = Conversation(llm)
    said(conversation.say(f"{MESSAGE} Over.", max_tokens=SHORT))
    said(conversation.say(MESSAGE, max_tokens=SHORT))
    said(conversation.say("user said nothing", max_tokens=SHORT))
    pin_sentences(conversation, words)
    (pinned,) = pinned_passages(conversation)
    assert pinned.text == passage
    assert said_at(conversation, pinned.start, pinned.end) == passage
    turn = conversation.turns[1]  # the newest that has them
    assert turn.start < pinned.start < pinned.end <= turn.answer_start


def test_what_is_pinned_stays(path: Path, tmp_path: Path) -> None:
    """Also in a conversation from a file, and in one that is read again."""
    plain, conversation = (Conversation(tiny_llama(path, **PINNING)) for _ in range(2))
    for each in (plain, conversation):
        said(each.say(MESSAGE, max_tokens=SHORT))
    pin_sentences(conversation, "code")
    span = set(range(pinned_passages(conversation)[0].start, pinned_passages(conversation)[0].end))
    for each in (plain, conversation):
        said(each.say("go on " * 10, max_tokens=200))
    assert span <= held_by_all(conversation.llm)
    assert not span <= held_by_all(plain.llm)
    assert pinned_passages(conversation)[0].held == 1.0

    conversation.save(tmp_path / "chat")
    loaded = Conversation.load(tmp_path / "chat", tiny_llama(path, **PINNING))
    assert pinned_passages(loaded) == pinned_passages(conversation)
    said(loaded.say("go on " * 10, max_tokens=200))
    assert span <= held_by_all(loaded.llm)

    loaded.set_system(SYSTEM)
    (pinned,) = pinned_passages(loaded)
    assert said_at(loaded, pinned.start, pinned.end) == "The code is 4711."
    said(loaded.say("go on " * 10, max_tokens=200))
    assert set(range(pinned.start, pinned.end)) <= held_by_all(loaded.llm)

    unpin_passages(loaded)
    said(loaded.say("go on " * 10, max_tokens=200))
    assert not set(range(pinned.start, pinned.end)) <= held_by_all(loaded.llm)


def test_what_left_before_is_told(path: Path) -> None:
    conversation = Conversation(tiny_llama(path, **PINNING))
    said(conversation.say(MESSAGE, max_tokens=SHORT))
    said(conversation.say("go on " * 10, max_tokens=200))
    pin_sentences(conversation, "code")
    assert pinned_passages(conversation)[0].held < 1.0
    conversation.set_system(SYSTEM)
    assert pinned_passages(conversation)[0].held == 1.0  # it is still to be read
    said(conversation.say("go on", max_tokens=SHORT))
    assert pinned_passages(conversation)[0].held == 1.0


def test_what_left_before_comes_back_from_the_archive(path: Path, tmp_path: Path) -> None:
    conversation = Conversation(tiny_llama(path, **PINNING | {"recall": 8}))
    said(conversation.say(MESSAGE, max_tokens=SHORT))
    said(conversation.say("go on " * 10, max_tokens=300))
    pin_sentences(conversation, "code")
    (pinned,) = pinned_passages(conversation)
    assert pinned.held == 1.0
    said(conversation.say("go on " * 10, max_tokens=200))
    assert set(range(pinned.start, pinned.end)) <= held_by_all(conversation.llm)
    conversation.save(tmp_path / "chat")
    loaded = Conversation.load(tmp_path / "chat", tiny_llama(path, **PINNING | {"recall": 8}))
    assert pinned_passages(loaded)[0].held == 1.0


def test_pins_go_with_what_they_are_in(llm: Llama) -> None:
    conversation = Conversation(llm)
    said(conversation.say(MESSAGE, max_tokens=SHORT))
    said(conversation.say("The key is blue. What else?", max_tokens=20))
    answer = conversation.turns[1].answer
    pin_sentences(conversation, "code is")
    pin_sentences(conversation, "key is")
    pin_sentences(conversation, answer)
    assert texts(conversation)[:2] == ["The code is 4711.", "The key is blue."]
    assert len(texts(conversation)) == 3
    assert pinned_passages(conversation)[2].end <= conversation.turns[1].end
    said(conversation.go_on(max_tokens=5))
    assert len(texts(conversation)) == 3
    said(conversation.regenerate(max_tokens=SHORT))
    assert texts(conversation) == ["The code is 4711.", "The key is blue."]
    conversation.undo()
    assert texts(conversation) == ["The code is 4711."]
    said(conversation.say("The key is red.", max_tokens=SHORT))
    pin_sentences(conversation, "key is")
    pin_sentences(conversation, "key is red")  # again
    assert texts(conversation) == ["The code is 4711.", "The key is red."]
    said(conversation.edit("other", max_tokens=SHORT))
    assert texts(conversation) == ["The code is 4711."]
    unpin_passages(conversation, "CODE")
    assert texts(conversation) == []


def test_pins_of_another_text_stay(llm: Llama) -> None:
    first = Conversation(llm)
    said(first.say(MESSAGE, max_tokens=SHORT))
    second = Conversation(llm)
    said(second.say(MESSAGE, max_tokens=SHORT))
    pin_sentences(second, "code")
    first.pin(0, 60)
    assert second.pins != first.pins
    said(second.say("go on " * 10, max_tokens=200))
    assert set(range(*second.pins[0])) <= held_by_all(llm)
    story = Story(llm, "Once upon a time")
    conversation = Conversation(llm)
    said(conversation.say(MESSAGE, max_tokens=SHORT))
    pin_sentences(conversation, "code")
    story.pin(0, 3)
    assert story.pins == ((0, 3),)
    said(conversation.say("go on " * 10, max_tokens=200))
    assert set(range(*conversation.pins[0])) <= held_by_all(llm)


def test_what_cannot_be_pinned(llm: Llama, path: Path) -> None:
    conversation = Conversation(llm)
    for words in ("code", "user", "im_end", "", " "):
        with pytest.raises(PyH2OError, match="words"):
            pin_sentences(conversation, words)
    with pytest.raises(PyH2OError, match="nothing is pinned"):
        unpin_passages(conversation)
    said(conversation.say(MESSAGE, max_tokens=SHORT))
    pin_sentences(conversation, "code")
    said(conversation.say("word " * 60, max_tokens=SHORT))
    with pytest.raises(SettingsError, match=r"do not fit the 120 rows .*--hh"):
        pin_sentences(conversation, "word")
    for words in ("user", "im_end"):  # what the template writes
        with pytest.raises(PyH2OError, match="is not in the conversation"):
            pin_sentences(conversation, words)
    with pytest.raises(PyH2OError, match="no pinned passage contains these words"):
        unpin_passages(conversation, "key")
    assert texts(conversation) == ["The code is 4711."]
    said(conversation.say("go on " * 10, max_tokens=200))
    assert pinned_passages(conversation)[0].held == 1.0
    full = Conversation(tiny_llama(path, **FULL))
    said(full.say(MESSAGE, max_tokens=SHORT))
    with pytest.raises(PyH2OError, match="a full cache evicts nothing"):
        pin_sentences(full, "code")
