"""Answers that follow schemas, expressions and grammars, by every field that has one."""

from __future__ import annotations

import enum
import json
import random
from typing import Any, Literal

import pytest

from good_bodies import CHAT, COMPLETIONS, with_field
from needed import needed

pydantic = needed("pydantic", name="the server's packages")
loopback = needed("loopback", name="the server's packages")

SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"]},
    {"enum": ["a\nb", "C:\\x", 'say "x"', "😀"]},
    {"type": "object", "properties": {'a"b😀': {"type": "null"}}, "required": ['a"b😀']},
    {"type": "string", "pattern": "^.{3,5}$"},
    {"type": "integer", "minimum": 10, "maximum": 20},
    {"type": "array", "items": {"enum": [1, None]}, "minItems": 2, "maxItems": 3},
    {"type": ["string", "null"], "maxLength": 3},
    {"title": "Anything", "maxProperties": 2},
    True,
]


@pytest.mark.randomised
@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_answers_are_valid_whatever_a_model_likes(server: Any, schema: Any, seed: int) -> None:
    suite = needed("json_schema_suite")
    dice = random.Random(seed)
    for route in range(3):
        answer = suite.answer_of(server, schema, dice, route)
        assert answer != "refused"
        assert answer == "cut" or suite.verdict(answer[0], schema) == "valid", answer


FLAG = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FIELDS: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": FLAG}},
    "json_schema": FLAG,
    "guided_json": FLAG,
    "grammar": 'root ::= "{\\"a\\": true}"',
    "guided_grammar": 'start: "{\\"a\\": true}"',
    "guided_regex": r'\{"a": (true|false)\}',
    "guided_choice": ['{"a": true}', '{"a": false}'],
    "structured_outputs": {"json": FLAG},
}
BROKEN: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"contains": {}}}},
    "json_schema": False,
    "guided_json": "{",
    "grammar": "root ::= (",
    "guided_grammar": "start: missing",
    "guided_regex": "(",
    "guided_choice": [],
    "structured_outputs": {"structural_tag": {}},
}


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, "/completion"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_followed_or_refused_by_its_name(server: Any, route: str, field: str) -> None:
    good = {"prompt": "a"} if route == "/completion" else with_field(route)
    result = server.post(route, {**good, "max_tokens": 100, field: FIELDS[field]}).json
    choice = result["choices"][0] if "choices" in result else result
    text = choice["message"]["content"] if "message" in choice else choice.get("text")
    assert isinstance(json.loads(text or choice["content"])["a"], bool)
    error = server.refused(route, {**good, field: BROKEN[field]})
    assert field in error["message"]
    if field not in ("response_format", "structured_outputs"):
        both = {"response_format": FIELDS["response_format"], field: FIELDS[field]}
        assert "exclude each other" in server.refused(route, {**good, **both})["message"]


def test_other_dialects_name_their_fields(server: Any) -> None:
    broken = {"contains": {}}
    messages = [{"role": "user", "content": "a"}]
    for route, body, name in [
        ("/api/chat", {"model": "tiny", "messages": messages, "format": broken}, "format"),
        ("/api/generate", {"model": "tiny", "prompt": "a", "format": broken}, "format"),
        ("/v1/responses", {"input": "a", "text": {"format": {
            "type": "json_schema", "name": "x", "schema": broken}}}, "text.format"),
        ("/v1/messages", {"messages": messages, "max_tokens": 5, "output_config": {
            "format": {"type": "json_schema", "schema": broken}}}, "output_config.format"),
    ]:  # fmt: skip
        reply = server.post(route, body)
        assert reply.status == 400, reply.body
        assert f"{name}: cannot be enforced" in reply.body.decode()
        assert '[\\"contains\\"]' in reply.body.decode()


def test_only_a_strict_tool_is_refused_for_an_unknown_keyword(server: Any) -> None:
    parameters = {"type": "object", "properties": {"a": {"uniqueItems": True, "type": "array"}}}
    function = {"name": "f", "parameters": parameters}
    choice = {"type": "function", "function": {"name": "f"}}
    fields = {"tool_choice": choice, "tools": [{"type": "function", "function": function}]}
    assert server.post(CHAT, with_field(CHAT, **fields)).status == 200
    function["strict"] = True
    error = server.refused(CHAT, with_field(CHAT, **fields))
    assert error["param"] == "tools[0].function.parameters"
    assert "uniqueItems" in error["message"]


class Color(enum.Enum):
    RED = 'r"d'
    BLUE = "bl\nue"


class Node(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    """A model that has odd values and bounds."""

    n: int = pydantic.Field(ge=0, le=1)
    odd: Literal["a\nb", "C:\\x", "😀"]
    color: Color
    share: float = pydantic.Field(gt=0, lt=1, multiple_of=0.25)
    anything: Any = None


class Chain(Node):
    """It has itself in it."""

    next: Chain | None = None


@pytest.fixture
def ends(server: Any) -> dict[str, float]:
    """A bias towards the signs that a value ends with."""
    tokens = server.post("/tokenize", {"content": '"}]null,'}).json["tokens"]
    return {"2": 10.0, **{str(token): 8.0 for token in tokens}}


def test_pydantic_s_models_in_openai_s_client(server: Any, ends: dict[str, float]) -> None:
    client = loopback.openai_client(server.address)
    messages: Any = [{"role": "user", "content": "Hello?"}]
    answer = client.chat.completions.parse(
        model="tiny", messages=messages, response_format=Chain, max_tokens=900, logit_bias=ends
    )
    assert isinstance(answer.choices[0].message.parsed, Chain)
