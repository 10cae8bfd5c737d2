"""A conversation that lives in a model's cache: each turn feeds only what is new.

The text in the cache is the record of the conversation. It consists of the tokens that were
generated, exactly, and of what the chat template writes around them (chat_template.py). The work
for a turn does not depend on how long the conversation is, unless rows are needed that have been
evicted: then they come back from a copy of the cache (cache_copies.py). What no copy has is read
again, and `on_recompute` is told so before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from pathlib import Path

from ..errors import PyH2OError, SettingsError
from ..generation.finish import FINISH_INTERRUPTED, FINISH_STOP, finish_without_room
from ..generation.sampling import Sampling
from ..generation.writer import Writer
from ..llama import Llama
from ..text.beginnings import n_common
from ..text.cache_copies import DEFAULT_MIB, CacheCopies
from ..text.cached_text import CachedText
from ..text.chat_template import ChatTemplate
from ..text.prompt import check_message
from .answers import Answer, Before, LatestAnswer, answer_generation, answer_seed
from .archives import archive_saved, open_archive
from .edited_conversation import EditableConversation, other_text
from .identity import model_identity, settings_identity
from .kept_answers import KeptAnswer, attempts, with_replaced
from .places import Places
from .saved_conversation import KIND, SavedConversation, open_saved_conversation
from .session_file import Session, write_session
from .turns import Turn

_DEFAULT_SAMPLING = Sampling()


class Conversation(EditableConversation):
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
        llm: the model.
        sampling: how answers are drawn; may be set between two answers.
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
        copies_mib: int = DEFAULT_MIB,
    ) -> None:
        places = Places(pin_system, fair_turns)
        self._set_up(llm, ChatTemplate(llm, system), sampling, places, on_recompute, copies_mib)

    def _set_up(
        self,
        llm: Llama,
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
            PyH2OError: the template refuses the message, or the model has another text by now.
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
        kept = with_replaced(self._kept, KeptAnswer.of(last, self._text.tokens))
        yield from self._write(turn, start, tokens, self._turns[:-1], kept, max_tokens)

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
        before = Before(self._turns, self._kept, text.tokens[start:], text.n_known, text.pins)
        said = text.tokens[turn.answer_start : turn.end]
        lead = text.tokens[turn.start : turn.answer_start] if said else tokens
        generation = answer_generation(
            self.llm, self._template, text.tokens, lead, max_tokens, said=said
        )
        answer = Answer(turn, generation, said)
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
            starts = [*(turn.start for turn in self._turns), answer.start]
            llm.share_fairly([start for start in starts if start > 0])
        if text.n_again and self._on_recompute is not None:
            self._on_recompute(text.n_again)
        seed = answer_seed(self.sampling.seed, len(self._turns), answer.attempt)
        writer = Writer(llm, replace(self.sampling, seed=seed), written=answer.before)
        for pieces in answer.generation.run(text.write(writer, max_tokens)):
            yield from answer.take(pieces)
            if not self._has_text_of(answer):
                raise other_text()
        answer.finish = answer.generation.finish or finish_without_room(llm.evicting)

    def _has_text_of(self, answer: Answer) -> bool:
        """Whether the cache ends with the answer, and not with something else by now."""
        return not answer.has_begun or self._text.is_growing()

    def _keep(self, answer: Answer, start: int, before: Before) -> None:
        """Make a turn of an answer, or go back to what was before.

        Args:
            answer: which may have no tokens, or no finish reason because of an error.
            start: tokens of the text that both have in common.
            before: what there was.
        """
        text = self._text
        if answer.kept:
            end = answer.start + answer.kept
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
            PyH2OError: the model has another text by now.
        """
        self._settle()
        saved = SavedConversation(
            model=model_identity(self.llm),
            settings=settings_identity(self.llm),
            template=self._template.fingerprint,
            system=self.system,
            sampling=self.sampling,
            places=self._places,
            turns=self._turns,
            cached=self.llm.n_tokens,
            known=self._text.n_again,
            empty=self._n_empty,
            pins=self.pins,
            kept=self._kept,
        )
        with archive_saved(path, self.llm, portable=portable) as archive:
            header = asdict(replace(saved, archive=archive))
            state = self.llm.kv_state()
            write_session(path, Session(KIND, header, self._text.tokens, state))

    @classmethod
    def load(
        cls,
        path: str | Path,
        llm: Llama,
        *,
        on_recompute: Callable[[int], None] | None = None,
        copies_mib: int = DEFAULT_MIB,
    ) -> Conversation:
        """Go on with a conversation that was saved.

        A state of the cache that does not fit is left: the text is read again with the next
        message, and `on_recompute` is told so before. Other rows may be kept of it than were. What
        the archive of recall has lost is said in `llm.archive_trouble`; `llm.restore_archive` then
        computes it again.

        Args:
            path: the file.
            llm: the model, loaded with the settings it had then. What is in its cache is dropped,
                unless the file is refused.
            on_recompute, copies_mib: as for the class.

        Raises:
            SessionError: no such file, or it is damaged, of another model, other settings, another
                template or a newer format.
        """
        session, saved, template = open_saved_conversation(path, llm)
        conversation = cls.__new__(cls)
        conversation._set_up(llm, template, saved.sampling, saved.places, on_recompute, copies_mib)
        n_known = saved.cached + saved.known
        open_archive(session, llm, saved.archive)
        conversation._text.load(session.tokens, saved.cached, n_known, session.kv, saved.pins)
        conversation._turns, conversation._kept = saved.turns, saved.kept
        conversation._n_empty = saved.empty
        return conversation
