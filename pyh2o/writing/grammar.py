"""Grammars that cannot end the program: tried before they are used, and watched while they are.

llama.cpp takes a grammar that it cannot read for no sampler, and crashes with the first token. It
crashes, too, while it reads brackets within brackets, or rules that lead to each other, beyond what
its stack holds. Where a grammar allows no token at all, it throws an error that nothing can catch.
"""

from __future__ import annotations

import re
import weakref
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from llama_cpp import LlamaGrammar

from ..core.model import Model
from ..errors import GrammarError
from .grammar_rules import check_rules, unreadable

if TYPE_CHECKING:
    from .sampler import Candidates

# Chains of rules, and brackets within brackets, of a multiple of this fit a stack of 8 MiB.
MOST_BYTES = 2**18
MOST_BRACKETS = 2000

_LITERALS = re.compile(rb'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)


class GrammarGuard:
    """A grammar that masks logits, and takes the tokens that are drawn from the rest."""

    def __init__(self, model: Model, grammar: LlamaGrammar) -> None:
        """Read a grammar; no text has been generated yet.

        Raises:
            GrammarError: it is wrong, or too large.
        """
        self._sampler = _read(model, grammar)
        weakref.finalize(self, llama_cpp.llama_sampler_free, self._sampler)
        self._allowed = np.zeros(0, dtype=np.bool_)

    def mask(self, candidates: Candidates) -> None:
        """Give minus infinity to what may not come next."""
        logits = candidates.logits.copy()
        candidates.apply(self._sampler)
        self._allowed = np.isfinite(candidates.logits)
        # Without a single token to draw, llama.cpp's samplers fail before `take` is asked.
        if not self._allowed.any():
            candidates.logits[:] = logits

    def allows(self, token: int) -> bool:
        """Whether the last mask left this token."""
        return bool(self._allowed[token])

    def take(self, token: int) -> None:
        """Go on after this token, which was drawn.

        Raises:
            GrammarError: the grammar does not allow it: no token was left to draw.
        """
        if not self.allows(token):
            raise GrammarError(
                "the grammar allows no token here that the model has and that may be drawn: give "
                "it another way to go on, or an end"
            )
        llama_cpp.llama_sampler_accept(self._sampler, token)


def _read(model: Model, grammar: LlamaGrammar) -> Any:
    """llama.cpp's sampler for a grammar."""
    try:
        text, root = grammar._grammar.encode(), grammar._root.encode()
    except UnicodeEncodeError:
        raise GrammarError("the grammar is not Unicode text: write it in UTF-8") from None
    if len(text) > MOST_BYTES or _deepest_bracket(text) > MOST_BRACKETS:
        raise GrammarError(
            f"the grammar is too large: give one of at most {MOST_BYTES:,} bytes and "
            f"{MOST_BRACKETS:,} brackets within brackets"
        )
    if b"\0" in text:
        raise GrammarError("the grammar has a zero byte, where it would end: write it as \\x00")
    check_rules(grammar._grammar, grammar._root)
    sampler = llama_cpp.llama_sampler_init_grammar(model.native.vocab, text, root)
    if not sampler:
        raise unreadable(grammar._root)
    return sampler


def _deepest_bracket(grammar: bytes) -> int:
    level = deepest = 0
    for sign in _LITERALS.sub(b" ", grammar):
        if sign == ord("("):
            level += 1
            deepest = max(deepest, level)
        elif sign == ord(")"):
            level -= 1
    return deepest
