"""A conversation in a model's cache: each turn evaluates only its new tokens.

The text consists of exactly the generated tokens and of what the chat template writes around them
(chat_template.py). The cost of a turn does not depend on the length of the conversation, except
when it needs evicted rows: they are restored from a snapshot of the cache, or else read again.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

from ..core.projector import keys_in
from ..core.text import HasText, Text, text_of
from ..core.tokens import n_common
from ..errors import PictureError, PyH2OError, SessionError, SettingsError
from ..writing.answer import Answer
from ..writing.finish import (
    FINISH_INTERRUPTED,
    FINISH_REPETITION,
    FINISH_STOP,
    FINISH_TOOL_CALLS,
    finish_without_room,
)
from ..writing.prompt import check_room
from ..writing.repetition import EndlessText
from ..writing.request import Request
from ..writing.sampling import Sampling
from ..writing.thinking import USUAL, Thinking
from ..writing.tools import Call, Tool
from .chat_template import ChatTemplate, Frames, open_turn
from .identity import model_identity
from .layout import Pins, RowShares, lay_out, merged
from .lorebooks import LoreEntry, note_for_message
from .messages import CONVERSATION, Contents, Message
from .records import record_of
from .talk import Talk
from .text_settings import ConversationSettings, damage_found, dialogue_of, messages_of
from .turns import AnswerRun, Dialogue, Step, Turn, answer_seed


class Conversation(Talk):
    """A conversation with a model.

    If the model was used for another text in between, the conversation is restored from snapshots
    of the cache, and the rest is read again.

    The reasoning of an answer is removed from the cache when the next message is sent (see
    `Text.drop_spans`). That of the last answer stays, so that the answer can be continued.

    The tokens before the first message, such as the system prompt, are pinned; without a given
    system prompt, only if they fit. Heavy rows are those with the best scores of the whole text, or
    with `fair_turns` of each turn in proportion to its length (fair eviction of "The Pitfalls of KV
    Cache Compression", arXiv 2510.00231).

    An answer that only repeats itself ends (see repetition.py); `resume` continues it.

    The generators compute each piece when it is requested. If one is closed early, or interrupted
    by Ctrl-C, the text so far is the answer. If the answer is empty or an error occurs, nothing
    changes: the message is removed, or the answer to be replaced stays.

    Args:
        llm: the model; its cache is emptied.
        system: system prompt; None for the template's default.
        tools: tools that answers may call; see `give_results`.
        thinking: whether the model reasons before it answers, and for how many tokens.
        sampling: sampling settings; None for the defaults. The seed of each answer is derived from
            this seed and the numbers of the turn and the attempt.
        pin_system: False allows eviction of the system prompt.
        fair_turns: whether each turn gets its share of the heavy rows.

    Raises:
        SettingsError: system prompt and tools do not fit the budget, or the template does not
            support them or the reasoning settings.
        UnsupportedModelError: the chat template cannot be applied turn by turn.

    Attributes:
        llm: the text of the model.
        sampling: sampling settings; may be set between two answers.
        lore: entries that are inserted before a message when a key matches (see `lorebooks`).
        note: author's note, which is inserted every few messages; "" for none.
    """

    kind = CONVERSATION

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
    ) -> None:
        llm = text_of(llm)
        template = ChatTemplate(llm.model, system, tools, thinking)
        self._latest: weakref.ref[Generator[str]] | None = None  # the answer started last
        super().__init__(llm, template, RowShares(pin_system, fair_turns))
        self.sampling = sampling or Sampling()
        self.lore: tuple[LoreEntry, ...] = ()
        self.note = ""
        self._files: dict[str, bytes] = {}  # pictures by their hashes
        self._answering: AnswerRun | None = None
        self._n_empty = 0  # consecutive empty answers; the next one gets another seed

    # ---------------------------------------------------------------------------------------------
    # Answers
    # ---------------------------------------------------------------------------------------------

    def say(self, message: str, *, max_tokens: int | None = None) -> Generator[str]:
        """Answer a message.

        Args:
            message: the user's message.
            max_tokens: maximum number of tokens of the answer; None for no limit.

        Yields:
            Pieces of the answer, of whole characters and without stop strings.

        Raises:
            ContextLimitError: no positions are left for the message and an answer.
            PyH2OError: the template rejects the message.
        """
        return self._answer(
            lambda: self._reply(message, self.turns, len(self._text.tokens), max_tokens)
        )

    def regenerate(self, *, max_tokens: int | None = None) -> Generator[str]:
        """Sample another answer to the last message with another seed; see `say`.

        The last 20 replaced answers are kept until the next message: `choose` restores them.
        """
        return self._answer(lambda: self._regenerate(max_tokens))

    def edit(self, message: str, *, max_tokens: int | None = None) -> Generator[str]:
        """Replace the last message and its answer; see `say`."""
        return self._answer(
            lambda: self._reply(message, self.turns[:-1], self._dialogue.last.start, max_tokens)
        )

    def give_results(
        self, calls: Sequence[Call], *, max_tokens: int | None = None
    ) -> Generator[str]:
        """Continue an answer that called tools after their results; see `say`.

        The results are a part of the answer, and stay if the model adds nothing.

        Args:
            calls: the calls of `calls`, with results.
            max_tokens: maximum number of new tokens.

        Raises:
            PyH2OError: the last answer made other calls.
        """
        return self._answer(lambda: self._give_results(tuple(calls), max_tokens))

    def resume(self, *, max_tokens: int | None = None) -> Generator[str]:
        """Continue the last answer, which was stopped or reached its limit; see `say`.

        Yields only new text.

        Raises:
            PyH2OError: the model has ended its answer.
        """
        return self._answer(lambda: self._resume(max_tokens))

    def _answer(self, start: Callable[[], Generator[str]]) -> Generator[str]:
        """End the previous answer, and start another one when its first piece is requested."""

        def answer() -> Generator[str]:
            self._prepare()
            yield from start()

        self._end_answer()
        generator = answer()
        # A weak reference: a generator that its caller drops ends at once, with the text so far.
        self._latest = weakref.ref(generator)
        return generator

    def _end_answer(self) -> None:
        """Close the last answer's generator, which its caller may have left."""
        generator = self._latest and self._latest()
        if generator:
            if inspect.getgeneratorstate(generator) == inspect.GEN_RUNNING:
                raise PyH2OError(
                    "an answer is being generated: wait for its end, or close its generator"
                )
            generator.close()

    def _resume(self, max_tokens: int | None) -> Generator[str]:
        last = self._dialogue.last
        if last.finish == FINISH_STOP:
            raise PyH2OError("the model has ended its answer: send a message, or regenerate it")
        if last.finish == FINISH_TOOL_CALLS:
            raise PyH2OError("the model has called tools: pass their results, or send a message")
        start = last.end - 1
        tokens = self._text.tokens[start:]
        dialogue = replace(self._dialogue, turns=self.turns[:-1])
        frames = self._template.frames([*self._template.shortened(self.turns[:-1]), last])
        yield from self._write(last, frames, start, tokens, dialogue, max_tokens)

    def _give_results(self, calls: tuple[Call, ...], max_tokens: int | None) -> Generator[str]:
        waiting = [replace(call, result=None, failed=False) for call in calls]
        if not calls or waiting != [*self.calls]:
            raise PyH2OError("the last answer made other calls: pass the results of those")
        last = self._dialogue.last
        n_tokens = last.end - last.part_starts[-1]
        step = Step(last.answer, calls, n_tokens, last.reasoning)
        turn = replace(last, answer="", end=0, steps=(*last.steps, step), calls=(), reasoning="")
        turns = [*self._template.shortened(self.turns[:-1]), turn]
        frames = self._template.frames(turns)
        tokens = self._template.results(turns, frames)
        step = replace(step, n_tokens=n_tokens + len(tokens))
        turn = replace(turn, steps=(*last.steps, step))
        dialogue = replace(self._dialogue, turns=self.turns[:-1])
        yield from self._write(turn, frames, last.end, tokens, dialogue, max_tokens)

    def _regenerate(self, max_tokens: int | None) -> Generator[str]:
        last = self._dialogue.last
        start = last.answer_start - 1  # only the last token has logits
        tokens = self._text.tokens[start : last.answer_start]
        attempt = self._dialogue.attempts[-1] + 1 + self._n_empty
        turn = replace(last.unanswered, attempt=attempt)
        frames = self._template.frames([*self._template.shortened(self.turns[:-1]), turn])
        dialogue = self._dialogue.open_again(self._text.tokens)
        yield from self._write(turn, frames, start, tokens, dialogue, max_tokens)

    def _reply(
        self, message: str, turns: tuple[Turn, ...], start: int, max_tokens: int | None
    ) -> Generator[str]:
        """Answer a message after these turns and the first `start` tokens."""
        if self.llm.model.projector is not None:
            self._files |= self.llm.model.projector.files_in(message)
            if not set(keys_in(message)) <= self._files.keys():
                raise PictureError("a picture of the message is missing: add it again")
        inserted = note_for_message(message, turns, self.lore, self.note)
        turn = replace(open_turn(message), attempt=self._n_empty, inserted=inserted)
        text, template = self._text, self._template
        if turns:
            text.drop(self._reasoning_spans(turns[-1:], text.tokens))
        frames, turns, tokens, pins = self._followed(turns, turn)
        start = len(tokens)
        lead = template.lead(frames, tokens[turns[-1].answer_start :] if turns else ())
        if not turns:  # it may merge with the opening's last token
            start = n_common(lead[:-1], text.tokens[:start])
            lead = lead[start:]
        turn = replace(turn, start=start, answer_start=start + len(lead))
        n_same = min(start, n_common(tokens, text.tokens))
        tokens = tokens[n_same:start] + lead
        yield from self._write(turn, frames, n_same, tokens, Dialogue(turns), max_tokens, pins)

    def _followed(
        self, turns: tuple[Turn, ...], turn: Turn
    ) -> tuple[Frames, tuple[Turn, ...], list[int], Pins]:
        """Return the prompt of a new turn, and the turns, tokens and pins before it.

        They change if the template writes the first `turns` of the conversation in another way now.
        """
        text, template = self._text, self._template
        some = template.shortened(turns)
        frames = template.frames([*some, turn])
        if not self.turns:
            return frames, (), text.tokens, self.pins
        last = self.turns[-1].unanswered
        is_next = turns == self.turns
        before = template.frames([*(some[:-1] if is_next else some), last])
        if frames.n_same(before, len(some)) == len(some):
            return frames, turns, text.tokens[: None if is_next else last.start], self.pins
        frames = template.frames([*turns, turn])
        n_same = frames.n_same(template.frames([*self.turns[:-1], last]), len(turns))
        layout = lay_out(
            self.llm, template, self._places, turns, text.tokens, self.pins,
            frames=frames, n_same=n_same,
        )  # fmt: skip
        return frames, layout.turns, layout.tokens, layout.pins

    def _write(
        self,
        turn: Turn,
        frames: Frames,
        start: int,
        tokens: list[int],
        dialogue: Dialogue,
        max_tokens: int | None,
        pins: Pins | None = None,
    ) -> Generator[str]:
        """Replace the text after the first `start` tokens by new tokens and the answer of a turn.

        Args:
            turn: the turn; it has an end if its answer is continued.
            frames: its prompt.
            start, tokens: length of the text that stays, and what follows.
            dialogue: the other turns.
            max_tokens: maximum number of new tokens.
            pins: pinned spans of the new text; None for the present ones.
        """
        if max_tokens is not None and max_tokens < 1:
            raise SettingsError(f"max_tokens is {max_tokens}: give 1 or more, or None for no limit")
        check_room(self.llm, start + len(tokens))
        text = self._text
        before, removed = self._dialogue, text.tokens[start:]
        old_pins, spans = text.pins, text.dropped
        started = text.tokens[turn.part_starts[-1] : turn.end]
        rest: list[str] = []
        run: AnswerRun | None = None
        try:
            self._dialogue = dialogue
            text.truncate(start, may_return=True)
            text.tokens += tokens
            if pins is None or pins == old_pins:
                text.pin_first(old_pins, start + n_common(tokens, removed))
            else:
                text.pin(pins)
                text.drop(self._reasoning_spans(dialogue.turns, text.tokens))
            self._pin_told(turn)
            run = self._answering = self._run(turn, frames, started, max_tokens)
            self._record(at_once=True)
            for piece in self._sample(run, max_tokens):
                yield piece
                self._record()
        except (GeneratorExit, KeyboardInterrupt):
            if run is not None:
                run.finish = FINISH_INTERRUPTED
                self._record(at_once=True)
            raise
        finally:
            self._answering = None
            if run is None or not run.n_new or text.is_there():
                rest = [] if run is None else run.end()
                if run is None or not self._keep(run):
                    self._dialogue = before
                    text.restore(start, removed, old_pins, spans)
        yield from rest

    def _pin_told(self, turn: Turn) -> None:
        """Pin a message with lore or a note, if half of the heavy rows stay free."""
        budget = self.llm.model.budget
        if turn.inserted and budget is not None:
            pins = merged([*self.pins, (turn.start, turn.answer_start)])
            if sum(end - start for start, end in pins) <= budget.heavy // 2:
                self._text.pin(pins)

    def _run(
        self, turn: Turn, frames: Frames, started: list[int], max_tokens: int | None
    ) -> AnswerRun:
        """Return the answer of a turn, which continues after its tokens `started`."""
        at = len(self.turns), turn.attempt, len(turn.steps)
        seed = answer_seed(self.sampling.seed, *at)
        sampling = replace(self.sampling, seed=seed)
        request = Request(
            messages=(), sampling=sampling, max_tokens=max_tokens, keep_reasoning=True
        )
        kept = self._text.kept
        tokens = kept[: len(kept) - len(started)]
        prompt = replace(frames.prompt, tokens=tokens, is_text=False)
        endless = EndlessText(started)

        def watch(token: int) -> str | None:
            return FINISH_REPETITION if endless.add(token) else None

        answer = Answer(self.llm, request, prompt, before=started, watch=watch)
        return AnswerRun(answer, turn, started)

    def _sample(self, run: AnswerRun, max_tokens: int | None) -> Generator[str]:
        """Evaluate the unread tokens and sample the answer."""
        llm, text = self.llm, self._text
        if self._places.fair_turns:
            # the tokens before the first turn are a separate part
            starts = [*(turn.start for turn in self.turns), run.turn.part_starts[-1]]
            with llm.lock:
                llm.cache.share_fairly([start for start in starts if start > 0])
        start = len(text.tokens) - len(run.before)
        with text.sampling(max_tokens):
            run.answer.unread = text.unread
            try:
                for event in run.answer:
                    text.tokens += run.answer.tokens[len(text.tokens) - start :]
                    text.look()
                    yield from run.take(event)
                    if not text.is_there():
                        raise PyH2OError(
                            "the model was used for another text while the answer was generated: "
                            "finish an answer before using its model for anything else"
                        )
            finally:
                text.tokens += run.answer.tokens[len(text.tokens) - start :]
        run.finish = run.answer.generation.finish or finish_without_room(llm.evicting)

    def _keep(self, run: AnswerRun) -> bool:
        """Add an answer as a turn; return False if it has no tokens or failed.

        After results of tools it may have no tokens.
        """
        text = self._text
        if not run.kept and not (run.turn.steps and run.finish):
            self._n_empty += run.finish == FINISH_STOP
            return False
        end = run.turn.part_starts[-1] + run.kept
        # The template's end of an answer replaces the tokens of a stop string.
        if end < self.llm.n_tokens and not text.has_rows(end):
            end = len(text.tokens)
        text.truncate(end)
        self._dialogue = replace(self._dialogue, turns=(*self.turns, run.made_turn(end)))
        self._n_empty = 0
        return True

    # ---------------------------------------------------------------------------------------------
    # Storage
    # ---------------------------------------------------------------------------------------------

    def _settings(self) -> ConversationSettings:
        return ConversationSettings(
            **self._common_settings(),
            template=self._template.fingerprint,
            system=self.system,
            tools=self.tools,
            thinking=self.thinking,
            places=self._places,
            empty=self._n_empty,
            lore=self.lore,
            note=self.note,
        )

    def _messages(self) -> tuple[list[Message], list[Message]]:
        dialogue, tokens = self._dialogue, self._text.tokens
        if self._answering is not None:
            turn = self._answering.made_turn(len(tokens))
            dialogue = replace(dialogue, turns=(*dialogue.turns, turn))
        return messages_of(dialogue, tokens)

    def _pictures(self) -> dict[str, bytes]:
        turns = (*self.turns, *(answer.turn for answer in (self._answering,) if answer))
        keys = dict.fromkeys(key for turn in turns for key in keys_in(turn.user))
        return {key: self._files[key] for key in keys if key in self._files}

    @classmethod
    def _of(cls, contents: Contents, kv_file: Path, llm: Text) -> Conversation:
        with damage_found(kv_file.with_suffix("")):
            if contents.info.kind != CONVERSATION:
                raise SessionError(f"{contents.info.title} is a story: open it with generate")
            saved = record_of(ConversationSettings, contents.info.settings, "settings")
            dialogue, tokens = dialogue_of(contents)
        remember_pictures(llm, contents)
        is_same = saved.model.is_same(model_identity(llm.model))
        conversation = cls(
            llm,
            system=saved.system,
            tools=saved.tools,
            # another model may not support reasoning
            thinking=saved.thinking if is_same else USUAL,
            sampling=saved.sampling,
            pin_system=saved.places.pin_system,
            fair_turns=saved.places.fair_turns,
        )
        conversation.lore, conversation.note = saved.lore, saved.note
        conversation._files = dict(contents.pictures)
        template = conversation._template
        if is_same and template.fingerprint == saved.template:
            conversation._dialogue, conversation._n_empty = dialogue, saved.empty
            conversation._load_text(tokens or conversation.tokens, saved, kv_file)
            return conversation
        if not is_same:
            stopped = (replace(turn, finish=FINISH_STOP, calls=()) for turn in dialogue.turns)
            dialogue, tokens, saved = Dialogue(tuple(stopped)), [], replace(saved, pins=())
        conversation._dialogue = dialogue
        places = conversation._places
        conversation._begin(lay_out(llm, template, places, dialogue.turns, tokens, saved.pins))
        conversation.reread_reason = (
            "it was saved with another chat template" if is_same else saved.model.why_reread()
        )
        return conversation


def remember_pictures(llm: Text, contents: Contents) -> None:
    """Pass the pictures of a text to the model's projector.

    Raises:
        SessionError: the model has none.
    """
    for picture in contents.pictures.values():
        if llm.model.projector is None:
            raise SessionError(
                f"the session {contents.info.title} has pictures, and the model was loaded without "
                "a projector: give it one (--mmproj FILE)"
            )
        llm.model.projector.remember(picture)
