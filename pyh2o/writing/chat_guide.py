"""Constrains the answer of a chat: ends its reasoning, and enforces the grammar of tool calls."""

from __future__ import annotations

import math
import re

import llama_cpp

from ..core.detokenizer import PieceDetokenizer
from ..core.model import Model
from ..core.native_chat import ChatPrompt
from ..core.vocabulary import suffix_tokens
from .candidates import Candidates
from .grammar import Grammar, GrammarMatcher

# Maximum bytes of a mark or a trigger.
_TAIL = 400
# enum common_grammar_trigger_type
WORD, _PATTERN, _WHOLE = 1, 2, 3


class ChatGuide:
    """Constrains the tokens of one answer, like a grammar.

    The grammar of calls is enforced after its trigger, which is ignored within reasoning. If the
    text after the trigger does not match the grammar, it is not a call, and nothing is enforced.
    If the prompt has an opening, the answer starts with it or with reasoning.
    """

    def __init__(
        self,
        model: Model,
        prompt: ChatPrompt,
        *,
        grammar: Grammar | None = None,
        budget: int | None = None,
    ) -> None:
        """Start before the first token.

        Args:
            prompt: prompt of the chat; its grammar is used unless `grammar` is given.
            grammar: grammar of the content; if the prompt opens the reasoning, after that.
            budget: maximum tokens of reasoning; None for no limit.
        """
        self._model, self._prompt, self._budget = model, prompt, budget
        self._parts = PieceDetokenizer(
            model.native.vocab, model.token_bos(), starts_text=False, special=True
        )
        self._starts, self._ends = prompt.thinking_start_tag, prompt.thinking_end_tags
        _, opened, start = prompt.generation_prompt.rpartition(self._starts or "\0")
        is_open = not any(mark in start for mark in self._ends)
        self.in_reasoning = bool(opened and self._ends) and is_open
        self._n_reasoning = 0
        # One of these must come next, if the grammar allows it.
        self._forced: list[list[int]] = []
        if not self.in_reasoning:
            may_reason = self._starts and self._starts not in prompt.generation_prompt
            self._force(prompt.opening, *([self._starts] if prompt.opening and may_reason else ()))
        self._tail, self._is_cut = b"", False
        self._triggers = [_trigger(**each) for each in prompt.triggers]
        # Grammars of the whole answer, and of the calls in it.
        self._answer: GrammarMatcher | None = None
        self._calls: GrammarMatcher | None = None
        self._matcher: GrammarMatcher | None = None  # the one that is enforced now
        # Text so far that the grammar of calls applies to; None before a trigger.
        self._written: str | None = None
        if grammar is not None:
            self._answer = GrammarMatcher(model, grammar)
            self._matcher = None if self.in_reasoning else self._answer
        elif prompt.grammar:
            self._calls = GrammarMatcher(model, Grammar(gbnf=prompt.grammar, field="tools"))
            self._written = None if prompt.grammar_lazy else prompt.generation_prompt

    def mask(self, candidates: Candidates) -> None:
        """Set the logits of tokens that may not come next to minus infinity."""
        if self._written is not None:
            self._begin_calls()
        if self._matcher is not None:
            self._matcher.mask(candidates)
        if not self._forced and self._is_over_budget():
            self._force(self._ends[0])
        wanted = [tokens[0] for tokens in self._forced]
        logits = candidates.logits[wanted]
        if (logits > -math.inf).any():
            candidates.logits[:] = -math.inf
            candidates.logits[wanted] = logits

    def take(self, token: int) -> None:
        """Advance by a sampled token."""
        if self._matcher is not None:
            self._matcher.take(token)
        followed = (tokens[1:] for tokens in self._forced if tokens[0] == token)
        self._forced = [tokens for tokens in followed if tokens]
        self._n_reasoning += self.in_reasoning
        self._tail += self._parts.piece(token)
        if len(self._tail) > _TAIL:
            self._tail, self._is_cut = self._tail[-_TAIL:], True
        text = self._tail.decode(errors="ignore")
        if self.in_reasoning:
            self._find_end(text)
        elif not self._find_start(text) and self._matcher is None and self._calls is not None:
            self._find_trigger(text)

    def _force(self, *texts: str) -> None:
        self._forced = [self._tokens(text) for text in texts if text]

    def _is_over_budget(self) -> bool:
        """Whether the reasoning has used its budget."""
        is_over = self._budget is not None and self._n_reasoning >= self._budget
        return is_over and self.in_reasoning and _is_whole(self._tail)

    def _find_end(self, text: str) -> None:
        if any(mark in text for mark in self._ends):
            self.in_reasoning = False
            self._tail, self._is_cut = b"", True
            self._force(self._prompt.opening)
            self._matcher = self._matcher or self._answer

    def _find_start(self, text: str) -> bool:
        before, mark, _ = text.partition(self._starts) if self._starts else ("", "", "")
        before = before.strip()
        if not mark or (before and before != self._prompt.generation_prompt.strip()):
            return False
        self.in_reasoning, self._tail, self._is_cut = True, b"", True
        return True

    def _find_trigger(self, text: str) -> None:
        for trigger in self._triggers:
            if self._is_cut and trigger.pattern.startswith("^"):
                continue
            if found := trigger.search(text):
                # the grammar applies from the last group on
                self._written = text[found.start(found.lastindex or 0) :]
                return

    # ---------------------------------------------------------------------------------------------
    # Grammars
    # ---------------------------------------------------------------------------------------------

    def _begin_calls(self) -> None:
        """Enforce the grammar of calls if the text so far matches it."""
        assert self._calls is not None
        tokens, self._written = self._tokens(self._written or ""), None
        self._calls.reset()
        if self._calls.follows(tokens):
            self._matcher = self._calls

    def _tokens(self, text: str) -> list[int]:
        return suffix_tokens(self._model, text, special=True)


def shown_tokens(model: Model, prompt: ChatPrompt) -> frozenset[int]:
    """Return the control tokens whose text the parser of answers needs."""
    texts = [*prompt.preserved_tokens, prompt.thinking_start_tag, *prompt.thinking_end_tags]
    found = {token for text in texts for token in suffix_tokens(model, text, special=True)}
    control = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
    vocab = model.native.vocab
    return frozenset(t for t in found if llama_cpp.llama_vocab_get_attr(vocab, t) & control)


def _trigger(type: int, value: str) -> re.Pattern[str]:  # noqa: A002
    if type == WORD:
        return re.compile(re.escape(value))
    return re.compile(f"^(?:{value})$" if type == _WHOLE else value)


def _is_whole(data: bytes) -> bool:
    """Whether bytes end with a complete character."""
    try:
        data[-4:].decode()
    except UnicodeDecodeError as error:
        return error.reason != "unexpected end of data"
    return True
