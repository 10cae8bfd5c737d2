"""Grammars are tried before they are used: llama.cpp takes one that it cannot read for no sampler.

It then crashes with the first token, and so it does while it reads brackets within brackets, or
rules that lead to each other, beyond what its stack holds.
"""

from __future__ import annotations

import llama_cpp
from llama_cpp import Llama, LlamaGrammar

from ..errors import GrammarError

# Chains of rules and brackets of a multiple of this fit a stack of 8 MiB.
MOST_BYTES = 2**18
MOST_BRACKETS = 2000


def check_grammar(llama: Llama, grammar: LlamaGrammar) -> None:
    """Refuse a grammar that llama.cpp cannot read.

    Raises:
        GrammarError: it is wrong, or too large.
    """
    try:
        text, root = grammar._grammar.encode(), grammar._root.encode()
    except UnicodeEncodeError:
        raise GrammarError("the grammar is not Unicode text: write it in UTF-8") from None
    if len(text) > MOST_BYTES or text.count(b"(") > MOST_BRACKETS:
        raise GrammarError(
            f"the grammar is too large: give one of at most {MOST_BYTES:,} bytes and "
            f"{MOST_BRACKETS:,} brackets"
        )
    sampler = llama_cpp.llama_sampler_init_grammar(llama._model.vocab, text, root)
    if not sampler:
        raise GrammarError(
            f"the grammar cannot be read: each rule has the form 'name ::= ...', every bracket is "
            f"closed, no rule begins with itself, and {grammar._root!r} is one of them"
        )
    llama_cpp.llama_sampler_free(sampler)
