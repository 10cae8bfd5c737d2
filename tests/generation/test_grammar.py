"""Grammars: what llama.cpp cannot read is refused, and not a crash."""

from __future__ import annotations

import pytest
from llama_cpp import LlamaGrammar

from pyh2o import Llama
from pyh2o.errors import GrammarError, PyH2OError
from pyh2o.generation.grammar import MOST_BRACKETS, MOST_BYTES
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import tiny_llama


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
    'root ::= "a"{100000}',
    'root ::= "\ud800"',
    "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000,
    "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(300_000)) + 'r300000 ::= "a"',
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


def test_grammars_as_large_as_they_may_be_are_read(llm: Llama) -> None:
    brackets = "root ::= " + "(" * MOST_BRACKETS + '"ab"' + ")" * MOST_BRACKETS
    rules, n = "root ::= r0\n", 0
    while len(rules) < MOST_BYTES - 100:
        rules += f"r{n} ::= r{n + 1}\n"
        n += 1
    for text in (brackets, rules + f'r{n} ::= "ab"'):
        result = llm.create_completion("a", max_tokens=9, grammar=grammar(text))
        assert result["choices"][0]["text"] == "ab"
