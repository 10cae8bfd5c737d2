"""Grammars: what llama.cpp cannot read is refused, and not a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import LlamaGrammar, LogitsProcessorList, MinTokensLogitsProcessor, llama_grammar

from pyh2o import Llama
from pyh2o.errors import GrammarError, PyH2OError
from pyh2o.writing.grammar import MOST_BRACKETS, MOST_BYTES
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import tiny_llama, tiny_parent


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, seed=3, chat_template=CHAT_TEMPLATE)
    return tiny_llama(path, n_ctx=200, hh=20, recent=20)


def grammar(text: str) -> LlamaGrammar:
    return LlamaGrammar.from_string(text, verbose=False)


WRONG = [
    "root ::= (",
    "root",
    "root ::= root",
    'other ::= "a"',
    "root ::= missing",
    'root ::= "a"\0(',
    'root ::= "a"{100000}',
    'root ::= "\ud800"',
    "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000,
    "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(300_000)) + 'r300000 ::= "a"',
    # llama.cpp takes these, and writes down ways through them until there is no memory
    'root ::= ws root ws | "a"\nws ::= [ ]*',
    'root ::= "(" (e root ")")? "a" | e root "b"\ne ::= f\nf ::= "c"? #(',
    'root ::= "a"{5,3}',
    'root ::= "a" { 3 , 0 }',
]


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_a_grammar_that_cannot_be_read_is_refused(llm: Llama, text: str) -> None:
    for stream in (False, True):
        with pytest.raises(GrammarError) as error:
            list(llm.create_completion("a", max_tokens=3, grammar=grammar(text), stream=stream))
        assert "\n" not in str(error.value)
    with pytest.raises(PyH2OError):
        next(iter(llm.generate([1, 2], grammar=grammar(text))))
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="grammar"):
        llm.create_chat_completion(messages, max_tokens=3, grammar=grammar(text))
    assert llm.create_completion("a", max_tokens=3)["choices"]


MAYBE = [
    'root ::= ("a"?){500} "b"',
    "root ::= x{2000}\nx ::= [a-z]*",
    'root ::= "x" ("y" x{40}) "z"\nx ::= "a" |',
    "root ::= " + "x " * 40 + '\nx ::= ("a" | "b"*)',
    "root ::= " + "(x " * 40 + ")?" * 40 + "\nx ::= y\ny ::= [a-z]*",
    'root ::= (("a"?){5}){5}',
    "root ::= (((x?)))*{30}\nx ::= [a-z]",
]
LEVELS = [f'e{n} ::= e{n + 1} "{"+-*/%&|^"[n % 8]}" e{n} | e{n + 1}' for n in range(20)]


@pytest.mark.parametrize("text", MAYBE, ids=range(len(MAYBE)))
def test_what_may_be_empty_is_not_repeated_often(llm: Llama, text: str) -> None:
    """llama.cpp would compute for years, and no Ctrl-C could end it."""
    with pytest.raises(GrammarError, match="something that may be empty"):
        llm.create_completion("a", max_tokens=3, grammar=grammar(text))


def test_a_grammar_with_too_many_ways_is_refused(llm: Llama) -> None:
    text = "\n".join(["root ::= e0", *LEVELS, "e20 ::= [a-z]+"])
    with pytest.raises(GrammarError, match="too many ways to go on"):
        llm.create_completion("a", max_tokens=3, grammar=grammar(text))
    several = "\n".join(["root ::= e16", *LEVELS[16:], "e20 ::= [a-z]+"])
    assert llm.create_completion("a", max_tokens=3, grammar=grammar(several))["choices"]


PROPERTIES = {f"p{n}": {"type": ["string", "null"][: n % 2 + 1]} for n in range(60)}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": PROPERTIES, "additionalProperties": True},
    {"type": "string", "maxLength": 500},
    {"type": "array", "items": {"type": "string", "pattern": "^[a-z]*$"}, "maxItems": 300},
    {"type": "string", "pattern": "^([0-9]{1,3}[- ]?)?[0-9]{3}[- ]?[0-9]{3,4}$"},
    {"type": "string", "format": "date-time"},
    {"enum": [f"word {n}" for n in range(2000)]},
]
GOOD = [
    *(getattr(llama_grammar, name) for name in dir(llama_grammar) if name.endswith("_GBNF")),
    *(llama_grammar.json_schema_to_gbnf(json.dumps(schema)) for schema in SCHEMAS),
    'root ::= [\\]"(]* "\\"(" | #{ (\n "b" {2,3} [^] "" <[12]> .?\r\nws ::=  # none\n\t"a"',
    'root ::= ws item ws\nitem ::= "(" root ")" | [0-9]{0,900} | ([a-z]+ " "?){1,60}\nws ::= " "*',
    "root ::= " + " ".join(f'("flag{n} ")?' for n in range(40)) + ' x{16}\nx ::= "a"?',
]


@pytest.mark.parametrize("text", GOOD, ids=range(len(GOOD)))
def test_grammars_that_people_have_are_read(llm: Llama, text: str) -> None:
    assert llm.create_completion("a", max_tokens=3, grammar=grammar(text))["choices"]


def test_grammars_as_large_as_they_may_be_are_read(llm: Llama) -> None:
    brackets = "root ::= " + "(" * MOST_BRACKETS + '"ab"' + ")" * MOST_BRACKETS
    rules, n = "root ::= r0\n", 0
    while len(rules) < MOST_BYTES - 100:
        rules += f"r{n} ::= r{n + 1}\n"
        n += 1
    for text in (brackets, rules + f'r{n} ::= "ab"'):
        result = llm.create_completion("a", max_tokens=9, grammar=grammar(text))
        assert result["choices"][0]["text"] == "ab"


DEAD_ENDS = [
    "root ::= <[999999]>",
    'root ::= "\\UFFFFFFFF"',
    'root ::= "ab" <[999999]>',
]


@pytest.mark.parametrize("text", DEAD_ENDS, ids=range(len(DEAD_ENDS)))
def test_a_grammar_that_allows_no_token_is_an_error(llm: Llama, text: str) -> None:
    """llama.cpp throws where nothing can catch it: the process ends."""
    for options in ({}, {"temperature": 0.0}, {"mirostat_mode": 2}):
        with pytest.raises(GrammarError, match="allows no token here"):
            llm.create_completion("a", max_tokens=9, grammar=grammar(text), **options)
    assert llm.create_completion("a", max_tokens=3)["choices"]


def test_a_processor_that_forbids_what_the_grammar_allows(llm: Llama) -> None:
    forbid_end = LogitsProcessorList([MinTokensLogitsProcessor(10, llm.token_eos())])
    with pytest.raises(GrammarError, match="allows no token here"):
        llm.create_completion("a", grammar=grammar('root ::= "ab"'), logits_processor=forbid_end)


def test_texts_with_a_grammar_equal_llama_cpp_s(llm: Llama, rng: np.random.Generator) -> None:
    """With the full cache: our attention rounds otherwise, and a letter may be drawn for it."""
    text = 'root ::= ("yes" | "no" | "é" [a-z]+ " ")+'
    path = Path(llm.model_path)
    stock, ours = tiny_parent(path, n_ctx=512), tiny_llama(path, n_ctx=512, evict=False)
    for seed in rng.integers(2**31, size=5).tolist():
        given = {"seed": seed, "max_tokens": 40, "repeat_penalty": 1.1, "logit_bias": {"100": 2.0}}
        results = []
        for model in (stock, ours):
            model.reset()
            results.append(model.create_completion("once", grammar=grammar(text), **given))
        assert results[0]["choices"][0]["text"] == results[1]["choices"][0]["text"]


def test_a_grammar_that_cannot_be_read_is_not_printed(
    llm: Llama, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(GrammarError):
        llm.create_completion("a", grammar=grammar("root ::= (\x1b[31m"))
    assert capfd.readouterr() == ("", "")
