"""A conversation that lives in a model's cache: each turn feeds only what is new.

The text in the cache is the record of the conversation. It consists of the tokens that were
generated, exactly, and of what the chat template writes around them (chat_template.py). The work
for a turn does not depend on how long the conversation is, unless rows are needed that have been
evicted: then they come back from a copy of the cache (cache_copies.py). What no copy has is read
again.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

from ..core.prefixes import n_common
from ..core.projector import keys_in
from ..core.text import HasText, Text, text_of
from ..errors import PictureError, PyH2OError, SettingsError
from ..writing.cache_copies import DEFAULT_MIB
from ..writing.chat_template import ChatTemplate
from ..writing.finish import (
    FINISH_INTERRUPTED,
    FINISH_STOP,
    FINISH_TOOL_CALLS,
    finish_without_room,
)
from ..writing.prompt import check_room
from ..writing.sampling import Sampling
from ..writing.thinking import USUAL, Thinking
from ..writing.tools import Call, Tool
from ..writing.writer import Writer
from .headers import SavedConversation, open_conversation
from .layout import Places, merged
from .lorebooks import LoreEntry, told_with
from .talk import Talk, other_text
from .turns import Answer, Dialogue, Step, Turn, answer_seed
from .unfinished import Notes


class Conversation(Talk):
    """A conversation with a model, to which it belongs until another one is begun or loaded.

    The thoughts of an answer leave the cache when the next message is said: what they led to stays
    (see `Text.drop_spans`). Those of the last answer are there for it to be continued or replaced.

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
        tools: that answers may call; see `give_results`.
        thinking: whether the model thinks before it answers, and for how long.
        sampling: how answers are drawn; None for the defaults. Each answer has its own seed, which
            follows from the one given here, the number of the turn and that of the attempt.
        pin_system: False lets the system prompt be evicted like any other text.
        fair_turns: True gives each turn its share of the heavy rows.
        copies_mib: most MiB of memory that copies of the cache may take, so that another answer, an
            undone turn or an edited message need not be read again; 0 for no copies.

    Raises:
        SettingsError: system prompt and tools do not fit the budget, or the template has no place
            for them, or no such thoughts; copies_mib is no count.
        UnsupportedModelError: the chat template cannot be applied turn by turn.

    Attributes:
        llm: the text of the model that it is in.
        sampling: how answers are drawn; may be set between two answers.
        noted_beside: the file that it is saved as, beside which answers are noted while they are
            drawn (see `unfinished`); None notes nothing.
        lore: what the model is told with a message in which it comes up (see `lorebooks`).
        note: what it is told again and again; "" for nothing.
    """

    def __init__(
        self,
        llm: Text | HasText,
        *,
        system: str | None = None,
        tools: Sequence[Tool] = (),
        thinking: Thinking = USUAL,
        sampling: Sampling | None = None,
        pin_system: bool = True,
        fair_turns: bool = False,
        copies_mib: int = DEFAULT_MIB,
    ) -> None:
        llm = text_of(llm)
        template = ChatTemplate(llm.model, system, tools, thinking)
        self._latest: weakref.ref[Generator[str]] | None = None  # the answer begun last
        super().__init__(llm, template, Places(pin_system, fair_turns), copies_mib)
        self.sampling = sampling or Sampling()
        self.lore: tuple[LoreEntry, ...] = ()
        self.note = ""
        self._files: dict[str, bytes] = {}  # of pictures, by their hashes
        self.noted_beside: Path | None = None
        self._n_empty = 0  # answers in a row that had no text; the next one gets another seed

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
        return self._answering(
            lambda: self._reply(message, self.turns, len(self._text.tokens), max_tokens)
        )

    def regenerate(self, *, max_tokens: int | None = None) -> Generator[str]:
        """Draw another answer to the last message, with another seed; otherwise as `say`.

        The one before, and at most 19 before that, are kept until something else is said: `choose`
        brings them back.
        """
        return self._answering(lambda: self._regenerate(max_tokens))

    def edit(self, message: str, *, max_tokens: int | None = None) -> Generator[str]:
        """Replace the last message and its answer; otherwise as `say`."""
        return self._answering(
            lambda: self._reply(message, self.turns[:-1], self._said.last.start, max_tokens)
        )

    def give_results(
        self, calls: Sequence[Call], *, max_tokens: int | None = None
    ) -> Generator[str]:
        """Go on with an answer that called tools, behind their results; otherwise as `say`.

        The results are a part of the answer, and stay also if the model says nothing to them.

        Args:
            calls: `calls` with their results.
            max_tokens: most tokens of what comes.

        Raises:
            PyH2OError: the last answer does not wait for these.
        """
        return self._answering(lambda: self._give_results(tuple(calls), max_tokens))

    def go_on(self, *, max_tokens: int | None = None) -> Generator[str]:
        """Go on with the last answer, which was stopped or cut by its limit, as if it had not been.

        The pieces are what is new of it; otherwise as `say`.

        Raises:
            PyH2OError: the model has ended its answer.
        """
        return self._answering(lambda: self._go_on(max_tokens))

    def _answering(self, begin: Callable[[], Generator[str]]) -> Generator[str]:
        """End the answer before, and begin another one when its first piece is asked for."""

        def answer() -> Generator[str]:
            self._check_text()
            yield from begin()

        self._end_answer()
        generator = answer()
        # Not held: a generator that its reader drops ends at once, and keeps what was said.
        self._latest = weakref.ref(generator)
        return generator

    def _end_answer(self) -> None:
        """End the answer that was begun last, which its reader may have left."""
        generator = self._latest and self._latest()
        if generator:
            if inspect.getgeneratorstate(generator) == inspect.GEN_RUNNING:
                raise PyH2OError(
                    "an answer is being written: wait for its end, or close its generator"
                )
            generator.close()

    def _go_on(self, max_tokens: int | None) -> Generator[str]:
        last = self._said.last
        if last.finish == FINISH_STOP:
            raise PyH2OError("the model has ended its answer: say something, or regenerate it")
        if last.finish == FINISH_TOOL_CALLS:
            raise PyH2OError("the model has called tools: give their results, or say something")
        start = last.end - 1
        tokens = self._text.tokens[start:]
        said = replace(self._said, turns=self.turns[:-1])
        yield from self._write(last, start, tokens, said, max_tokens)

    def _give_results(self, calls: tuple[Call, ...], max_tokens: int | None) -> Generator[str]:
        waiting = [replace(call, result=None, failed=False) for call in calls]
        if not calls or waiting != [*self.calls]:
            raise PyH2OError("the last answer has made other calls: give the results of those")
        last, tokens = self._said.last, self._template.results(calls)
        n_tokens = last.end - last.part_starts[-1] + len(tokens)
        step = Step(last.answer, calls, n_tokens, last.thoughts)
        turn = replace(last, answer="", end=0, steps=(*last.steps, step), calls=())
        said = replace(self._said, turns=self.turns[:-1])
        yield from self._write(turn, last.end, tokens, said, max_tokens)

    def _regenerate(self, max_tokens: int | None) -> Generator[str]:
        last = self._said.last
        start = last.answer_start - 1  # there are logits behind the newest token only
        tokens = self._text.tokens[start : last.answer_start]
        attempt = self._said.attempts[-1] + 1 + self._n_empty
        turn = replace(last, end=0, attempt=attempt, steps=(), calls=())
        said = self._said.open_again(self._text.tokens)
        yield from self._write(turn, start, tokens, said, max_tokens)

    def _reply(
        self, message: str, turns: tuple[Turn, ...], start: int, max_tokens: int | None
    ) -> Generator[str]:
        """Answer a message that comes behind these turns and the first `start` tokens."""
        if self.llm.model.projector is not None:
            self._files |= self.llm.model.projector.files_in(message)
            if not set(keys_in(message)) <= self._files.keys():
                raise PictureError("a picture of the message is not here any more: add it again")
        told = told_with(message, turns, self.lore, self.note)
        turn = Turn(message, "", "", start, 0, 0, self._n_empty, told)
        if turns:
            self._text.forget(self._thoughts(turns[-1:], self._text.tokens))
            said = self._text.tokens[turns[-1].answer_start : turns[-1].end]
            tokens = self._template.next_turn(turn.message, said)
        else:
            # It may make one token with the opening's end, and a template may write the date.
            whole = self._template.first_turn(turn.message)
            start = n_common(whole[:-1], self._text.tokens[:start])
            tokens = whole[start:]
        turn = replace(turn, start=start, answer_start=start + len(tokens))
        yield from self._write(turn, start, tokens, Dialogue(turns), max_tokens)

    def _write(
        self, turn: Turn, start: int, tokens: list[int], said: Dialogue, max_tokens: int | None
    ) -> Generator[str]:
        """Put tokens and the answer of a turn behind the first `start` tokens of the text.

        The turn has an end if its answer goes on. `said` is what stays beside it.
        """
        if max_tokens is not None and max_tokens < 1:
            raise SettingsError(f"max_tokens is {max_tokens}: give 1 or more, or None for no limit")
        check_room(self.llm, start + len(tokens))
        text = self._text
        before, dropped = self._said, text.tokens[start:]
        pins, forgotten = text.pins, text.forgotten
        begun = text.tokens[turn.part_starts[-1] : turn.end]
        lead = text.tokens[turn.start : turn.part_starts[-1]] if begun else tokens
        answer = Answer(self.llm, self._template, text.tokens, turn, lead, begun, max_tokens)
        rest: list[str] = []
        shown = {key: self._files[key] for key in keys_in(turn.user) if key in self._files}
        notes = Notes(self.noted_beside, text.tokens, shown)
        try:
            self._said = said
            text.truncate(start, may_return=True)
            text.tokens += tokens
            text.pin_first(pins, start + n_common(tokens, dropped))
            self._pin_told(turn)
            notes.note(answer, text.tokens, start, said)
            for piece in self._draw(answer, max_tokens):
                yield piece
                notes.note(answer, text.tokens, start, said)
        except (GeneratorExit, KeyboardInterrupt):
            answer.finish = FINISH_INTERRUPTED
            notes.note(answer, text.tokens, start, said, at_once=True)
            raise
        finally:
            if not answer.has_begun or text.is_there():
                rest = answer.end()
                if not self._keep(answer):
                    self._said = before
                    text.restore(start, dropped, pins, forgotten)
        yield from rest

    def _pin_told(self, turn: Turn) -> None:
        """Pin a message that the model is told something with; half of the heavy rows stay free."""
        budget = self.llm.model.budget
        if turn.told and budget is not None:
            pins = merged([*self.pins, (turn.start, turn.answer_start)])
            if sum(end - start for start, end in pins) <= budget.heavy // 2:
                self._text.pin(pins)

    def _draw(self, answer: Answer, max_tokens: int | None) -> Generator[str]:
        """Evaluate the unread tokens and draw the answer."""
        llm, text = self.llm, self._text
        if self._places.fair_turns:
            # what comes before the first turn is a part of its own
            starts = [*(turn.start for turn in self.turns), answer.turn.part_starts[-1]]
            with llm.lock:
                llm.cache.share_fairly([start for start in starts if start > 0])
        at = len(self.turns), answer.turn.attempt, len(answer.turn.steps)
        seed = answer_seed(self.sampling.seed, *at)
        before = answer.before
        guide = self._template.guide(before)
        writer = Writer(llm, replace(self.sampling, seed=seed), written=before, grammar=guide)
        for pieces in answer.generation.run(text.write(writer, max_tokens)):
            yield from answer.take(pieces)
            if not text.is_there():
                raise other_text()
        answer.finish = answer.generation.finish or finish_without_room(llm.evicting)

    def _keep(self, answer: Answer) -> bool:
        """Make a turn of an answer, unless it has no tokens, or an error came up.

        What results of tools are followed by may have none.
        """
        text = self._text
        if not answer.kept and not (answer.turn.steps and answer.finish):
            self._n_empty += answer.finish == FINISH_STOP
            return False
        end = answer.turn.part_starts[-1] + answer.kept
        # A stop string's tokens go; what the template ends an answer with will come instead.
        if end < self.llm.n_tokens and not text.has_rows(end):
            end = len(text.tokens)
        text.truncate(end)
        self._said = replace(self._said, turns=(*self.turns, answer.made_turn(end)))
        self._n_empty = 0
        return True

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
            **self._header(),
            template=self._template.fingerprint,
            system=self.system,
            tools=self.tools,
            thinking=self.thinking,
            places=self._places,
            turns=self._said.turns,
            empty=self._n_empty,
            kept=self._said.kept,
            lore=self.lore,
            note=self.note,
        )
        self._write_file(path, saved, portable=portable)

    def _pictures(self) -> dict[str, bytes]:
        keys = dict.fromkeys(key for turn in self.turns for key in keys_in(turn.user))
        return {key: self._files[key] for key in keys if key in self._files}

    @classmethod
    def load(
        cls,
        path: str | Path,
        llm: Text | HasText,
        *,
        reread: bool = False,
        copies_mib: int = DEFAULT_MIB,
    ) -> Conversation:
        """Go on with a conversation that was saved.

        A state of the cache that does not fit is left: the text is read again with the next
        message. Other rows may be kept of it than were. `conversation.llm.archive_trouble` says
        what the archive of recall has lost.

        Args:
            path: the file, which stays as it is.
            llm: the model, loaded with the settings it had then. What is in its cache is dropped,
                unless the file is refused.
            reread: read all of the text again with the next message, which builds the archive
                anew, under any model and any settings. The same model reads the tokens that it
                wrote; another one reads the messages and answers as texts, and has neither pins
                nor the answers that were replaced, as those are tokens.
            copies_mib: as for the class.

        Raises:
            SessionError: no such file, or it is damaged, of another format, or without `reread` of
                another model, other settings or another template.
            SettingsError: with `reread`: there is no room for what is pinned.
        """
        llm = text_of(llm)
        session, saved, layout = open_conversation(path, llm, reread=reread)
        conversation = cls(
            llm,
            system=saved.system,
            tools=saved.tools,
            thinking=saved.thinking,
            sampling=saved.sampling,
            pin_system=saved.places.pin_system,
            fair_turns=saved.places.fair_turns,
            copies_mib=copies_mib,
        )
        conversation.lore, conversation.note = saved.lore, saved.note
        conversation._said = Dialogue(saved.turns, saved.kept)
        conversation._files = dict(session.pictures)
        if layout is not None:
            conversation._begin(layout)
        else:
            conversation._read_file(path, session, saved)
            conversation._n_empty = saved.empty
        return conversation
