"""Grammars: what llama.cpp cannot read is refused, and not a crash."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llama_cpp import LlamaGrammar, LogitsProcessorList, MinTokensLogitsProcessor

from pyh2o import Llama
from pyh2o.errors import GrammarError, PyH2OError
from pyh2o.generation.grammar import MOST_BRACKETS, MOST_BYTES
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
