"""Bodies that nobody thought of: no request is a fault of the server, and none takes long."""

from __future__ import annotations

import copy
import json
import logging
import random
import time
from typing import Any

import numpy as np

from good_bodies import CHAT, COMPLETIONS, EMBEDDINGS, GOOD, TOOL

# A tiny model answers in milliseconds; this is for a busy machine.
SOON = 20.0

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7, 0.5, -0.0, 1e308, -1e308, 1e-320, 2**31, 2**63, -(2**63),
    2**64, 10**30, float("nan"), float("inf"), "", "a", "5", "auto", "none", "required", "\0",
    "é☺", "x" * 5000, "\x1b[0m", [], [[]], [None], ["a"], [1, 2], ["a"] * 70, {}, {"a": 1},
    {"5": 1}, {"5": -100}, {"type": "text"}, {"type": "json_object"}, {"type": "function"},
    {"role": "user", "content": "a"}, [{"role": "user", "content": "a"}], [{"role": "tool"}],
    [{"type": "text", "text": "a"}], [{"type": "image_url", "image_url": {"url": "file:///"}}],
    {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}},
    {"type": "json_object", "schema": {"anyOf": [{"$ref": "#/anyOf/0"}]}},
    [TOOL], [{**TOOL, "type": "retrieval"}], {"type": "function", "function": {"name": "set_flag"}},
    "root ::= (", 'root ::= "a"', 'root ::= [a-z]+ | "é"', "root ::= <[5]>", {"name": "set_flag"},
]  # fmt: skip
DEEP: Any = "leaf"
for _ in range(150):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
ODD.append(DEEP)

FIELDS = [
    "model", "prompt", "messages", "input", "suffix", "max_tokens", "max_completion_tokens",
    "min_tokens", "temperature", "top_p", "min_p", "top_k", "echo", "stop", "stream", "logprobs",
    "top_logprobs", "presence_penalty", "frequency_penalty", "repeat_penalty", "logit_bias",
    "logit_bias_type", "seed", "n", "best_of", "user", "mirostat_mode", "mirostat_tau",
    "mirostat_eta", "grammar", "functions", "function_call", "tools", "tool_choice",
    "response_format", "stream_options", "role", "content", "name", "tool_calls", "tool_call_id",
    "type", "function", "parameters", "schema", "json_schema",
]  # fmt: skip


def mutated(dice: random.Random, body: Any) -> Any:
    """A body with something odd somewhere."""
    body = copy.deepcopy(body)
    for _ in range(dice.choice([1, 1, 1, 2, 3, 5])):
        here = body
        while True:
            below = list(here.values() if isinstance(here, dict) else here)
            below = [each for each in below if isinstance(each, (dict, list)) and each]
            if not below or dice.random() < 0.5:
                break
            here = dice.choice(below)
        odd = copy.deepcopy(dice.choice(ODD))
        if isinstance(here, list):
            here[dice.randrange(len(here))] = odd
        elif here and dice.random() < 0.1:
            del here[dice.choice(list(here))]
        else:
            here[dice.choice(FIELDS)] = odd
    return body


def random_bytes(dice: random.Random, body: Any) -> bytes:
    """The text of a body, sometimes with bytes that do not belong there."""
    data = bytearray(json.dumps(body, ensure_ascii=dice.random() < 0.5).encode())
    for _ in range(dice.choice([0] * 8 + [1, 3])):
        place = dice.randrange(len(data))
        change = dice.randrange(3)
        if change == 0:
            data[place] = dice.randrange(256)
        elif change == 1:
            del data[place:]
            data += b"}"
        else:
            data[place:place] = dice.choice([b"\xff", b"\0", b"NaN", b"[[", b'"', b"\\ud800"])
    return bytes(data)


def full_body(route: str) -> dict[str, Any]:
    """A good body with parts to be made odd."""
    body = copy.deepcopy(GOOD[route])
    body |= {"stop": ["zz"], "logit_bias": {"5": 1}, "seed": 1}
    if route == CHAT:
        body["messages"].append({"role": "assistant", "content": [{"type": "text", "text": "a"}]})
        body["tools"] = copy.deepcopy([TOOL])
        body["response_format"] = {"type": "json_object", "schema": {"type": "object"}}
    return body


def test_no_body_is_a_fault_of_the_server(
    server: Any, rng: np.random.Generator, caplog: Any
) -> None:
    dice = random.Random(int(rng.integers(2**32)))
    caplog.set_level(logging.WARNING)
    statuses: dict[int, int] = {}
    for count in range(400):
        route = dice.choice([COMPLETIONS, CHAT, CHAT, EMBEDDINGS])
        data = random_bytes(dice, mutated(dice, full_body(route)))
        caplog.clear()
        began = time.monotonic()
        reply = server.post(route, data, SOON)
        assert time.monotonic() - began < SOON
        assert reply.status in (200, 400), (data[:2000], reply.body[:500])
        statuses[reply.status] = statuses.get(reply.status, 0) + 1
        if reply.status == 400:
            message = reply.error["message"]
            assert reply.error["param"] is None or reply.error["param"] in message
            assert "\n" not in message
            assert len(caplog.messages) == 1, caplog.messages
        assert b"Traceback" not in reply.body
        assert b"secret_folder" not in reply.body
        if count % 50 == 0:
            server.answers_well()
    server.answers_well()
    assert statuses.keys() == {200, 400}
