"""What an answer of a chat may go on with: the end of its thoughts, and calls by their grammar."""

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

# As long as a mark, or what makes a grammar hold, may be.
_TAIL = 400
# enum common_grammar_trigger_type
WORD, _PATTERN, _WHOLE = 1, 2, 3


class ChatGuide:
    """Watches the tokens of one answer, in the place of a grammar.

    A grammar of calls holds from its trigger on, which does not count within thoughts. Where what
    was written behind the trigger does not fit it, it does not hold: the text is no call then.
    Where the prompt asks for an opening, the answer begins with that or with thoughts.
    """

    def __init__(
        self,
        model: Model,
        prompt: ChatPrompt,
        *,
        grammar: Grammar | None = None,
        budget: int | None = None,
    ) -> None:
        """Nothing has been written yet.

        Args:
            model: that writes.
            prompt: of the chat; its grammar counts unless there is another one.
            grammar: of all that is said, behind the thoughts if the prompt opens them.
            budget: most tokens of thoughts; None for any number.

        Raises:
            GrammarError: the grammar is wrong, or too large.
        """
        self._model, self._prompt, self._budget = model, prompt, budget
        self._parts = PieceDetokenizer(
            model.native.vocab, model.token_bos(), starts_text=False, special=True
        )
        self._starts, self._ends = prompt.thinking_start_tag, prompt.thinking_end_tags
        _, opened, begun = prompt.generation_prompt.rpartition(self._starts or "\0")
        is_open = not any(mark in begun for mark in self._ends)
        self.in_reasoning = bool(opened and self._ends) and is_open
        self._n_reasoning = 0
        # What has to come next: one of these, if the grammar has a place for it.
        self._forced: list[list[int]] = []
        if not self.in_reasoning:
            may_reason = self._starts and self._starts not in prompt.generation_prompt
            self._force(prompt.opening, *([self._starts] if prompt.opening and may_reason else ()))
        self._tail, self._is_cut = b"", False
        self._triggers = [_trigger(**each) for each in prompt.triggers]
        # Of the whole answer, and of the calls in it.
        self._answer: GrammarMatcher | None = None
        self._calls: GrammarMatcher | None = None
        self._matcher: GrammarMatcher | None = None  # the one that holds now
        # What was written of what the grammar of calls is about; None before.
        self._written: str | None = None
        if grammar is not None:
            self._answer = GrammarMatcher(model, grammar)
            self._matcher = None if self.in_reasoning else self._answer
        elif prompt.grammar:
            self._calls = GrammarMatcher(model, Grammar(gbnf=prompt.grammar, field="tools"))
            self._written = None if prompt.grammar_lazy else prompt.generation_prompt

    def mask(self, candidates: Candidates) -> None:
        """Give minus infinity to what may not come next."""
        if self._written is not None:
            self._begin_calls()
        if self._matcher is not None:
            self._matcher.mask(candidates)
        if not self._forced and self._is_enough():
            self._force(self._ends[0])
        wanted = [tokens[0] for tokens in self._forced]
        logits = candidates.logits[wanted]
        if (logits > -math.inf).any():
            candidates.logits[:] = -math.inf
            candidates.logits[wanted] = logits

    def take(self, token: int) -> None:
        """Go on after this token, which was drawn.

        Raises:
            GrammarError: going on after it costs too much.
        """
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

    def _is_enough(self) -> bool:
        """Whether the thoughts have to end."""
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
                # a group says where the grammar begins
                self._written = text[found.start(found.lastindex or 0) :]
                return

    # ---------------------------------------------------------------------------------------------
    # Grammars
    # ---------------------------------------------------------------------------------------------

    def _begin_calls(self) -> None:
        """Let the grammar of calls hold behind what is written of them, if that fits it."""
        assert self._calls is not None
        tokens, self._written = self._tokens(self._written or ""), None
        self._calls.reset()
        if self._calls.follows(tokens):
            self._matcher = self._calls

    def _tokens(self, text: str) -> list[int]:
        return suffix_tokens(self._model, text, special=True)


def shown_tokens(model: Model, prompt: ChatPrompt) -> frozenset[int]:
    """The control tokens whose text is part of answers, for the parser to see."""
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
    """Whether bytes do not end within a character."""
    try:
        data[-4:].decode()
    except UnicodeDecodeError as error:
        return error.reason != "unexpected end of data"
    return True
