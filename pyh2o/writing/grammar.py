"""Grammars, JSON schemas and regular expressions, enforced by llguidance.

llguidance computes which tokens of the vocabulary may come next. It limits the cost of a grammar:
exceeding a limit is an error.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import llama_cpp
import numpy as np
from llama_cpp import LlamaGrammar
from llguidance import LLMatcher, LLTokenizer

from ..core.detokenizer import PieceDetokenizer
from ..core.model import Model
from ..core.vocabulary import suffix_tokens
from ..errors import GrammarError
from .candidates import Candidates
from .gbnf import Vocabulary, lark_of
from .json_schema import for_llguidance

# Maximum size of a grammar, schema or regular expression.
MAX_BYTES = 2**18
# llguidance is recursive, with at most 5 kB of stack per call: a small grammar needs up to 4 MiB of
# stack, one of MAX_BYTES up to 200 MiB.
SMALL_BYTES = 2**13
STACK_BYTES = 2**29

_LARK = re.compile(r"^\s*(?:%llguidance\b|start\s*:)", re.MULTILINE)
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?")
_NO_SPECIAL_TEXTS = Vocabulary(lambda _text: 0, None)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Grammar:
    """A grammar, made of any source.

    Attributes:
        text: the grammar for llguidance; "" with `gbnf`.
        gbnf: the grammar in llama.cpp's format, whose translation depends on the model's special
            tokens.
        field: name of the argument, for error messages.
    """

    text: str = ""
    gbnf: str = ""
    root: str = "root"
    field: str = "grammar"

    @classmethod
    def of(cls, text: str, field: str = "grammar") -> Grammar:
        """Parse a grammar in GBNF or Lark."""
        grammar = cls(text=text, field=field) if _LARK.search(text) else cls(gbnf=text, field=field)
        return grammar.checked(text)

    @classmethod
    def of_schema(cls, schema: Any, field: str, *, is_strict: bool = True) -> Grammar:
        """Return the grammar of a JSON schema; if not strict, unknown keywords are ignored."""
        try:
            text = for_llguidance(schema, is_strict=is_strict)
        except GrammarError as error:
            raise GrammarError(error.reason, field) from None
        return cls(f"start: %json {text}", field=field).checked(text)

    @classmethod
    def of_regex(cls, pattern: str, field: str) -> Grammar:
        """Return the grammar of a regular expression, which must match the whole text."""
        return cls(str(LLMatcher.grammar_from_regex(pattern)), field=field).checked(pattern)

    @classmethod
    def of_choice(cls, texts: list[str], field: str) -> Grammar:
        """Return the grammar of a choice between texts; there is at least one."""
        written = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return cls(f"start: {written}", field=field).checked(written)

    def checked(self, source: str) -> Grammar:
        """Return this grammar after validation; `source` is the text that it was made of."""
        try:
            n_bytes = len(source.encode())
        except UnicodeEncodeError:
            raise GrammarError("not valid Unicode: encode it as UTF-8", self.field) from None
        if n_bytes > MAX_BYTES:
            raise GrammarError(
                f"{n_bytes:,} bytes, the limit is {MAX_BYTES:,}: make it smaller", self.field
            )
        if error := _error_in(self.for_llguidance(_NO_SPECIAL_TEXTS)):
            raise self.error(error)
        return self

    def for_llguidance(self, vocabulary: Vocabulary) -> str:
        """Return the grammar for `LLMatcher`."""
        if not self.gbnf:
            return self.text
        try:
            return lark_of(self.gbnf, self.root, vocabulary)
        except GrammarError as error:
            raise GrammarError(error.reason, self.field) from None

    def error(self, message: str) -> GrammarError:
        """Return llguidance's message as an error of one line."""
        first, *others = message.splitlines() or ["invalid grammar"]
        reasons = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
        reason = " ".join([_PLACE.sub("", first), *reasons])
        return GrammarError(f"cannot be enforced: {reason}", self.field)


def grammar_of(given: Grammar | LlamaGrammar) -> Grammar:
    """Return a grammar, converted if it is llama_cpp's."""
    if isinstance(given, Grammar):
        return given
    return Grammar(gbnf=given._grammar, root=given._root).checked(given._grammar)


class GrammarMatcher:
    def __init__(self, model: Model, grammar: Grammar) -> None:
        """Start at the root of the grammar."""
        self._grammar = grammar
        vocabulary = _vocabulary_of(model)
        text = grammar.for_llguidance(vocabulary.for_grammars)
        try:
            self._matcher = _with_stack_for(
                text, lambda: LLMatcher(vocabulary.native, text, log_level=0)
            )
        except ValueError as error:
            raise grammar.error(str(error)) from None
        self._check()

    def mask(self, candidates: Candidates) -> None:
        """Set the logits of tokens that may not come next to minus infinity."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        logits = candidates.logits
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little").view(np.bool_)
        logits[~allowed] = -np.inf
        if not np.isfinite(logits).any():
            raise GrammarError(
                "allows none of the tokens that may be sampled here: add an alternative or an end",
                self._grammar.field,
            )

    def reset(self) -> None:
        self._matcher.reset()

    def take(self, token: int) -> None:
        """Advance by a token that the last mask allowed."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._check()

    def follows(self, tokens: list[int]) -> bool:
        """Advance by tokens; return whether the grammar allows all of them."""
        return int(self._matcher.try_consume_tokens(tokens)) == len(tokens)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise self._grammar.error(self._matcher.get_error())


@lru_cache(maxsize=64)  # a request's schema is checked several times, and agents repeat theirs
def _error_in(grammar: str) -> str:
    """Return llguidance's error for a grammar; "" if the grammar is valid."""
    return _with_stack_for(grammar, lambda: LLMatcher.validate_grammar(grammar, None))


def _with_stack_for(grammar: str, work: Callable[[], Result]) -> Result:
    """Return the result of a recursive function, run with enough stack for a grammar."""
    if len(grammar) <= SMALL_BYTES:
        return work()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    with _STACK_LOCK:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


# ---------------------------------------------------------------------------------------------
# Vocabularies
# ---------------------------------------------------------------------------------------------


@dataclass
class _Vocabulary:
    """A model's vocabulary for llguidance, where control tokens have no text."""

    native: LLTokenizer
    for_grammars: Vocabulary


class _Tokens:
    """Tokenizer interface for LLTokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        vocab, bos = model.native.vocab, model.token_bos()
        parts = PieceDetokenizer(vocab, bos, starts_text=False, special=True)
        self.tokens = [parts.piece(token) for token in range(model.n_vocab)]
        self.special_token_ids = [
            token
            for token in range(model.n_vocab)
            if llama_cpp.llama_vocab_get_attr(vocab, token) & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
        ]
        self.bos_token_id = bos if bos >= 0 else None
        self.eos_token_id = next(iter(model.end_tokens), model.n_vocab)

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens of a text within another text."""
        model = self._model()
        assert model is not None
        given = text.decode(errors="ignore") if isinstance(text, bytes) else text
        return suffix_tokens(model, given)


_STACK_LOCK = threading.Lock()
_VOCABULARIES = weakref.WeakKeyDictionary[Model, _Vocabulary]()
_VOCABULARIES_LOCK = threading.Lock()


def _vocabulary_of(model: Model) -> _Vocabulary:
    """Return the model's vocabulary, cached because it takes half a second to build."""
    with _VOCABULARIES_LOCK:
        if model not in _VOCABULARIES:
            tokens = _Tokens(model)
            ends = model.end_tokens or [model.n_vocab]
            n_vocab = max(model.n_vocab, *(end + 1 for end in ends))
            texts = {
                tokens.tokens[token].decode(errors="replace"): token
                for token in tokens.special_token_ids
            }
            native = LLTokenizer(tokens, n_vocab=n_vocab, eos_token=ends)  # type: ignore[arg-type]
            found = "|".join(map(re.escape, sorted(filter(None, texts), key=len, reverse=True)))

            def token_of(text: str) -> int | None:
                if text in texts:
                    return texts[text]
                listed = model.tokenize(text.encode(), add_bos=False, special=True)
                return listed[0] if len(listed) == 1 else None

            _VOCABULARIES[model] = _Vocabulary(
                native, Vocabulary(token_of, re.compile(found) if found else None)
            )
        return _VOCABULARIES[model]
