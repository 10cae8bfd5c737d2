"""Grammars and schemas that would end llama.cpp's process, or take it for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llama_cpp import LlamaGrammar

from good_bodies import CHAT, COMPLETIONS, with_field
from pyh2o import Llama

BROKEN_GRAMMARS = {
    "no end": "root ::= (",
    "no root": 'other ::= "a"',
    "blank": " ",
    "left recursion": 'root ::= root "a"',
    "undefined rule": "root ::= other",
    "deep": "root ::= " + "(" * 100_000,
    "many rules": "\n".join(f"r{i} ::= r{i + 1}" for i in range(20_000)),
    "long": 'root ::= "' + "a" * 300_000 + '"',
    "zero": 'root ::= "a"\0(',
    "repetitions": 'root ::= (("a"{1,1000}){1,1000}){1,1000}',
    "surrogate": 'root ::= "\\x"',
    "hidden left recursion": 'root ::= ws root ws | "a"\nws ::= " "*',
    "backwards": 'root ::= "a"{5,3}',
    "empty": 'root ::= ("a"?){500} "b"',
}
DEAD_ENDS = {
    "no such token": "root ::= <[999999]>",
    "no such character": 'root ::= "\\UFFFFFFFF"',
    "dead after a sign": 'root ::= "a" <[999999]>',
}


@pytest.mark.parametrize("grammar", BROKEN_GRAMMARS.values(), ids=list(BROKEN_GRAMMARS))
def test_a_grammar_that_does_not_parse(server: Any, grammar: str) -> None:
    for route in (COMPLETIONS, CHAT):
        assert server.refused(route, with_field(route, grammar=grammar))["param"] == "grammar"
    server.answers_well()


@pytest.mark.parametrize("grammar", DEAD_ENDS.values(), ids=list(DEAD_ENDS))
def test_a_grammar_that_allows_nothing(server: Any, grammar: str) -> None:
    """llama.cpp throws an error there that ends the process."""
    for route in (COMPLETIONS, CHAT):
        error = server.refused(route, with_field(route, grammar=grammar))
        assert error["message"].startswith("grammar: the grammar allows no token here")
    server.answers_well()


def test_min_tokens_against_a_grammar(server: Any) -> None:
    fields = {"grammar": 'root ::= "a"', "min_tokens": 10, "max_tokens": 20}
    assert server.refused(COMPLETIONS, with_field(COMPLETIONS, **fields))["param"] == "grammar"
    server.answers_well()


def test_a_grammar_is_followed(server: Any, alone: Llama, rng: np.random.Generator) -> None:
    """As llama.cpp's own sampler follows it, in the chain of samplers."""
    grammar = 'root ::= ("yes" | "no" | "é" [a-z]+ " ")+'
    for seed in rng.integers(2**31, size=5).tolist():
        fields = {"grammar": grammar, "seed": seed, "max_tokens": 30}
        text = server.post(COMPLETIONS, with_field(COMPLETIONS, **fields)).json["choices"][0][
            "text"
        ]
        alone.reset()
        expected = alone.create_completion(
            "once",
            grammar=LlamaGrammar.from_string(grammar, verbose=False),
            seed=seed,
            max_tokens=30,
            repeat_penalty=1.1,
        )
        assert text == expected["choices"][0]["text"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
        {"type": "string", "maxLength": 10**12},
        {"type": "string", "pattern": "^a{1000000000}$"},
        {"type": "nonsense"},
        {"$ref": "#/nowhere"},
        {"$ref": "https://example.com/schema"},
        {"properties": {"a": 5}},
        {"minLength": "x", "type": "string"},
    ],
)
def test_a_schema_that_gives_no_grammar(server: Any, schema: Any) -> None:
    response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    error = server.refused(CHAT, with_field(CHAT, response_format=response_format))
    assert error["param"] == "response_format"
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    fields = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    assert server.refused(CHAT, with_field(CHAT, **fields))["param"] == "tools"
