"""Answers of a batch: what each request gets, however many are made at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from many_texts import tiny_engine
from needed import needed
from pyh2o.engine import Engine
from pyh2o.writing.sampling import LARGEST_SEED, Sampling
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import EXACT_ROWS, tiny_llama

NAME = "the server's packages"
answering = needed("pyh2o.batch.answering", name=NAME)
reading = needed("pyh2o.batch.reading", name=NAME)
local = needed("pyh2o.batch.local", name=NAME)

SETTINGS = {"n_ctx": 256, "hh": 24, "recent": 16, "slack": 12, "attention": "ops", **EXACT_ROWS}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_gguf(tmp_path_factory.mktemp("batch") / "tiny.gguf", CHATML)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with tiny_engine(model, texts=3, **SETTINGS) as engine:
        yield engine


def batch_of(tmp_path: Path, *requests: tuple[str, dict[str, Any]]) -> Any:
    lines = [
        json.dumps({"custom_id": f"r{n}", "method": "POST", "url": url, "body": body})
        for n, (url, body) in enumerate(requests)
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines))
    return reading.read_batch(path)


def place(engine: Engine, batch: Any, **defaults: Any) -> Any:
    how = answering.RequestDefaults(**{"sampling": Sampling(seed=3), **defaults})
    return local.LocalRunner(engine, batch.requests, how)


def answered(engine: Engine, batch: Any, **defaults: Any) -> list[dict[str, Any]]:
    """The lines of all results, in the order of the requests."""
    found = [result for result in place(engine, batch, **defaults).results() if result is not None]
    return [line for _, line in sorted(found, key=lambda result: result[0].number)]


def text_of(line: dict[str, Any]) -> str:
    [choice] = line["response"]["body"]["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def test_the_same_however_many_at_once(
    model: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    def prompt() -> str:
        return "The sea " + "".join(map(chr, rng.integers(97, 123, int(rng.integers(1, 90)))))

    requests = []
    for n in range(12):
        body: dict[str, Any] = {"max_tokens": int(rng.integers(1, 60)), "temperature": float(n % 3)}
        if n % 2:
            requests.append((COMPLETIONS, {**body, "prompt": prompt()}))
        else:
            messages = [{"role": "user", "content": prompt()}]
            requests.append((CHATS, {**body, "messages": messages}))
    batch = batch_of(tmp_path, *requests)
    texts = []
    for n_at_once in (1, 4):
        with tiny_engine(model, texts=n_at_once, **SETTINGS) as engine:
            lines = answered(engine, batch)
        assert [line["custom_id"] for line in lines] == [f"r{n}" for n in range(12)]
        assert not any(map(answering.failed, lines))
        texts.append([text_of(line) for line in lines])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 6


def test_a_seed_follows_from_the_number_of_the_request(
    model: Path, engine: Engine, tmp_path: Path
) -> None:
    body = {"prompt": "once", "max_tokens": 20, "temperature": 1.5}
    batch = batch_of(tmp_path, (COMPLETIONS, body), (COMPLETIONS, body), (COMPLETIONS, body))
    with tiny_llama(model, **SETTINGS) as alone:
        expected = [
            alone.create_completion(**body, seed=seed)["choices"][0]["text"]
            for seed in (LARGEST_SEED, 0, 1)
        ]
    lines = answered(engine, batch, sampling=Sampling(seed=LARGEST_SEED))
    assert [text_of(line) for line in lines] == expected
    batch = batch_of(tmp_path, (COMPLETIONS, {**body, "seed": 1}))
    assert text_of(answered(engine, batch)[0]) == expected[2]


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_are_answered_with_the_options(
    model: Path, engine: Engine, tmp_path: Path, chat: bool
) -> None:
    sampling = Sampling(temperature=1.2, top_k=9, top_p=0.8, min_p=0.1, repeat_penalty=1.3, seed=5)
    names = {"temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed"}
    drawing = {name: value for name, value in vars(sampling).items() if name in names}
    with tiny_llama(model, **SETTINGS) as alone:
        if chat:
            messages = [{"role": "user", "content": "Once upon"}]
            done = alone.create_chat_completion(messages, max_tokens=20, **drawing)
            expected = done["choices"][0]["message"]["content"]
        else:
            done = alone.create_completion("Once upon", max_tokens=20, **drawing)
            expected = done["choices"][0]["text"]
    path = tmp_path / "prompts.txt"
    path.write_text("Once upon\n")
    batch = reading.read_batch(path)
    [line] = answered(engine, batch, sampling=sampling, max_tokens=20, chat=chat)
    assert line["custom_id"] == "line-1"
    assert text_of(line) == expected
    assert answering.usage(line) == (
        done["usage"]["prompt_tokens"],
        done["usage"]["completion_tokens"],
    )


def test_a_prompt_ends_with_the_window(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Once upon")
    batch = reading.read_batch(path)
    [line] = answered(engine, batch, sampling=Sampling(temperature=0, repeat_penalty=1))
    assert answering.usage(line)[1] == 256


@pytest.mark.parametrize(
    ("url", "body", "param", "message"),
    [
        (COMPLETIONS, {"prompt": 5}, "prompt", "prompt: expected a text, a list of tokens, or a l"),
        (COMPLETIONS, {"prompt": "x", "stream": True}, "stream", "stream: not supported in a batc"),
        (CHATS, {"messages": [{"role": "user"}]}, "messages[0]", "messages[0]: content is missing"),
    ],
)
def test_a_wrong_body_gets_an_error_and_the_others_go_on(
    engine: Engine, tmp_path: Path, url: str, body: dict[str, Any], param: str, message: str
) -> None:
    good = {"prompt": "once", "max_tokens": 3}
    batch = batch_of(tmp_path, (COMPLETIONS, good), (url, body), (COMPLETIONS, good))
    lines = answered(engine, batch)
    assert [answering.failed(line) for line in lines] == [False, True, False]
    response = lines[1]["response"]
    assert (lines[1]["custom_id"], lines[1]["error"], response["status_code"]) == ("r1", None, 400)
    error = response["body"]["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(message)
    assert answering.usage(lines[1]) == (0, 0)


def test_a_wrong_line_gets_an_error_without_a_response(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("{}")
    [line] = answered(engine, reading.read_batch(path))
    assert (line["custom_id"], line["response"]) == (None, None)
    message = "line 1: custom_id is missing"
    assert line["error"] == {"code": "invalid_request", "message": message}


def test_stopping_breaks_off_and_keeps_what_has_ended(engine: Engine, tmp_path: Path) -> None:
    """Requests that had not begun do not begin."""
    body = {"prompt": "once", "temperature": 0, "repeat_penalty": 1.0}
    lengths = [3, *[100_000] * 5]
    batch = batch_of(tmp_path, *[(COMPLETIONS, {**body, "max_tokens": n}) for n in lengths])
    here = place(engine, batch)
    ended = []
    for result in here.results():
        if result is not None:
            ended.append(result[0].number)
            here.stop()
    assert ended == [0]
    assert engine.n_running == 0


def test_what_is_no_fault_of_a_request_ends_the_run(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(self: Any, request: Any) -> dict[str, Any]:
        raise MemoryError

    monkeypatch.setattr(answering.Answers, "answer", answer)
    with pytest.raises(MemoryError):
        list(place(engine, batch_of(tmp_path, *[(COMPLETIONS, {"prompt": "x"})] * 4)).results())
