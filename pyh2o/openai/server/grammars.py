"""Grammars that cannot end the program: parsed before they are used, and watched while they are.

llama.cpp takes grammars from programs that know what they do. One that does not parse has no
sampler, a deeply nested one overflows the stack, and one that allows no token at some point ends
the process, because an error is thrown where nothing can catch it.
"""

from __future__ import annotations

import ctypes
import json
import re
import weakref
from collections.abc import Iterator
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_grammar import JSON_GBNF, json_schema_to_gbnf

from ...llama import Llama
from .refusals import RefusedError, one_line, shortened

ROOT = b"root"
MOST_BYTES = 2**18
# llama.cpp's parser and its check of recursion call themselves for each level; at 100,000 the stack
# of a thread is full. It repeats nothing more often than 2,000 times, either.
MOST_LEVELS = 4000
MOST_RULES = 8000
MOST_REPETITIONS = 2000

_LITERALS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_QUANTIFIER = re.compile(r"\{\s*(\d+)?\s*(?:,\s*(\d+)?\s*)?\}")
_SIZES = ("minItems", "maxItems", "minLength", "maxLength")

_CANDIDATE = np.dtype([("id", np.intc), ("logit", np.single), ("p", np.single)], align=True)


def schema_grammar(schema: dict[str, Any], param: str) -> str:
    """The grammar of the JSON that a schema allows; any JSON for an empty one.

    Raises:
        RefusedError: llama_cpp cannot make a grammar of it, or only a huge one; `param` is where it
            stood.
    """
    if not schema:
        return str(JSON_GBNF)
    for name, value in _entries(schema):
        if name in _SIZES:
            if not isinstance(value, int) or not 0 <= value <= MOST_REPETITIONS:
                raise _misfit(f"{name} has to be a number from 0 to {MOST_REPETITIONS}", param)
        elif name == "pattern" and isinstance(value, str):
            counts = [int(count) for pair in _QUANTIFIER.findall(value) for count in pair if count]
            if max(counts, default=0) > MOST_REPETITIONS:
                raise _misfit(f"a pattern repeats more than {MOST_REPETITIONS} times", param)
    try:
        return str(json_schema_to_gbnf(json.dumps(schema)))
    except RecursionError:
        raise _misfit(
            "it is nested too deeply, or has too many optional properties", param
        ) from None
    except Exception as error:
        raise _misfit(str(error) or type(error).__name__, param) from error


def _misfit(reason: str, param: str) -> RefusedError:
    return RefusedError(400, f"{param}: no grammar for this schema: {reason}", param=param)


def _entries(schema: Any) -> Iterator[tuple[str, Any]]:
    """All names and values in a schema, however deep."""
    left = [schema]
    while left:
        here = left.pop()
        if isinstance(here, dict):
            yield from here.items()
            left += here.values()
        elif isinstance(here, list):
            left += here


def check_size(grammar: str, param: str) -> None:
    """Refuse a grammar that llama.cpp's parser would not survive.

    Raises:
        RefusedError: it is too long, too deep, has too many rules, or a zero byte.
    """
    if len(grammar.encode()) > MOST_BYTES:
        raise RefusedError(400, f"{param}: more than {MOST_BYTES:,} bytes", param=param)
    if "\0" in grammar:
        raise RefusedError(400, f"{param}: it has a zero byte", param=param)
    bare = _LITERALS.sub(" ", grammar)
    if bare.count("::=") > MOST_RULES:
        raise RefusedError(400, f"{param}: more than {MOST_RULES:,} rules", param=param)
    if bare.count("(") > MOST_LEVELS and _levels(bare) > MOST_LEVELS:
        raise RefusedError(400, f"{param}: nested more than {MOST_LEVELS:,} deep", param=param)


def _levels(grammar: str) -> int:
    level = deepest = 0
    for sign in grammar:
        if sign == "(":
            level += 1
            deepest = max(deepest, level)
        elif sign == ")":
            level -= 1
    return deepest


class GrammarProcessor:
    """A logits processor that lets only tokens through that a grammar allows.

    Attributes:
        refusal: why no token can come any more; the next token is none of the grammar's then. A
            processor must not raise: it is called from C.
    """

    def __init__(self, llama: Llama, grammar: str, param: str) -> None:
        """Parse a grammar.

        Raises:
            RefusedError: it does not parse; `param` is where it stood.
        """
        check_size(grammar, param)
        self._param = param
        self._llama = llama
        self._sampler = llama_cpp.llama_sampler_init_grammar(
            llama._model.vocab, grammar.encode(), ROOT
        )
        if not self._sampler:
            raise RefusedError(
                400,
                f"{param}: the grammar does not parse: it needs a rule root ::=, every rule it "
                "names, and none that begins with itself",
                param=param,
            )
        weakref.finalize(self, llama_cpp.llama_sampler_free, self._sampler)
        self._allowed: npt.NDArray[np.bool_] | None = None
        self._candidates = np.zeros(llama.n_vocab(), dtype=_CANDIDATE)
        self.refusal: RefusedError | None = None

    def __call__(
        self, tokens: npt.NDArray[np.intc], logits: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        """Take the newest token, and mask what may not follow; [n_vocab]."""
        if self.refusal is None:
            self._accept(int(tokens[-1]))
        if self.refusal is not None:
            return np.zeros_like(logits)
        candidates = self._candidates
        candidates["id"] = np.arange(len(logits))
        candidates["logit"] = logits
        array = llama_cpp.llama_token_data_array(
            data=candidates.ctypes.data_as(llama_cpp.llama_token_data_p),
            size=len(logits),
            selected=-1,
            sorted=False,
        )
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))
        self._allowed = np.isfinite(candidates["logit"])
        if not self._allowed.any():
            self._end("")
            return np.zeros_like(logits)
        masked: npt.NDArray[np.single] = candidates["logit"].copy()
        return masked

    def _accept(self, token: int) -> None:
        if self._allowed is None:
            return  # that was the prompt's last
        if not self._allowed[token]:
            # logit_bias or min_tokens left none of those
            self._end(self._llama.detokenize([token]).decode(errors="replace"))
            return
        llama_cpp.llama_sampler_accept(self._sampler, token)

    def _end(self, instead: str) -> None:
        drawn = f" ({shortened(instead)} was drawn)" if instead else ""
        self.refusal = RefusedError(
            400,
            one_line(f"{self._param}: the grammar allows no token here{drawn}: change the grammar"),
            param=self._param,
        )
