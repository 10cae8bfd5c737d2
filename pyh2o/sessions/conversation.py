"""A conversation that lives in a model's cache: each turn feeds only what is new.

The text in the cache is the record of the conversation. It consists of the tokens that were
generated, exactly, and of what the chat template writes around them (chat_template.py). The work
for a turn does not depend on how long the conversation is, unless rows are needed that have been
evicted: then the text is read again, and `on_recompute` is told so before.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp.llama_cpp import llama_vocab_is_eog

from ..errors import ContextLimitError, PyH2OError, SessionError, SettingsError, StateError
from ..generation.sampling import LARGEST_SEED, Sampling
from ..generation.writer import Writer
from ..llama import Llama
from ..openai.completion import FINISH_LENGTH, FINISH_STOP, FINISH_TRAINED_CONTEXT
from ..text.chat_template import ChatTemplate
from ..text.text_stream import Detokenizer, Piece, TextStream, detokenizer
from .session_file import (
    Session,
    check_same,
    model_identity,
    read_session,
    settings_identity,
    write_session,
)

FINISH_INTERRUPTED = "interrupted"
FINISHES = (FINISH_STOP, FINISH_LENGTH, FINISH_INTERRUPTED, FINISH_TRAINED_CONTEXT)
KIND = "conversation"

# Tokens at the end of the text by which it is recognised.
SEEN_TOKENS = 16

_DEFAULT_SAMPLING = Sampling()

# A model has one text, which belongs to the conversation that was begun or loaded last.
_owners: weakref.WeakKeyDictionary[Llama, weakref.ref[Conversation]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Turn:
    """A message and its answer; positions count the tokens of the text.

    Attributes:
        user: the message.
        answer: the text of the answer.
        finish: why it ended: "stop", "length" (`max_tokens`, or a full cache that does not evict),
            "interrupted" or "trained_context".
        start: where the turn's tokens begin: with the end of the answer before.
        answer_start: the answer's first token.
        end: behind the answer's last token, whether that is evaluated yet or not.
        attempt: answers the message had before this one.
    """

    user: str
    answer: str
    finish: str
    start: int
    answer_start: int
    end: int
    attempt: int = 0


class Conversation:
    """A conversation with a model, to which it belongs until another one is begun or loaded.

    What the template puts before the first message, the system prompt, is pinned: it is never
    evicted. If no system prompt is given it is pinned where it fits. The places of heavy rows go to
    the best scores of the whole text, or on request to each turn in proportion to its length (fair
    eviction of "The Pitfalls of KV Cache Compression", arXiv 2510.00231).

    The generators of text compute as they are asked for the next piece. One that is closed early,
    or in which Ctrl-C is raised, keeps what was said so far as the answer. If the model says
    nothing at all, or an error comes up, everything stays as it was before: a message is taken
    back, an answer that was to be replaced is still there.

    Args:
        llm: the model. What is in its cache is dropped.
        system: system prompt; None for the template's own, if it has one.
        sampling: how answers are drawn. Each answer has its own seed, which follows from the one
            given here, the number of the turn and that of the attempt.
        pin_system: False lets the system prompt be evicted like any other text.
        fair_turns: True gives each turn its share of the heavy rows.
        on_recompute: called with the number of tokens that are about to be evaluated again because
            rows that are needed were evicted.

    Raises:
        SettingsError: the system prompt does not fit the budget, or the template has no place for
            one.
        UnsupportedModelError: the chat template cannot be applied turn by turn.

    Attributes:
        llm: the model.
        sampling: how answers are drawn; may be set between two answers.
        tokens_evaluated: tokens evaluated since this object exists.
    """

    def __init__(
        self,
        llm: Llama,
        *,
        system: str | None = None,
        sampling: Sampling = _DEFAULT_SAMPLING,
        pin_system: bool = True,
        fair_turns: bool = False,
        on_recompute: Callable[[int], None] | None = None,
    ) -> None:
        places = _Places(pin_system, fair_turns)
        self._set_up(llm, ChatTemplate(llm, system), sampling, places, on_recompute)

    def _set_up(
        self,
        llm: Llama,
        template: ChatTemplate,
        sampling: Sampling,
        places: _Places,
        on_recompute: Callable[[int], None] | None,
    ) -> None:
        self.llm = llm
        self.sampling = sampling
        self._places = places
        self.tokens_evaluated = 0
        self._on_recompute = on_recompute
        self._turns: tuple[Turn, ...] = ()
        self._n_empty = 0  # answers in a row that had no text; the next one gets another seed
        self._answering: weakref.ref[Generator[str]] | None = None
        # The text is what is in the cache and these tokens after it, the first `_n_known` of which
        # have been evaluated before.
        self._pending: list[int] = []
        self._n_known = 0
        self._n_pinned = _rows_to_pin(llm, template, places)
        self._template = template
        previous = _owners.get(llm, lambda: None)()
        if previous is not None:
            previous._end_answer()
        _owners[llm] = weakref.ref(self)
        self._begin_text(template.opening)

    @property
    def system(self) -> str | None:
        """The system prompt that was given."""
        return self._template.system

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All messages that have an answer."""
        return self._turns

    # ---------------------------------------------------------------------------------------------
    # Answers
    # ---------------------------------------------------------------------------------------------

    def say(self, message: str, *, max_tokens: int | None = None) -> Generator[str]:
        """Answer a message.

        Args:
            message: what the person says.
            max_tokens: most tokens of the answer; None for as many as the model likes.

        Yields:
            Pieces of the answer, of whole characters and without stop strings.

        Raises:
            ContextLimitError: there are no positions for the message and an answer.
            PyH2OError: the template refuses the message, or the model has another text by now.
        """
        return self._answered_by(self._say(message, max_tokens))

    def regenerate(self, *, max_tokens: int | None = None) -> Generator[str]:
        """Drop the last answer and draw another one, with another seed; otherwise as `say`."""
        return self._answered_by(self._regenerate(max_tokens))

    def edit(self, message: str, *, max_tokens: int | None = None) -> Generator[str]:
        """Replace the last message and its answer; otherwise as `say`."""
        return self._answered_by(self._edit(message, max_tokens))

    def _answered_by(self, answering: Generator[str]) -> Generator[str]:
        self._end_answer()
        # Not held: a generator that its reader drops ends at once, and keeps what was said.
        self._answering = weakref.ref(answering)
        return answering

    def _end_answer(self) -> None:
        """End an answer that its reader left, but not for good."""
        answering = self._answering and self._answering()
        if not answering:
            return
        if inspect.getgeneratorstate(answering) == inspect.GEN_RUNNING:
            raise PyH2OError("an answer is being written: wait for its end, or close its generator")
        answering.close()

    def _say(self, message: str, max_tokens: int | None) -> Generator[str]:
        self._check_text()
        tokens, start = self._tokens_of(message, len(self._turns), self._n_text)
        answer = _Answer(message, start, self._n_empty)
        yield from self._write(answer, start, tokens, self._turns, max_tokens)

    def _regenerate(self, max_tokens: int | None) -> Generator[str]:
        self._check_text()
        last = self._last_turn()
        # There are logits behind the newest token only: the last one before the answer is new.
        start = last.answer_start - 1
        tokens = self._text_from(start)[:1]
        answer = _Answer(last.user, last.start, last.attempt + 1 + self._n_empty)
        yield from self._write(answer, start, tokens, self._turns[:-1], max_tokens)

    def _edit(self, message: str, max_tokens: int | None) -> Generator[str]:
        self._check_text()
        start = self._last_turn().start
        tokens, start = self._tokens_of(message, len(self._turns) - 1, start)
        answer = _Answer(message, start, self._n_empty)
        yield from self._write(answer, start, tokens, self._turns[:-1], max_tokens)

    def _tokens_of(self, message: str, n_turns: int, start: int) -> tuple[list[int], int]:
        """Tokens of a message after so many turns, and where in the text they begin.

        They begin at `start`, but for a first message that makes one token with the opening's end.
        """
        if n_turns:
            return self._template.next_turn(message), start
        tokens = self._template.first_turn(message)
        start = _n_equal(tokens[:-1], self._template.opening[:start])
        return tokens[start:], start

    def _write(
        self,
        answer: _Answer,
        start: int,
        tokens: list[int],
        turns: tuple[Turn, ...],
        max_tokens: int | None,
    ) -> Generator[str]:
        """Put tokens and an answer to them behind the first `start` tokens of the text.

        Args:
            answer: the one to be drawn.
            start: tokens of the text that stay.
            tokens: to be evaluated.
            turns: those that stay.
            max_tokens: most tokens of the answer.
        """
        self._check_room(start, tokens, max_tokens)
        before = self._turns, self._text_from(start), self._n_known_from(start)
        answer.start_text(self.llm, self._template, start + len(tokens), tokens)
        rest: list[str] = []
        try:
            self._turns = turns
            self._set_back(start)
            self._pending += tokens
            yield from self._draw(answer, max_tokens)
        except (GeneratorExit, KeyboardInterrupt):
            answer.finish = FINISH_INTERRUPTED
            raise
        finally:
            if self._has_text_of(answer):
                rest = answer.end_text()
                self._keep(answer, start, *before)
        yield from rest

    def _draw(self, answer: _Answer, max_tokens: int | None) -> Generator[str]:
        """Evaluate the pending tokens and draw the answer."""
        llm = self.llm
        n_before = llm.n_tokens
        feed = self._pending
        if self._places.fair_turns:
            # what comes before the first turn is a part of its own
            starts = [*(turn.start for turn in self._turns), answer.start]
            llm.share_fairly([start for start in starts if start > 0])
        seed = _seed(self.sampling.seed, len(self._turns), answer.attempt)
        try:
            if self._n_known and self._on_recompute is not None:
                self._on_recompute(self._n_known)
            writer = Writer(llm, replace(self.sampling, seed=seed))
            for token in writer.write(feed):
                if llama_vocab_is_eog(llm._model.vocab, token) or self._template.ends(token):
                    answer.finish = FINISH_STOP
                    return
                yield from answer.add(token)
                if not self._has_text_of(answer):
                    raise _other_text()
                if answer.is_stopped:
                    answer.finish = FINISH_STOP
                    return
                if answer.n_tokens == max_tokens:
                    answer.finish = FINISH_LENGTH
                    return
            answer.finish = FINISH_TRAINED_CONTEXT if llm.evicting else FINISH_LENGTH
        finally:
            self._record(answer, feed, llm.n_tokens - n_before)

    def _record(self, answer: _Answer, feed: list[int], n_new: int) -> None:
        """Take down what is in the cache after `n_new` tokens more were evaluated."""
        self.tokens_evaluated += n_new
        self._pending = feed[n_new:]
        self._n_known = max(0, self._n_known - n_new)
        if answer.n_tokens and self.llm.n_tokens < answer.end:
            self._pending = [answer.last_token]

    def _has_text_of(self, answer: _Answer) -> bool:
        """Whether the cache ends with the answer, and not with something else by now."""
        return answer.n_tokens == 0 or answer.end - 1 <= self.llm.n_tokens <= answer.end

    def _keep(
        self, answer: _Answer, start: int, turns: tuple[Turn, ...], dropped: list[int], n_known: int
    ) -> None:
        """Make a turn of an answer, or go back to what was before.

        Args:
            answer: which may have no tokens, or no finish reason because of an error.
            start: tokens of the text that both have in common.
            turns: those before.
            dropped: tokens of the text before, from `start` on.
            n_known: how many of them had been evaluated.
        """
        if answer.finish and answer.n_kept:
            end = answer.start + answer.n_kept
            # A stop string's tokens go; what the template ends an answer with will come instead.
            if end < self.llm.n_tokens and not self._has_rows(end):
                end = answer.end
            self._set_back(end)
            self._turns = (*self._turns, answer.turn(end))
            self._n_empty = 0
        else:
            self._turns = turns
            self._set_back(start)
            self._pending += dropped
            self._n_known += n_known
            if answer.finish == FINISH_STOP:
                self._n_empty += 1
        self._look()

    # ---------------------------------------------------------------------------------------------
    # Changes
    # ---------------------------------------------------------------------------------------------

    def undo(self) -> Turn:
        """Take back the last message and its answer, and return them.

        Raises:
            PyH2OError: nothing has been said, or the model has another text by now.
        """
        self._end_answer()
        self._check_text()
        last = self._last_turn()
        self._turns = self._turns[:-1]
        self._set_back(last.start)
        self._look()
        return last

    def clear(self) -> None:
        """Take back all that was said; the system prompt stays.

        Raises:
            PyH2OError: the model has another text by now.
        """
        self._end_answer()
        self._check_text()
        if self._turns:
            start = self._turns[0].start
            self._turns = ()
            self._set_back(start)
            self._look()

    def set_system(self, text: str | None) -> None:
        """Go on under another system prompt; with the next message all is read again.

        Raises:
            SettingsError: the system prompt does not fit the budget, or the template has no place
                for one.
            PyH2OError: the model has another text by now.
        """
        self._end_answer()
        self._check_text()
        template = ChatTemplate(self.llm, text)
        n_pinned = _rows_to_pin(self.llm, template, self._places)
        tokens, turns = _rewritten(template, self._text_from(0), self._turns)
        self._template, self._n_pinned, self._turns = template, n_pinned, turns
        self._begin_text(tokens)
        self._n_known = len(tokens) if turns else 0

    # ---------------------------------------------------------------------------------------------
    # Files
    # ---------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write everything to a file, from which `load` goes on bit for bit.

        Raises:
            SessionError: the file cannot be written; an old one is unchanged.
            PyH2OError: the model has another text by now.
        """
        self._end_answer()
        self._check_text()
        header = {
            "model": model_identity(self.llm),
            "settings": settings_identity(self.llm),
            "template": self._template.fingerprint,
            "system": self.system,
            "sampling": asdict(self.sampling),
            "places": asdict(self._places),
            "turns": [asdict(turn) for turn in self._turns],
            "cached": self.llm.n_tokens,
            "known": self._n_known,
            "empty": self._n_empty,
        }
        session = Session(KIND, header, self._text_from(0), self.llm.kv_state())
        write_session(path, session)

    @classmethod
    def load(
        cls, path: str | Path, llm: Llama, *, on_recompute: Callable[[int], None] | None = None
    ) -> Conversation:
        """Go on with a conversation that was saved.

        Args:
            path: the file.
            llm: the model, loaded with the settings it had then. What is in its cache is dropped,
                unless the file is refused.
            on_recompute: as for the class.

        Raises:
            SessionError: no such file, or it is damaged, of another model, other settings, another
                template or a newer format.
        """
        session = read_session(path, KIND)
        check_same(session, llm)
        try:
            saved = _Saved.of(session)
        except (TypeError, ValueError, KeyError) as error:
            raise SessionError(
                f"the session file {path} is damaged ({error}): use another copy of it"
            ) from error
        template = ChatTemplate(llm, saved.system)
        if template.fingerprint != session.header.get("template"):
            raise SessionError(
                f"the session {path} was made with another chat template: load the model with the "
                "same chat_format, or start a new session"
            )
        conversation = cls.__new__(cls)
        conversation._set_up(llm, template, saved.sampling, saved.places, on_recompute)
        try:
            llm.load_kv_state(session.kv, session.tokens[: saved.n_cached])
        except StateError as error:
            raise SessionError(f"cannot go on with the session {path}: {error}") from error
        conversation._turns = saved.turns
        conversation._pending = session.tokens[saved.n_cached :]
        conversation._n_known = saved.n_known
        conversation._n_empty = saved.n_empty
        conversation._look()
        return conversation

    # ---------------------------------------------------------------------------------------------
    # The text
    # ---------------------------------------------------------------------------------------------

    @property
    def _n_text(self) -> int:
        return int(self.llm.n_tokens) + len(self._pending)

    def _text_from(self, start: int) -> list[int]:
        """The tokens of the text from a position on."""
        n_cached = self.llm.n_tokens
        cached: list[int] = self.llm.input_ids[start:n_cached].tolist()
        return cached + self._pending[max(0, start - n_cached) :]

    def _n_known_from(self, start: int) -> int:
        """How many of those have been evaluated; the others are at the end."""
        n_unknown = len(self._pending) - self._n_known
        return max(0, self._n_text - start - n_unknown)

    def _set_back(self, n_tokens: int) -> None:
        """Shorten the text to its first tokens.

        If too many of their rows were evicted, the tokens become pending.
        """
        llm = self.llm
        if n_tokens >= llm.n_tokens:
            del self._pending[n_tokens - llm.n_tokens :]
            self._n_known = min(self._n_known, len(self._pending))
        elif n_tokens == 0:
            self._begin_text([])
        elif self._has_rows(n_tokens) and llm.remove_tail(n_tokens):
            self._pending, self._n_known = [], 0
        else:
            self._begin_text(llm.input_ids[:n_tokens].tolist())
            self._n_known = n_tokens

    def _has_rows(self, n_tokens: int) -> bool:
        """Whether a shorter text has enough rows in the cache to go on with it.

        Rows that were recent when it ended may be evicted by now. As long as half of the recent
        ones are left, that is better than to read all of the text again.
        """
        first_needed = n_tokens - max(1, self.llm.kv.recent // 2)
        return self.llm.can_remove_tail(max(1, first_needed))

    def _begin_text(self, tokens: Sequence[int]) -> None:
        """Empty the cache; `tokens` are to be evaluated."""
        self.llm.reset()
        # An empty cache has forgotten what was pinned.
        self.llm.pin(self._n_pinned)
        self._pending, self._n_known = list(tokens), 0
        self._look()

    def _drop_surplus(self) -> None:
        """Drop rows of an evaluation that Ctrl-C broke off before its tokens were recorded."""
        llm = self.llm
        if llm.n_tokens and llm._ctx.kv_cache_seq_rm(-1, llm.n_tokens, -1):
            return
        pending, n_known = self._pending, self._n_known
        tokens = llm.input_ids[: llm.n_tokens].tolist()
        self._begin_text(tokens + pending)
        self._n_known = len(tokens) + n_known

    def _look(self) -> None:
        """Remember what the text in the cache looks like."""
        self._seen = self._sight()

    def _sight(self) -> tuple[int, bytes]:
        n_tokens = self.llm.n_tokens
        newest = self.llm.input_ids[max(0, n_tokens - SEEN_TOKENS) : n_tokens]
        return n_tokens, newest.tobytes()

    def _check_text(self) -> None:
        """Refuse to go on if the model was used for another text."""
        owner = _owners.get(self.llm)
        if owner is None or owner() is not self or self._seen != self._sight():
            raise _other_text()
        self._drop_surplus()

    def _check_room(self, start: int, tokens: list[int], max_tokens: int | None) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise SettingsError(f"max_tokens is {max_tokens}: give 1 or more, or None for no limit")
        if not tokens:
            raise PyH2OError("the message is empty: say something")
        limit = self.llm.position_limit
        if start + len(tokens) >= limit:
            cure = (
                "begin a new conversation, or use a model with a longer context"
                if self.llm.evicting
                else "raise n_ctx (--ctx), or turn eviction on"
            )
            raise ContextLimitError(
                f"the conversation has {start} tokens and the message {len(tokens)}, which leaves "
                f"no room for an answer in {limit}: {cure}"
            )

    def _last_turn(self) -> Turn:
        if not self._turns:
            raise PyH2OError("nothing has been said yet: say something")
        return self._turns[-1]


@dataclass(frozen=True)
class _Places:
    """Who gets the places in the cache that are not those of recent rows (see Conversation)."""

    pin_system: bool
    fair_turns: bool


@dataclass
class _Answer:
    """An answer while it is drawn.

    Attributes:
        user, turn_start, attempt: of the turn.
        start: position of its first token.
        finish: why it ended; empty before, and if an error ended it.
        n_tokens: drawn so far.
        n_kept: those without the tokens of a stop string.
        last_token: the newest.
        texts: pieces of its text.
    """

    user: str
    turn_start: int
    attempt: int
    start: int = 0
    finish: str = ""
    n_tokens: int = 0
    n_kept: int = 0
    last_token: int = -1
    texts: list[str] = field(default_factory=list)

    def start_text(
        self, llm: Llama, template: ChatTemplate, start: int, before: Sequence[int]
    ) -> None:
        """Get ready for the first token; `before` are the newest ones of the text."""
        self.start = start
        self._bytes: Detokenizer = detokenizer(llm, before, starts_text=False)
        self._stream = TextStream(template.stops)

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + self.n_tokens

    def turn(self, end: int) -> Turn:
        """The turn it makes, with the position behind the last token that is kept."""
        return Turn(
            user=self.user,
            answer="".join(self.texts),
            finish=self.finish,
            start=self.turn_start,
            answer_start=self.start,
            end=end,
            attempt=self.attempt,
        )

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stream.stopped

    def add(self, token: int) -> list[str]:
        """Add a token; return the text that is ready."""
        self.n_tokens += 1
        self.last_token = token
        return self._ready(self._stream.feed(self._bytes.feed(token)))

    def end_text(self) -> list[str]:
        """Return the text that was held back, up to a stop string."""
        held_back = self._bytes.finish()
        pieces = self._stream.feed(held_back, tokens=0) if held_back and not self.is_stopped else []
        pieces += self._stream.finish()
        if not self.is_stopped:
            texts = self._ready(pieces)
            self.n_kept = self.n_tokens
            return texts
        # A piece without text is the beginning of the stop string.
        return self._ready([piece for piece in pieces if piece.text])

    def _ready(self, pieces: list[Piece]) -> list[str]:
        self.n_kept += sum(piece.tokens for piece in pieces)
        texts = [piece.text for piece in pieces if piece.text]
        self.texts += texts
        return texts


def _other_text() -> PyH2OError:
    return PyH2OError(
        "the model has been used for another text, and this conversation is no longer in its "
        "cache: load it from a file (Conversation.load), or begin a new one"
    )


# -------------------------------------------------------------------------------------------------
# Seeds, pins, system prompts
# -------------------------------------------------------------------------------------------------


def _seed(seed: int, turn: int, attempt: int) -> int:
    """The seed of an answer; different ones for all turns and attempts, the same in every run."""
    state = np.random.SeedSequence([seed, turn, attempt]).generate_state(1)
    return int(state[0]) % (LARGEST_SEED + 1)


def _rows_to_pin(llm: Llama, template: ChatTemplate, places: _Places) -> int:
    """How many tokens to pin: the template's opening, unless the user does not want that.

    Raises:
        SettingsError: there is no room for a system prompt.
    """
    if llm._budget is None:
        return 0
    n_opening, n_pinned = len(template.opening), llm._budget.pinned
    if not places.pin_system:
        return n_pinned
    room = n_pinned + llm._budget.heavy
    if n_opening <= room:
        return max(n_opening, n_pinned)
    if template.system is None:
        return n_pinned
    raise SettingsError(
        f"the system prompt takes {n_opening} tokens, more than the {room} rows that are not "
        "recent: shorten it, or raise hh (--hh)"
    )


def _rewritten(
    template: ChatTemplate, text: list[int], turns: Sequence[Turn]
) -> tuple[list[int], tuple[Turn, ...]]:
    """A conversation with another template around the same messages and answers."""
    if not turns:
        return list(template.opening), ()
    tokens: list[int] = []
    moved: list[Turn] = []
    for turn in turns:
        if moved:
            start, new = len(tokens), template.next_turn(turn.user)
        else:
            new = template.first_turn(turn.user)
            start = _n_equal(new[:-1], template.opening)
        tokens += new
        answer_start = len(tokens)
        tokens += text[turn.answer_start : turn.end]
        moved.append(replace(turn, start=start, answer_start=answer_start, end=len(tokens)))
    return tokens, tuple(moved)


def _n_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


# -------------------------------------------------------------------------------------------------
# Reading a header
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Saved:
    """What the header of a conversation's file says.

    Attributes:
        system, sampling, places, turns: as in the conversation.
        n_cached: tokens that the state of the cache covers.
        n_known: tokens behind them that had been evaluated before.
        n_empty: answers in a row that had no text.
    """

    system: str | None
    sampling: Sampling
    places: _Places
    turns: tuple[Turn, ...]
    n_cached: int
    n_known: int
    n_empty: int

    @classmethod
    def of(cls, session: Session) -> _Saved:
        """Read a header, which somebody may have edited.

        Raises:
            TypeError, ValueError, KeyError: it makes no sense.
        """
        header = session.header
        for name in ("system", "sampling", "places", "turns", "cached", "known", "empty"):
            _expect(name in header, f"it has no {name}")
        system = header["system"]
        _expect(system is None or isinstance(system, str), "its system prompt is no text")
        n_text = len(session.tokens)
        n_cached = _count(header, "cached", n_text)
        n_known = _count(header, "known", n_text - n_cached)
        n_empty = _count(header, "empty", 2**31)
        turns = tuple(_turn(turn) for turn in header["turns"])
        places = [place for turn in turns for place in (turn.start, turn.answer_start, turn.end)]
        _expect(places == sorted(places), "its turns overlap")
        _expect(not turns or turns[-1].end == n_text, "its turns are not its text")
        sampling, shares = Sampling(**header["sampling"]), _Places(**header["places"])
        _expect(all(type(share) is bool for share in asdict(shares).values()), "its places are odd")
        return cls(system, sampling, shares, turns, n_cached, n_known, n_empty)


def _turn(data: dict[str, Any]) -> Turn:
    turn = Turn(**data)
    for name in ("user", "answer", "finish"):
        _expect(isinstance(data[name], str), f"{name} of a turn is no text")
    for name in ("start", "answer_start", "end", "attempt"):
        _count(data, name, 2**31)
    _expect(turn.finish in FINISHES, f"the answer of a turn ended by {turn.finish!r}")
    _expect(turn.start < turn.answer_start < turn.end, "a turn has no message or no answer")
    return turn


def _count(data: dict[str, Any], name: str, most: int) -> int:
    value = data[name]
    is_count = isinstance(value, int) and not isinstance(value, bool)
    _expect(is_count and 0 <= value <= most, f"{name} is {value!r}")
    return int(value)


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
