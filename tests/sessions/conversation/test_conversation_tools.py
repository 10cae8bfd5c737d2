"""Answers that call tools: all of an exchange is one turn in one cache, read once."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat_turns import ChatTurns
from conversations import EXACT, check_positions, n_evaluated, next_logits, said, text_of
from forced_text import add_call, force
from pyh2o import Conversation
from pyh2o.core.text import Text
from pyh2o.errors import PyH2OError, SettingsError
from pyh2o.sessions.turns import Step
from pyh2o.writing import answer as answer_module
from pyh2o.writing.finish import FINISH_INTERRUPTED, FINISH_STOP, FINISH_TOOL_CALLS
from pyh2o.writing.sampling import Sampling
from pyh2o.writing.tools import Call, Tool
from pyh2o.writing.writer import Writer
from tiny_chat import CHATML, IPYTHON, TOOLS, write_chat_gguf
from tiny_llama import tiny_llama

NUMBERS = {name: {"type": "integer"} for name in "ab"}
ADD = Tool("add", "Adds.", {"type": "object", "properties": NUMBERS, "required": ["a", "b"]})
ROOMY = {"n_ctx": 4000, "hh": 2000, "recent": 2000, **EXACT}
EVICTING = {"n_ctx": 3000, "hh": 700, "recent": 100, "slack": 50}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_gguf(tmp_path_factory.mktemp("model") / "tools.gguf", TOOLS, n_layer=2)


@pytest.fixture
def texts(drawn: Any, monkeypatch: pytest.MonkeyPatch) -> deque[Any]:
    """What the model will write."""
    return force(monkeypatch)


def begin(path: Path, settings: dict[str, Any] = ROOMY) -> Conversation:
    return Conversation(tiny_llama(path, **settings), tools=[ADD])


def answered(call: Call) -> Call:
    """The call with its result."""
    return replace(call, result=str(sum(json.loads(call.arguments).values())))


def give(conversation: Conversation) -> str:
    """Give the results that it waits for."""
    return said(conversation.give_results([answered(call) for call in conversation.calls]))


def test_call_its_result_and_the_answer_are_one_turn(path: Path, texts: deque[Any]) -> None:
    conversation = begin(path)
    texts.extend([f"Let me see.\n{add_call(1, 2)}", "It is 3.", "Bye."])
    assert said(conversation.say("1 + 2?")).rstrip() == "Let me see."
    call = Call("add", '{"a": 1, "b": 2}')
    assert conversation.calls == (call,)
    assert conversation.turns[-1].finish == FINISH_TOOL_CALLS
    n_before = len(conversation.tokens)
    assert give(conversation) == "It is 3."
    (turn,) = conversation.turns
    assert (turn.answer, turn.finish, turn.calls) == ("It is 3.", FINISH_STOP, ())
    done = replace(call, result="3")
    n_tokens = turn.part_starts[-1] - turn.answer_start
    (step,) = turn.steps
    assert replace(step, text=step.text.rstrip()) == Step("Let me see.", (done,), n_tokens)
    template = ChatTurns(conversation.llm.model, None, [ADD])
    assert conversation.tokens[n_before : turn.part_starts[-1]] == template.after_calls([done])
    assert said(conversation.say("thanks")) == "Bye."
    check_positions(conversation)
    # all of it in one cache, and nothing was read twice
    assert n_evaluated(conversation) == len(text_of(conversation)) == conversation.llm.n_tokens
    whole = tiny_llama(path, **ROOMY)
    whole.eval(text_of(conversation))
    assert next_logits(whole) == pytest.approx(next_logits(conversation.llm), abs=1e-4)


@pytest.mark.parametrize("settings", [ROOMY, EVICTING])
def test_ten_calls_in_one_chat_read_nothing_twice(
    path: Path, texts: deque[Any], settings: dict[str, Any]
) -> None:
    conversation = begin(path, settings)
    for number in range(4):  # 1 + 2 + 3 + 4 rounds of calls
        rounds = [add_call(number, n) for n in range(number + 1)]
        texts.extend([*rounds, f"Done {number}."])
        answer = said(conversation.say(f"count to {number}"))
        while conversation.calls:
            answer = give(conversation)
        assert answer == f"Done {number}."
    assert [len(turn.steps) for turn in conversation.turns] == [1, 2, 3, 4]
    results = [step.calls[0].result for turn in conversation.turns for step in turn.steps]
    assert results == [str(number + n) for number in range(4) for n in range(number + 1)]
    assert n_evaluated(conversation) == len(text_of(conversation))
    check_positions(conversation)
    if settings is EVICTING:
        assert conversation.llm.kv.compactions > 5


def test_result_that_is_longer_than_the_cache_streams_through_it(
    path: Path, texts: deque[Any]
) -> None:
    conversation = begin(path, EVICTING)
    texts.extend([add_call(1, 2), "Long.", "Bye."])
    said(conversation.say("1 + 2?"))
    (call,) = conversation.calls
    long = " ".join(f"word{number}" for number in range(400))
    assert said(conversation.give_results([replace(call, result=long)])) == "Long."
    assert said(conversation.say("bye")) == "Bye."
    assert len(long) > 2 * conversation.llm.kv.used
    assert n_evaluated(conversation) == len(text_of(conversation))
    check_positions(conversation)


def test_several_calls_at_once(path: Path, texts: deque[Any]) -> None:
    conversation = begin(path)
    texts.extend([f"{add_call(1, 2)}\n{add_call(3, 4)}", "3 and 7."])
    said(conversation.say("both?"))
    assert [call.arguments for call in conversation.calls] == [
        '{"a": 1, "b": 2}',
        '{"a": 3, "b": 4}',
    ]
    assert give(conversation) == "3 and 7."
    assert [call.result for call in conversation.turns[-1].steps[0].calls] == ["3", "7"]


def test_call_in_a_block_of_code_is_one(path: Path, texts: deque[Any]) -> None:
    conversation = begin(path)
    texts.extend(['See:\n```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```', "It is 3."])
    assert said(conversation.say("1 + 2?")).rstrip() == "See:"
    assert conversation.calls == (Call("add", '{"a": 1, "b": 2}'),)
    assert give(conversation) == "It is 3."
    texts.append("```json\n{}\n``` is no call")
    assert said(conversation.say("and?")) == "```json\n{}\n``` is no call"
    check_positions(conversation)


def test_call_that_is_begun_keeps_to_its_grammar(
    path: Path, drawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model writes a call once its first words are there."""
    conversation = begin(path)
    model = conversation.llm.model
    begun = model.tokenize(b'<tool_call>\n{"name": "', add_bos=False, special=True)

    class Begun(Writer):
        def __init__(self, llm: Text, sampling: Sampling, **more: Any) -> None:
            left = [*begun]

            def force(_tokens: Any, logits: Any) -> Any:
                if left:
                    wanted, rest = left[0], logits[left.pop(0)]
                    logits[:] = -np.inf
                    logits[wanted] = rest
                return logits

            super().__init__(llm, sampling, **{**more, "logits_processor": force})

    monkeypatch.setattr(answer_module, "Writer", Begun)
    said(conversation.say("1 + 2?", max_tokens=400))
    call, *_ = conversation.calls
    assert call.name == "add"
    assert {type(value) for value in json.loads(call.arguments).values()} == {int}
    assert json.loads(call.arguments).keys() == {"a", "b"}


# -------------------------------------------------------------------------------------------------
# Whole exchanges
# -------------------------------------------------------------------------------------------------


@pytest.fixture
def talked(path: Path, texts: deque[Any]) -> Conversation:
    """A plain turn, and one with a call."""
    conversation = begin(path)
    texts.extend(["Hello.", add_call(1, 2), "It is 3."])
    said(conversation.say("hello"))
    said(conversation.say("1 + 2?"))
    give(conversation)
    return conversation


def test_undo_takes_back_the_whole_exchange(talked: Conversation, texts: deque[Any]) -> None:
    start = talked.turns[-1].start
    undone = talked.undo()
    assert (undone.user, len(undone.steps)) == ("1 + 2?", 1)
    assert [turn.user for turn in talked.turns] == ["hello"]
    assert len(talked.tokens) == start
    texts.append("Fine.")
    assert said(talked.say("how are you?")) == "Fine."
    check_positions(talked)


def test_another_answer_begins_before_the_calls(talked: Conversation, texts: deque[Any]) -> None:
    first = talked.turns[-1]
    texts.extend([add_call(2, 1), "It is 3 again."])
    said(talked.regenerate())
    assert talked.turns[-1].steps == ()
    give(talked)
    again = talked.turns[-1]
    assert (again.answer, again.attempt, len(again.steps)) == ("It is 3 again.", 1, 1)
    assert talked.answers == (first, again)
    talked.choose(0)
    assert talked.turns[-1] == first
    talked.choose(1)
    assert talked.turns[-1] == again
    check_positions(talked)


def test_edited_message_drops_the_calls(talked: Conversation, texts: deque[Any]) -> None:
    texts.append("It is 3, of course.")
    assert said(talked.edit("what is 1 + 2?")) == "It is 3, of course."
    assert [(turn.user, turn.steps) for turn in talked.turns] == [
        ("hello", ()),
        ("what is 1 + 2?", ()),
    ]
    check_positions(talked)


def test_other_results_are_refused(path: Path, texts: deque[Any]) -> None:
    conversation = begin(path)
    with pytest.raises(PyH2OError, match="made other calls"):
        said(conversation.give_results([]))
    texts.append(add_call(1, 2))
    said(conversation.say("1 + 2?"))
    turns = conversation.turns
    for others in ([], [Call("add", "{}", "3")], [answered(conversation.calls[0])] * 2):
        with pytest.raises(PyH2OError, match="made other calls"):
            said(conversation.give_results(others))
    with pytest.raises(PyH2OError, match="the model has called tools: pass their results"):
        said(conversation.go_on())
    assert conversation.turns == turns
    texts.append("Never mind.")
    assert said(conversation.say("never mind")) == "Never mind."
    check_positions(conversation)


def test_results_stay_where_reading_them_is_stopped(
    path: Path, texts: deque[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = begin(path)
    texts.append(add_call(1, 2))
    said(conversation.say("1 + 2?"))
    with monkeypatch.context() as patch:
        force(patch)  # nothing to write: the answer fails as if stopped

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(type(conversation.llm), "eval", stop)
        texts.append("never written")
        with pytest.raises(KeyboardInterrupt):
            give(conversation)
    turn = conversation.turns[-1]
    assert (turn.answer, turn.finish, len(turn.steps)) == ("", FINISH_INTERRUPTED, 1)
    assert conversation.calls == ()
    texts.clear()
    texts.append("It is 3.")
    assert said(conversation.go_on()) == "It is 3."
    assert (conversation.turns[-1].answer, len(conversation.turns[-1].steps)) == ("It is 3.", 1)
    assert n_evaluated(conversation) == len(text_of(conversation))
    check_positions(conversation)


def test_model_may_say_nothing_to_results(path: Path, texts: deque[Any]) -> None:
    conversation = begin(path)
    texts.extend([add_call(1, 2), "", "Yes?"])
    said(conversation.say("1 + 2?"))
    assert give(conversation) == ""
    assert (conversation.turns[-1].answer, conversation.turns[-1].finish) == ("", FINISH_STOP)
    assert said(conversation.say("hello?")) == "Yes?"
    check_positions(conversation)


# -------------------------------------------------------------------------------------------------
# Files, other tools, other models
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [False, True])
def test_saved_calls_go_on(path: Path, tmp_path: Path, texts: deque[Any], waits: bool) -> None:
    first = begin(path, EVICTING)
    texts.extend([add_call(1, 2), "It is 3.", add_call(3, 4)])
    said(first.say("1 + 2?"))
    give(first)
    said(first.say("3 + 4?"))
    rest = ["It is 7.", "Bye."]
    if not waits:
        texts.append(rest.pop(0))
        give(first)
    first.save(tmp_path / "chat")
    second = Conversation.load(tmp_path / "chat", tiny_llama(path, **EVICTING))
    assert (second.turns, second.tools) == (first.turns, first.tools)
    for conversation in (first, second):
        texts.extend(rest)
        if waits:
            give(conversation)
        assert said(conversation.say("bye")) == "Bye."
    assert text_of(second) == text_of(first)
    assert (next_logits(second.llm) == next_logits(first.llm)).all()


def test_another_model_reads_calls_and_results_in_its_own_marks(
    talked: Conversation, tmp_path: Path, texts: deque[Any]
) -> None:
    talked.save(tmp_path / "chat")
    other = tiny_llama(
        write_chat_gguf(tmp_path / "other.gguf", IPYTHON, n_layer=2, seed=5), **ROOMY
    )
    again = Conversation.load(tmp_path / "chat", other)
    (call,) = again.turns[-1].steps[0].calls
    whole = other.detokenize(again.tokens, special=True).decode().replace(" ", "")
    assert '"add","parameters":{"a":1,"b":2}}<|eot_id|>' in whole
    assert 'ipython<|end_header_id|>\n\n"3"<|eot_id|>' in whole
    assert call.result == "3"
    check_positions(again)
    texts.append("Bye.")
    assert said(again.say("bye")) == "Bye."
    toolless = tiny_llama(write_chat_gguf(tmp_path / "none.gguf", CHATML, n_layer=2), **ROOMY)
    with pytest.raises(SettingsError, match="does not support tools"):
        Conversation.load(tmp_path / "chat", toolless)


def test_other_tools_keep_what_was_said(talked: Conversation, texts: deque[Any]) -> None:
    turns = talked.turns
    talked.set_tools([ADD, Tool("multiply", "Multiplies.", ADD.parameters)])
    assert [tool.name for tool in talked.tools] == ["add", "multiply"]
    assert [turn.steps for turn in talked.turns] == [turn.steps for turn in turns]
    assert talked.turns[0].start > turns[0].start
    check_positions(talked)
    texts.append("Bye.")
    assert said(talked.say("bye")) == "Bye."


def test_tools_that_do_not_fit_are_refused(path: Path) -> None:
    with pytest.raises(SettingsError, match=r"the system prompt and 1 tools take \d+ tokens"):
        begin(path, {"n_ctx": 400, "hh": 60, "recent": 60, "slack": 40})
