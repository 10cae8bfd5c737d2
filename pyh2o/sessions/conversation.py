"""A conversation that lives in a model's cache: each turn feeds only what is new.

The text in the cache is the record of the conversation. It consists of the tokens that were
generated, exactly, and of what the chat template writes around them (chat_template.py). The work
for a turn does not depend on how long the conversation is, unless rows are needed that have been
evicted: then they come back from a copy of the cache (cache_copies.py). What no copy has is read
again, and `on_recompute` is told so before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..core.beginnings import n_common
from ..core.text import HasText, Text, text_of
from ..errors import PyH2OError, SettingsError
from ..writing.cache_copies import DEFAULT_MIB, CacheCopies
from ..writing.cached_text import CachedText
from ..writing.chat_template import ChatTemplate
from ..writing.finish import FINISH_INTERRUPTED, FINISH_STOP, finish_without_room
from ..writing.prompt import check_message
from ..writing.sampling import Sampling
from ..writing.writer import Writer
from .answers import Answer, LatestAnswer, answer_seed
from .identity import model_identity, settings_identity
from .layout import Layout, Places, lay_out
from .pins import Pins
from .saved_conversation import KIND, SavedConversation, open_saved_conversation
from .text_session import TextSession
from .turns import MOST_KEPT, KeptAnswer, Turn, attempts

_DEFAULT_SAMPLING = Sampling()


@dataclass(frozen=True)
class _Before:
    """What a conversation was before an answer, which replaces the tokens that were dropped."""

    turns: tuple[Turn, ...]
    kept: tuple[KeptAnswer, ...]
    dropped: list[int]
    n_known: int
    pins: Pins


class Conversation(TextSession):
    """A conversation with a model, to which it belongs until another one is begun or loaded.

    What the template puts before the first message, the system prompt, is pinned: it is never
    evicted. If no system prompt is given it is pinned where it fits. The places of heavy rows go to
    the best scores of the whole text, or on request to each turn in proportion to its length (fair
    eviction of "The Pitfalls of KV Cache Compression", arXiv 2510.00231).

    An answer that does nothing but repeat itself ends (see repetition.py); `go_on` lets it.

    The generators of text compute as they are asked for the next piece. One that is closed early,
    or in which Ctrl-C is raised, keeps what was said so far as the answer. If the model says
    nothing at all, or an error comes up, everything stays as it was before: a message is taken
    back, an answer that was to be replaced is still there.

    All methods that change it raise PyH2OError if the model has another text by now.

    Args:
        llm: the model. What is in its cache is dropped.
        system: system prompt; None for the template's own, if it has one.
        sampling: how answers are drawn. Each answer has its own seed, which follows from the one
            given here, the number of the turn and that of the attempt.
        pin_system: False lets the system prompt be evicted like any other text.
        fair_turns: True gives each turn its share of the heavy rows.
        on_recompute: called with the number of tokens that are about to be evaluated again because
            rows that are needed were evicted.
        copies_mib: most MiB of memory that copies of the cache may take, so that another answer, an
            undone turn or an edited message need not be read again; 0 for no copies.

    Raises:
        SettingsError: the system prompt does not fit the budget, or the template has no place for
            one; copies_mib is no count.
        UnsupportedModelError: the chat template cannot be applied turn by turn.

    Attributes:
        llm: the text of the model that it is in.
        sampling: how answers are drawn; may be set between two answers.
    """

    def __init__(
        self,
        llm: Text | HasText,
        *,
        system: str | None = None,
        sampling: Sampling = _DEFAULT_SAMPLING,
        pin_system: bool = True,
        fair_turns: bool = False,
        on_recompute: Callable[[int], None] | None = None,
        copies_mib: int = DEFAULT_MIB,
    ) -> None:
        llm, places = text_of(llm), Places(pin_system, fair_turns)
        self._set_up(
            llm, ChatTemplate(llm.model, system), sampling, places, on_recompute, copies_mib
        )

    def _set_up(
        self,
        llm: Text,
        template: ChatTemplate,
        sampling: Sampling,
        places: Places,
        on_recompute: Callable[[int], None] | None,
        copies_mib: int,
    ) -> None:
        self.llm = llm
        self.sampling = sampling
        self._places = places
        self._on_recompute = on_recompute
        self._turns: tuple[Turn, ...] = ()
        self._kept: tuple[KeptAnswer, ...] = ()  # in the order in which others took their place
        self._n_empty = 0  # answers in a row that had no text; the next one gets another seed
        self._latest = LatestAnswer()
        self._template = template
        self._text = CachedText(llm, on_taken=self._latest.end, copies_mib=copies_mib)
        n_pinned = places.n_pinned(llm, template)
        self._text.take_model()
        self._text.begin(template.opening, n_pinned=n_pinned)

    @property
    def system(self) -> str | None:
        """The system prompt that was given."""
        return self._template.system

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All messages that have an answer."""
        return self._turns

    @property
    def answers(self) -> tuple[Turn, ...]:
        """The last turn with each of its answers that are kept, by their attempts; () without one.

        One of them is the turn as it is now, the others were replaced by `regenerate`.
        """
        last = self._turns[-1:]
        found = [*last, *(kept.in_turn(last[0]) for kept in self._kept)]
        return tuple(sorted(found, key=lambda turn: turn.attempt))

    @property
    def unread(self) -> list[int]:
        """Tokens of what was said that are evaluated with the next message, before it."""
        return self._text.unread

    @property
    def tokens_evaluated(self) -> int:
        """Tokens evaluated since this object exists."""
        return self._text.evaluated

    @property
    def copies(self) -> CacheCopies:
        """Copies of the cache: how many (`len`), and the memory that they take."""
        return self._text.copies

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
            PyH2OError: the template refuses the message.
        """
        return self._latest.begin(self._say(message, max_tokens))

    def regenerate(self, *, max_tokens: int | None = None) -> Generator[str]:
        """Draw another answer to the last message, with another seed; otherwise as `say`.

        The one before, and at most 19 before that, are kept until something else is said: `choose`
        brings them back.
        """
        return self._latest.begin(self._regenerate(max_tokens))

    def edit(self, message: str, *, max_tokens: int | None = None) -> Generator[str]:
        """Replace the last message and its answer; otherwise as `say`."""
        return self._latest.begin(self._edit(message, max_tokens))

    def go_on(self, *, max_tokens: int | None = None) -> Generator[str]:
        """Go on with the last answer, which was stopped or cut by its limit, as if it had not been.

        The pieces are what is new of it; otherwise as `say`.

        Raises:
            PyH2OError: the model has ended its answer.
        """
        return self._latest.begin(self._go_on(max_tokens))

    def _go_on(self, max_tokens: int | None) -> Generator[str]:
        self._check_text()
        last = self._last_turn()
        if last.finish == FINISH_STOP:
            raise PyH2OError("the model has ended its answer: say something, or regenerate it")
        start = last.end - 1
        tokens = self._text.tokens[start:]
        yield from self._write(last, start, tokens, self._turns[:-1], self._kept, max_tokens)

    def _say(self, message: str, max_tokens: int | None) -> Generator[str]:
        self._check_text()
        yield from self._reply(message, self._turns, len(self._text.tokens), max_tokens)

    def _edit(self, message: str, max_tokens: int | None) -> Generator[str]:
        self._check_text()
        yield from self._reply(message, self._turns[:-1], self._last_turn().start, max_tokens)

    def _regenerate(self, max_tokens: int | None) -> Generator[str]:
        self._check_text()
        last = self._last_turn()
        start = last.answer_start - 1  # there are logits behind the newest token only
        tokens = self._text.tokens[start : last.answer_start]
        newest = attempts(self._turns, self._kept)[-1]
        turn = replace(last, end=0, attempt=newest + 1 + self._n_empty)
        kept = self._with_replaced(self._kept, last)
        yield from self._write(turn, start, tokens, self._turns[:-1], kept, max_tokens)

    def _with_replaced(self, kept: Sequence[KeptAnswer], last: Turn) -> tuple[KeptAnswer, ...]:
        """The answers that are kept once that of the last turn was replaced."""
        return (*kept, KeptAnswer.of(last, self._text.tokens))[-MOST_KEPT:]

    def _reply(
        self, message: str, turns: tuple[Turn, ...], start: int, max_tokens: int | None
    ) -> Generator[str]:
        """Answer a message that comes behind these turns and the first `start` tokens."""
        if turns:
            said = self._text.tokens[turns[-1].answer_start : turns[-1].end]
            tokens = self._template.next_turn(message, said)
        else:
            # The first message may make one token with the opening's end.
            whole = self._template.first_turn(message)
            start = n_common(whole[:-1], self._template.opening[:start])
            tokens = whole[start:]
        turn = Turn(message, "", "", start, start + len(tokens), 0, self._n_empty)
        yield from self._write(turn, start, tokens, turns, (), max_tokens)

    def _write(
        self,
        turn: Turn,
        start: int,
        tokens: list[int],
        turns: tuple[Turn, ...],
        kept: tuple[KeptAnswer, ...],
        max_tokens: int | None,
    ) -> Generator[str]:
        """Put tokens and an answer to them behind the first `start` tokens of the text.

        Args:
            turn: of which the answer is still to be drawn; it has an end if that goes on.
            start: tokens of the text that stay.
            tokens: to be evaluated.
            turns: those that stay.
            kept: other answers to the same message that stay.
            max_tokens: most tokens of the answer.
        """
        if max_tokens is not None and max_tokens < 1:
            raise SettingsError(f"max_tokens is {max_tokens}: give 1 or more, or None for no limit")
        check_message(self.llm, tokens, start)
        text = self._text
        before = _Before(self._turns, self._kept, text.tokens[start:], text.n_known, text.pins)
        said = text.tokens[turn.answer_start : turn.end]
        lead = text.tokens[turn.start : turn.answer_start] if said else tokens
        answer = Answer(self.llm, self._template, text.tokens, turn, lead, said, max_tokens)
        rest: list[str] = []
        try:
            self._turns, self._kept = turns, kept
            text.set_back(start, may_return=True)
            text.tokens += tokens
            text.pin_first(before.pins, start + n_common(tokens, before.dropped))
            yield from self._draw(answer, max_tokens)
        except (GeneratorExit, KeyboardInterrupt):
            answer.finish = FINISH_INTERRUPTED
            raise
        finally:
            if self._has_text_of(answer):
                rest = answer.take(answer.generation.end())
                self._keep(answer, start, before)
        yield from rest

    def _draw(self, answer: Answer, max_tokens: int | None) -> Generator[str]:
        """Evaluate the unread tokens and draw the answer."""
        llm, text = self.llm, self._text
        if self._places.fair_turns:
            # what comes before the first turn is a part of its own
            starts = [*(turn.start for turn in self._turns), answer.turn.answer_start]
            with llm.guard:
                llm.cache.share_fairly([start for start in starts if start > 0])
        if text.n_again and self._on_recompute is not None:
            self._on_recompute(text.n_again)
        seed = answer_seed(self.sampling.seed, len(self._turns), answer.turn.attempt)
        writer = Writer(llm, replace(self.sampling, seed=seed), written=answer.before)
        for pieces in answer.generation.run(text.write(writer, max_tokens)):
            yield from answer.take(pieces)
            if not self._has_text_of(answer):
                raise _other_text()
        answer.finish = answer.generation.finish or finish_without_room(llm.evicting)

    def _has_text_of(self, answer: Answer) -> bool:
        """Whether the cache ends with the answer, and not with something else by now."""
        return not answer.has_begun or self._text.is_growing()

    def _keep(self, answer: Answer, start: int, before: _Before) -> None:
        """Make a turn of an answer, or go back to what was before.

        Args:
            answer: which may have no tokens, or no finish reason because of an error.
            start: tokens of the text that both have in common.
            before: what there was.
        """
        text = self._text
        if answer.kept:
            end = answer.turn.answer_start + answer.kept
            # A stop string's tokens go; what the template ends an answer with will come instead.
            if end < self.llm.n_tokens and not text.has_rows(end):
                end = len(text.tokens)
            text.set_back(end)
            self._turns = (*self._turns, answer.made_turn(end))
            self._n_empty = 0
        else:
            self._turns, self._kept = before.turns, before.kept
            text.put_back(start, before.dropped, before.n_known, before.pins)
            if answer.finish == FINISH_STOP:
                self._n_empty += 1

    # ---------------------------------------------------------------------------------------------
    # What was said is taken back, or replaced
    # ---------------------------------------------------------------------------------------------

    def choose(self, attempt: int) -> None:
        """Have an answer back that was replaced; the one in its place is kept in turn.

        What comes next is as if it had been the answer all the time: bit for bit where a copy of
        the cache has it. Otherwise its tokens are read again with the next message, and
        `on_recompute` is told so before.

        Args:
            attempt: of one of `answers`.

        Raises:
            PyH2OError: there is no such answer, or nothing has been said.
        """
        self._settle()
        last, text = self._last_turn(), self._text
        if attempt == last.attempt:
            return
        chosen = next((each for each in self._kept if each.attempt == attempt), None)
        if chosen is None:
            there = ", ".join(map(str, attempts(self._turns, self._kept)))
            raise PyH2OError(
                f"the last message has no answer of attempt {attempt}: choose among {there}"
            )
        others = tuple(each for each in self._kept if each is not chosen)
        start = last.answer_start
        self._kept = self._with_replaced(others, last)
        self._turns = (*self._turns[:-1], chosen.in_turn(last))
        text.set_back(start, may_return=True)
        text.put_back(start, chosen.tokens, start + chosen.n_known, text.pins)

    def undo(self) -> Turn:
        """Take back the last message and its answer, and return them.

        Raises:
            PyH2OError: nothing has been said.
        """
        self._settle()
        last = self._last_turn()
        self._turns, self._kept = self._turns[:-1], ()
        self._text.set_back(last.start)
        return last

    def clear(self) -> None:
        """Take back all that was said; the system prompt stays."""
        self._settle()
        if self._turns:
            start = self._turns[0].start
            self._turns, self._kept = (), ()
            self._text.set_back(start)
            self._text.copies.clear()

    def take_over(self, said: Sequence[tuple[str, str]]) -> None:
        """Begin with messages and answers that were said elsewhere; the next message reads them.

        Raises:
            PyH2OError: the template refuses one.
        """
        self._settle()
        turns = [Turn(user, answer, FINISH_STOP, 0, 0, 0) for user, answer in said]
        self._begin(lay_out(self.llm, self._template, self._places, turns), is_new=True)
        self._kept = ()

    def set_system(self, text: str | None) -> None:
        """Go on under another system prompt; with the next message all is read again.

        Raises:
            SettingsError: the system prompt does not fit the budget, or the template has no place
                for one.
        """
        self._settle()
        template = ChatTemplate(self.llm.model, text)
        layout = lay_out(
            self.llm, template, self._places, self._turns, self._text.tokens, self.pins
        )
        self._template = template
        self._begin(layout)

    def _begin(self, layout: Layout, *, is_new: bool = False) -> None:
        """Have other tokens for what was said, all to be read, and for the first time if new."""
        self._turns = layout.turns
        self._text.begin(
            layout.tokens,
            n_known=len(layout.tokens) if layout.turns and not is_new else 0,
            n_pinned=layout.n_pinned,
            pins=layout.pins,
        )

    def _settle(self) -> None:
        """End the answer that is drawn, and refuse to go on as `_check_text` does."""
        self._latest.end()
        self._check_text()

    def _check_text(self) -> None:
        """Refuse to go on if the model was used for another text."""
        if not self._text.is_as_left():
            raise _other_text()
        self._text.drop_surplus()

    def _last_turn(self) -> Turn:
        if not self._turns:
            raise PyH2OError("nothing has been said yet: say something")
        return self._turns[-1]

    # ---------------------------------------------------------------------------------------------
    # Files
    # ---------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *, portable: bool = False) -> None:
        """Write everything to a file, from which `load` goes on bit for bit.

        With sliding windows that is to rounding: llama.cpp puts their rows into other cells.

        With recall there are two files: the rows that left the cache lie in PATH.archive, which
        the conversation goes on with.

        Args:
            path: the file.
            portable: have all in this one file, and go on with the archive where it is.

        Raises:
            SessionError: the file cannot be written; an old one is unchanged.
        """
        self._settle()
        saved = SavedConversation(
            model=model_identity(self.llm.model),
            settings=settings_identity(self.llm.model),
            template=self._template.fingerprint,
            system=self.system,
            sampling=self.sampling,
            places=self._places,
            turns=self._turns,
            cached=self.llm.n_tokens,
            known=self._text.n_again,
            empty=self._n_empty,
            archive=None,
            pins=self.pins,
            kept=self._kept,
        )
        self._write_session(path, KIND, asdict(saved), portable=portable)

    @classmethod
    def load(
        cls,
        path: str | Path,
        llm: Text | HasText,
        *,
        reread: bool = False,
        fair_turns: bool = False,
        on_recompute: Callable[[int], None] | None = None,
        copies_mib: int = DEFAULT_MIB,
    ) -> Conversation:
        """Go on with a conversation that was saved.

        A state of the cache that does not fit is left: the text is read again with the next
        message, and `on_recompute` is told so before. Other rows may be kept of it than were. What
        the archive of recall has lost is said in `llm.archive_trouble`.

        Args:
            path: the file, which stays as it is.
            llm: the model, loaded with the settings it had then. What is in its cache is dropped,
                unless the file is refused.
            reread: read all of the text again with the next message, which builds the archive
                anew, under any model and any settings. The same model reads the tokens that it
                wrote; another one reads the messages and answers as texts, and has neither pins
                nor the answers that were replaced, as those are tokens.
            fair_turns: with `reread`: give each turn its share of the heavy rows from now on.
            on_recompute, copies_mib: as for the class.

        Raises:
            SessionError: no such file, or it is damaged, of another format, or without `reread` of
                another model, other settings or another template.
            SettingsError: with `reread`: there is no room for what is pinned.
        """
        llm = text_of(llm)
        session, saved, template = open_saved_conversation(path, llm, reread=reread)
        places = replace(saved.places, fair_turns=saved.places.fair_turns or fair_turns)
        layout, kept = None, saved.kept
        # All that may be refused is looked at while the cache is still what it was.
        if reread and saved.model.is_same(model_identity(llm.model)):
            layout = lay_out(llm, template, places, saved.turns, session.tokens, saved.pins)
        elif reread:
            turns = [replace(turn, finish=FINISH_STOP, attempt=0) for turn in saved.turns]
            layout, kept = lay_out(llm, template, places, turns), ()
        conversation = cls.__new__(cls)
        conversation._set_up(llm, template, saved.sampling, places, on_recompute, copies_mib)
        if layout is not None:
            conversation._begin(layout)
        else:
            n_known = saved.cached + saved.known
            conversation._load_text(session, saved.archive, saved.cached, n_known, saved.pins)
            conversation._turns, conversation._n_empty = saved.turns, saved.empty
        conversation._kept = kept
        return conversation


def _other_text() -> PyH2OError:
    """The error for a conversation that is no longer in the model's cache."""
    return PyH2OError(
        "the model has been used for another text, and this conversation is no longer in its "
        "cache: load it from a file (Conversation.load), or begin a new one"
    )
