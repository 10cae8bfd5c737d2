"""What a text has to follow: a JSON schema, a regular expression, or a grammar; by llguidance.

llguidance reads all of them, and says for each token of the vocabulary whether it may come next.
It has limits on what a grammar may cost: what exceeds them is an error, and no endless computation.
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

# Of one grammar, schema or expression.
MAX_BYTES = 2**18
# llguidance walks through rules by calls within calls, each of 5 kB at most: a small grammar needs
# no more than 4 MiB of stack, one of MAX_BYTES 200.
SMALL_BYTES = 2**13
STACK_BYTES = 2**29

_LARK = re.compile(r"^\s*(?:%llguidance\b|start\s*:)", re.MULTILINE)
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): (?:failed to compile JSON schema: )?")
_NO_SPECIAL_TEXTS = Vocabulary(lambda _text: 0, None)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Grammar:
    """A grammar of texts, whatever it was made of.

    Attributes:
        text: for llguidance; "" where `gbnf` stands for it.
        gbnf: llama.cpp's; what it becomes depends on the model's special tokens.
        root: the rule of `gbnf` that the text has to follow.
        field: the argument that it was given in, for messages.
    """

    text: str = ""
    gbnf: str = ""
    root: str = "root"
    field: str = "grammar"

    @classmethod
    def of(cls, text: str, field: str = "grammar") -> Grammar:
        """A grammar that somebody has written, in GBNF or in Lark.

        Raises:
            GrammarError: it cannot be read.
        """
        grammar = cls(text=text, field=field) if _LARK.search(text) else cls(gbnf=text, field=field)
        return grammar.checked(text)

    @classmethod
    def of_schema(cls, schema: Any, field: str, *, is_strict: bool = True) -> Grammar:
        """The JSON that a schema allows; if not strict, without keywords that are not known.

        Raises:
            GrammarError: no grammar can be made of the schema; its keyword is named.
        """
        try:
            text = for_llguidance(schema, is_strict=is_strict)
        except GrammarError as error:
            raise GrammarError(error.reason, field) from None
        return cls(f"start: %json {text}", field=field).checked(text)

    @classmethod
    def of_regex(cls, pattern: str, field: str) -> Grammar:
        """The texts that a regular expression matches as a whole.

        Raises:
            GrammarError: it cannot be read.
        """
        return cls(str(LLMatcher.grammar_from_regex(pattern)), field=field).checked(pattern)

    @classmethod
    def of_choice(cls, texts: list[str], field: str) -> Grammar:
        """One of these texts; there is at least one."""
        written = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return cls(f"start: {written}", field=field).checked(written)

    def checked(self, source: str) -> Grammar:
        """Return this grammar, if it can be read.

        Args:
            source: that it was made of.

        Raises:
            GrammarError: it cannot.
        """
        try:
            n_bytes = len(source.encode())
        except UnicodeEncodeError:
            raise GrammarError("it is not Unicode text: write it in UTF-8", self.field) from None
        if n_bytes > MAX_BYTES:
            raise GrammarError(
                f"it has {n_bytes:,} bytes, and the limit is {MAX_BYTES:,}: give a smaller one",
                self.field,
            )
        if error := _error_in(self.for_llguidance(_NO_SPECIAL_TEXTS)):
            raise self.error(error)
        return self

    def for_llguidance(self, vocabulary: Vocabulary) -> str:
        """As `LLMatcher` takes it.

        Raises:
            GrammarError: it cannot be read.
        """
        if not self.gbnf:
            return self.text
        try:
            return lark_of(self.gbnf, self.root, vocabulary)
        except GrammarError as error:
            raise GrammarError(error.reason, self.field) from None

    def error(self, message: str) -> GrammarError:
        """What llguidance says of it, in one line."""
        first, *others = message.splitlines() or ["it cannot be read"]
        reasons = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
        reason = " ".join([_PLACE.sub("", first), *reasons])
        return GrammarError(f"no text can be held to it: {reason}", self.field)


def grammar_of(given: Grammar | LlamaGrammar) -> Grammar:
    """The grammar that somebody gave, also as llama_cpp has it."""
    if isinstance(given, Grammar):
        return given
    return Grammar(gbnf=given._grammar, root=given._root).checked(given._grammar)


class GrammarMatcher:
    """The place in a grammar that a text has reached, token by token."""

    def __init__(self, model: Model, grammar: Grammar) -> None:
        """Begin at the start of the grammar.

        Raises:
            GrammarError: the grammar cannot be read, or is too complex.
        """
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
        """Give minus infinity to the tokens that may not come next.

        Raises:
            GrammarError: none may come that has a logit, or finding out costs too much.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        logits = candidates.logits
        allowed = np.unpackbits(bits, count=len(logits), bitorder="little").view(np.bool_)
        logits[~allowed] = -np.inf
        if not np.isfinite(logits).any():
            raise GrammarError(
                "it allows no token here that the model has and that may be sampled: give it "
                "another way to continue, or an end",
                self._grammar.field,
            )

    def reset(self) -> None:
        """Begin at the start again."""
        self._matcher.reset()

    def take(self, token: int) -> None:
        """Continue after this token, which the last mask allowed."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._check()

    def follows(self, tokens: list[int]) -> bool:
        """Continue after these tokens; whether the grammar allows all of them."""
        return int(self._matcher.try_consume_tokens(tokens)) == len(tokens)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise self._grammar.error(self._matcher.get_error())


@lru_cache(maxsize=64)  # a request's schema is checked several times, and agents repeat theirs
def _error_in(grammar: str) -> str:
    """What llguidance says of a grammar that it cannot read; "" of another."""
    return _with_stack_for(grammar, lambda: LLMatcher.validate_grammar(grammar, None))


def _with_stack_for(grammar: str, work: Callable[[], Result]) -> Result:
    """The result of work on a grammar, which calls itself for what is nested in it."""
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
    """A model's vocabulary for llguidance; control tokens have no text there."""

    native: LLTokenizer
    for_grammars: Vocabulary


class _Tokens:
    """A vocabulary as LLTokenizer asks for it."""

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
        """The tokens of a text that has to come next."""
        model = self._model()
        assert model is not None
        given = text.decode(errors="ignore") if isinstance(text, bytes) else text
        return suffix_tokens(model, given)


_STACK_LOCK = threading.Lock()
_VOCABULARIES = weakref.WeakKeyDictionary[Model, _Vocabulary]()
_VOCABULARIES_LOCK = threading.Lock()


def _vocabulary_of(model: Model) -> _Vocabulary:
    """The model's vocabulary, which takes half a second to be read the first time."""
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
