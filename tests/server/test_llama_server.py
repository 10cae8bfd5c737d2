"""The routes of llama.cpp's own server, in the form that its clients read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType

from good_bodies import COMPLETIONS
from many_texts import tiny_engine
from needed import needed
from pyh2o.engine import Engine
from pyh2o.engine.slots import Slot
from pyh2o.writing.events import Usage
from tiny_gguf import write_tiny_gguf

loopback = needed("loopback", name="the server's packages")

NO_END = loopback.NO_END
# One token is one character then; others would be cut between pieces.
ONLY_ASCII: dict[str, float] = {**NO_END, **{str(3 + byte): -100.0 for byte in range(128, 256)}}
BODY: dict[str, Any] = {
    "prompt": "once upon a time " * 2,
    "n_predict": 12,
    "seed": 3,
    "logit_bias": ONLY_ASCII,
}


def events(reply: Any) -> list[Any]:
    """Those of a stream, which has no sign of its end."""
    assert reply.status == 200
    *lines, end = reply.body.decode().split("\n\n")
    assert end == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data:")]


def test_a_completion_is_openai_s(server: Any) -> None:
    plain = server.post("/completion", BODY).json
    expected = server.post(COMPLETIONS, {**BODY, "max_tokens": 12}).json
    assert plain["content"] == expected["choices"][0]["text"]
    assert plain["tokens_predicted"] == plain["timings"]["predicted_n"] == 12
    assert plain["tokens_evaluated"] == expected["usage"]["prompt_tokens"]
    assert (plain["stop"], plain["stop_type"], plain["model"]) == (True, "limit", "tiny")
    *others, last = events(server.post("/completion", {**BODY, "stream": True}))
    assert "".join(event["content"] for event in others) == plain["content"]
    assert not any(event["stop"] for event in others)
    assert {**last, "timings": {}, "tokens_cached": 0} == {
        **plain, "timings": {}, "tokens_cached": 0, "content": ""
    }  # fmt: skip
    timings = last["timings"]
    assert timings["cache_n"] == last["tokens_cached"] > 0
    assert timings["cache_n"] + timings["prompt_n"] == last["tokens_evaluated"]
    assert timings["predicted_ms"] > 0


def test_why_a_completion_ended(server: Any) -> None:
    body = {**BODY, "n_predict": 60}
    text = server.post("/completion", body).json["content"]
    word = text[5:7]
    ended = server.post("/completion", {**body, "stop": ["never", word]}).json
    assert ended["content"] == text.partition(word)[0]
    assert (ended["stop_type"], ended["stopping_word"]) == ("word", word)
    ended = server.post("/completion", {**body, "grammar": 'root ::= "yes"', "logit_bias": []}).json
    assert (ended["content"], ended["stop_type"]) == ("yes", "eos")


def test_no_limit_and_no_seed(server: Any, engine: Engine) -> None:
    body = {"prompt": "once", "logit_bias": [[2, False]]}
    texts = set()
    for _ in range(2):
        ended = server.post("/completion", {**body, "n_predict": -1, "seed": -1}).json
        assert ended["tokens_predicted"] == engine.model.window
        texts.add(ended["content"])
    assert len(texts) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities(server: Any, stream: bool) -> None:
    reply = server.post("/completion", {**BODY, "n_probs": 3, "temperature": 0, "stream": stream})
    parts = events(reply) if stream else [reply.json]
    tokens = [token for part in parts for token in part.get("completion_probabilities", [])]
    assert len(tokens) == 12
    assert {len(token["top_logprobs"]) for token in tokens} == {3}
    assert all(token["bytes"] == [*token["token"].encode()] for token in tokens)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": "a"}, "n_predict"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"dry_multiplier": -1.5}, "dry_multiplier"),
        ({"top_a": 0.5}, "top_a"),
        ({"n_probs": 1000}, "n_probs"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema"),
    ],
)
def test_a_wrong_field_is_named(server: Any, fields: Any, param: str) -> None:
    assert server.refused("/completion", {**BODY, **fields})["param"] == param


def test_tokens_and_back(server: Any, engine: Engine) -> None:
    text = "once upon é"
    plain = server.post("/tokenize", {"content": text}).json["tokens"]
    assert plain == engine.model.tokenize(text.encode(), add_bos=False, special=True)
    with_bos = server.post("/tokenize", {"content": text, "add_special": True}).json["tokens"]
    assert with_bos == [engine.model.token_bos(), *plain]
    assert server.post("/detokenize", {"tokens": plain}).json["content"].strip() == text
    pieces = server.post("/tokenize", {"content": text, "with_pieces": True}).json["tokens"]
    assert [piece["id"] for piece in pieces] == plain
    assert server.refused("/detokenize", {"tokens": [10**6]})["param"] == "tokens"


def test_what_the_model_is(server: Any, engine: Engine) -> None:
    props = server.get("/props").json
    assert props["total_slots"] == engine.n_slots
    assert props["default_generation_settings"]["n_ctx"] == 8 * engine.model.window
    assert props["chat_template"] == engine.model.metadata["tokenizer.chat_template"]
    assert (props["bos_token"], props["eos_token"]) == ("<s>", "</s>")
    assert "secret_folder" not in json.dumps(props)
    slots = server.get("/slots").json
    assert [slot["id"] for slot in slots] == [0, 1]
    assert not any(slot["is_processing"] for slot in slots)
    assert server.get("/health").json == {"status": "ok"}


GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
AROUND: dict[str, Any] = {
    "input_prefix": "def add(a, b):\n    ",
    "prompt": "return",
    "input_suffix": "\n\nprint(add(1, 2))",
    "n_predict": 6,
    "logit_bias": ONLY_ASCII,
    "seed": 3,
}


@pytest.mark.parametrize("marks", [GAP, (*GAP, "<|repo_name|>", "<|file_sep|>")])
def test_a_gap_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marks: tuple[str, ...]
) -> None:
    """With what is before and behind it, and what other files have, in the model's own marks."""
    read: list[list[int]] = []
    start = Slot.start

    def watched(slot: Slot) -> Usage:
        read.append(list(slot.prompt))
        return start(slot)

    monkeypatch.setattr(Slot, "start", watched)
    types = dict.fromkeys(marks, TokenType.CONTROL)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=2, marks=types)
    with tiny_engine(path, texts=1, n_ctx=512) as engine, loopback.LoopbackServer(engine) as server:
        plain = server.post("/infill", AROUND).json
        *others, last = events(server.post("/infill", {**AROUND, "stream": True}))
        extra = [{"filename": "other.py", "text": "x = 1"}]
        assert server.post("/infill", {**AROUND, "input_extra": extra}).status == 200
        text = [engine.model.detokenize(each, special=True).decode() for each in read]
        whole = server.post(COMPLETIONS, {**BODY, "prompt": "a", "suffix": "b"}).json
    assert plain["tokens_predicted"] == 6
    assert "".join(event["content"] for event in others) == plain["content"]
    assert last["stop_type"] == "limit"
    gap = "<s><|fim_prefix|> def add(a, b):\n    return<|fim_suffix|>\n\nprint(add(1, 2))"
    assert text[0] == text[1] == f"{gap}<|fim_middle|>"
    files = text[2].removesuffix(text[0].removeprefix("<s>")).removeprefix("<s>")
    if len(marks) > 3:
        assert (
            files == "<|repo_name|> project\n<|file_sep|> other.py\nx = 1\n<|file_sep|> this file\n"
        )
    else:
        assert files == " \n\n--- other.py ---\n\nx = 1\n"
    assert whole["choices"][0]["text"]


def test_a_model_that_fills_no_gaps_says_so(server: Any) -> None:
    for route, body in (("/infill", AROUND), (COMPLETIONS, {"prompt": "a", "suffix": "b"})):
        error = server.refused(route, body)
        assert "gap" in error["message"]
