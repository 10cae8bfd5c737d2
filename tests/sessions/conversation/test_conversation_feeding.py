"""What is fed: only what is new, and exactly what was said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_turns import ChatTurns
from conversations import EVICTING, ROOMY, SHORT, SYSTEM, check_positions, in_cache, said, text_of
from pyh2o import Conversation, Llama
from pyh2o.core.native_chat import NativeTemplate
from pyh2o.sessions.turns import answer_seed
from pyh2o.writing.sampling import Sampling
from pyh2o.writing.writer import Writer
from tiny_chat import CHATML, COUNTING, LLAMA_2, MISTRAL, RESPONSE, write_chat_gguf
from tiny_llama import tiny_llama


@pytest.mark.parametrize("system", [None, SYSTEM])
@pytest.mark.parametrize("template", [CHATML, LLAMA_2])
def test_text_is_what_was_generated_and_what_the_template_writes(
    tmp_path: Path, drawn: list[list[int]], template: str, system: str | None
) -> None:
    path = write_chat_gguf(tmp_path / "tiny.gguf", template, n_layer=1)
    llm = tiny_llama(path, **EVICTING)
    conversation = Conversation(llm, system=system)
    messages = ["hello", "and <|im_end|> you?", "", "bye " * 30]
    for message in messages:
        said(conversation.say(message, max_tokens=SHORT))
    parts = ChatTurns(llm.text.model, system)
    expected = parts.first_turn(messages[0]) + drawn[0]
    for message, tokens in zip(messages[1:], drawn[1:], strict=True):
        expected += parts.next_turn(message) + tokens
    assert text_of(conversation) == expected
    # all but the token that was drawn last
    assert in_cache(llm) == expected[:-1]
    for turn, tokens in zip(conversation.turns, drawn, strict=True):
        assert expected[turn.answer_start : turn.end] == tokens
    check_positions(conversation)
    assert llm.kv.compactions > 0


def test_marks_at_the_end_of_an_answer_are_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_chat_gguf(tmp_path / "tiny.gguf", RESPONSE, n_layer=1)
    llm = tiny_llama(path, **EVICTING)
    parts = ChatTurns(llm.text.model, None)
    answer = [*parts.said("fine"), parts.next_turn("x")[0]]

    def write(_writer: Writer, tokens: list[int]) -> Iterator[int]:
        for token in answer:
            llm.eval(tokens)
            tokens = [token]
            yield token

    monkeypatch.setattr(Writer, "write", write)
    conversation = Conversation(llm)
    for message in ("one", "two"):
        said(conversation.say(message, max_tokens=len(answer)))
    expected = [*parts.first_turn("one"), *answer, *parts.next_turn("two")[1:], *answer]
    assert text_of(conversation) == expected
    # the same where all is read again
    conversation.set_system("be brief")
    first = ChatTurns(llm.text.model, "be brief").first_turn("one")
    assert text_of(conversation)[len(first) :] == expected[len(parts.first_turn("one")) :]


@pytest.mark.usefixtures("with_ends")
def test_first_answer_is_that_of_llama_cpp(path: Path) -> None:
    llm = tiny_llama(path, **EVICTING)
    sampling = Sampling(temperature=0.9, seed=7)
    answer = said(Conversation(llm, system=SYSTEM, sampling=sampling).say("hello", max_tokens=40))
    other = tiny_llama(path, **EVICTING).create_chat_completion(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}],
        temperature=0.9,
        repeat_penalty=1.1,
        max_tokens=40,
        seed=answer_seed(7, 0, 0, 0),
    )
    assert answer == other["choices"][0]["message"]["content"] != ""


def test_a_long_dialogue_evaluates_every_token_once(
    llm: Llama, drawn: list[list[int]], evaluated: list[int]
) -> None:
    conversation = Conversation(llm)
    parts = ChatTurns(llm.text.model, None)
    n_new = 0
    for i in range(60):
        message = f"this is message {i}"
        said(conversation.say(message, max_tokens=SHORT))
        n_new += len((parts.next_turn if i else parts.first_turn)(message)) + len(drawn[-1])
    assert len(conversation.turns) == 60
    assert n_new > 4 * llm.kv.capacity
    # the token drawn last waits for the next turn
    assert sum(evaluated) == llm.n_tokens == n_new - 1
    check_positions(conversation)


def test_the_work_for_a_turn_does_not_grow(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llama(path, **EVICTING)
    tokenized: list[int] = []
    tokenize = llm.text.model.tokenize

    def counting(text: bytes, *settings: Any, **others: Any) -> list[int]:
        tokenized.append(len(text))
        return tokenize(text, *settings, **others)

    monkeypatch.setattr(llm.text.model, "tokenize", counting)
    rendered: list[int] = []
    apply = NativeTemplate.apply

    def counting_messages(self: Any, messages: list[Any], **request: Any) -> Any:
        rendered.append(len(messages))
        return apply(self, messages, **request)

    monkeypatch.setattr(NativeTemplate, "apply", counting_messages)
    conversation = Conversation(llm)
    work: list[tuple[int, int]] = []
    for _ in range(30):
        tokenized.clear()
        rendered.clear()
        said(conversation.say("what was said before does not matter", max_tokens=SHORT))
        work.append((sum(tokenized), sum(rendered)))
    assert len(set(work[10:])) == 1
    assert len({n_bytes for n_bytes, _ in work[1:]}) == 1


@pytest.mark.parametrize(
    ("template", "system"),
    [
        (COUNTING, None),
        (CHATML.replace("<|im_start|>{{", "{{ loop.revindex }}<|im_start|>{{"), "Be brief."),
        (CHATML.replace("assistant\n{% endif", "bot\n{% endif"), None),
        (
            CHATML.replace(
                "message.content",
                "(loop.index if message.role == 'user' else '') ~ message.content",
            ),
            None,
        ),
        (MISTRAL, "Be brief."),
    ],
)
def test_a_template_that_changes_earlier_turns_is_followed(
    tmp_path: Path, template: str, system: str | None
) -> None:
    """The text is read again from the change on; answers keep their tokens."""
    llm = tiny_llama(write_chat_gguf(tmp_path / "tiny.gguf", template, n_layer=1), **ROOMY)
    conversation = Conversation(llm, system=system)
    for message in ("one", "two", "three", "four", "five", "six", "seven", "eight"):
        said(conversation.say(message, max_tokens=SHORT))
        check_positions(conversation, opening=False)
        *before, last = conversation.turns
        messages = [] if system is None else [{"role": "system", "content": system}]
        for turn in before:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": f"answer-{turn.start}"})
        messages.append({"role": "user", "content": last.user})
        whole = llm.text.model.chat.template(has_tools=False).apply(messages).prompt
        text = text_of(conversation)
        shown = ""
        for turn in conversation.turns:
            start = turn.start if shown else 0
            shown += llm.detokenize(text[start : turn.answer_start], special=True).decode()
            shown += f"answer-{turn.start}"
        shown = shown.removesuffix(f"answer-{last.start}")
        assert shown.replace(" ", "") == whole.replace(" ", "")
        assert in_cache(llm) == text[: llm.n_tokens]
    undone = conversation.turns[-1]
    conversation.undo()
    said(conversation.say("other", max_tokens=SHORT))
    said(conversation.edit(undone.user, max_tokens=SHORT))
    assert conversation.turns[-1].start == undone.start
