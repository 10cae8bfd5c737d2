"""Stories: texts of any length that can be stopped and continued at any token.

A story's tokens are a function of model, settings, prompt and sampling: a story that was saved and
loaded continues with the same tokens as without the break.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

import numpy as np
import numpy.typing as npt

from ..errors import PyH2OError, SettingsError
from ..writing.chat_guide import ChatGuide
from ..writing.chat_prompt import rendered
from ..writing.finish import (
    FINISH_INTERRUPTED,
    FINISH_REPETITION,
    FINISH_STOP,
    FINISH_UNTIL,
    finish_without_room,
)
from ..writing.generation import Generation
from ..writing.pieces import Piece
from ..writing.prompt import check_room
from ..writing.request import Request
from ..writing.writer import Writer
from .lorebooks import KEY_CHARACTERS, note_for_passage
from .story_notes import bracket_tokens, insert_note, n_of_notes, n_with_notes
from .story_passages import Passage
from .story_text import StoryText, written_bytes


class Story(StoryText):
    """A text of any length that continues a prompt.

    The story owns the model while it is generated. If the model was used for another text in
    between, the story is restored from the last snapshot of the cache, and the rest is read again.

    Lore and the author's note are inserted in brackets near the start of a passage (a `write`):
    between two paragraphs or sentences of the last 128 tokens, which are read again. Small models
    copy notes, so "[" is suppressed while one is active. Notes are not part of the text, and are
    dropped (`Text.drop_spans`) when the next passage starts with its own, without reading the
    tokens after them again. A full cache keeps them.

    Attributes:
        llm: the text of the model.
        n_prompt: number of tokens of the prompt, without notes.
        sampling: sampling settings.
        finish: finish reason of the last `write`: "stop" (the model ended its text), "length"
            (`max_tokens`, or a full window without eviction), "until" (a stop text was generated),
            "repetition" (repeated loops), "trained_context" (no positions left), or "interrupted"
            (the caller closed the generator). None before the first one, and during one.
        n_read, read_seconds: number of tokens read before the first generated one, and the time for
            them and the first one.
        seconds: time for all other tokens, including earlier processes.
        notes: the caller's data, which is saved with the story; JSON values.
        memory: text before the prompt that is not part of the story.
        lore: entries that are inserted before a passage when a key matches (see `lorebooks`).
        note: author's note, which is inserted before each passage; "" for none.
        inserted: spans of the inserted notes.
        passages: the generated or edited passages, in order.
        thinking: reasoning settings.
    """

    _refused: Sequence[int] = ()  # tokens that cannot end the text now
    _brackets: Sequence[int] = ()  # tokens with an opening bracket
    _has_note = False

    def write(self, max_tokens: int | None = None) -> Generator[str, None, None]:
        """Continue the story; may be called repeatedly.

        If the model had ended its text, it cannot end it again with the next token. If a stop text
        had ended the story, that text becomes a part of it.

        Args:
            max_tokens: maximum number of tokens; None for no limit.

        Yields:
            The new text after each token, which may be empty. `held_back` is not yielded.

        Raises:
            SettingsError: `max_tokens` is less than 1.
            ContextLimitError: no position is left.
        """
        if max_tokens is not None and max_tokens < 1:
            raise SettingsError(f"max_tokens is {max_tokens}: give 1 or more, or None")
        self.finish = None
        if not self.passages or self.passages[-1].text:
            self.passages.append(Passage(len(self.tokens)))
        passage = self.passages[-1]
        passage.finish = None
        shown = "" if self._pieces.size else self._opening  # comes with the first piece
        try:
            for piece in self._write(max_tokens):
                passage.texts.append(piece.removeprefix(shown))
                shown = "" if piece else shown
                self._record()
                yield piece
        except (GeneratorExit, KeyboardInterrupt):
            self.finish = self.finish or FINISH_INTERRUPTED
            raise
        finally:
            passage.finish = self.finish or FINISH_INTERRUPTED

    def _write(self, max_tokens: int | None) -> Generator[str, None, None]:
        llm, text = self.llm, self._text
        self._prepare_cache()
        # The last generated token is always unread; more unread tokens, or the prompt, are prefill.
        n_unread = len(text.unread)
        n_read = n_unread if n_unread > 1 or not self.written else 0
        self._refused = llm.model.end_tokens if self._ended or self._ignore_eos else []
        self._writer = self._writer or Writer(
            llm,
            self.sampling,
            written=self.own_tokens[self.n_prompt :],
            logits_processor=self._forbid,
            grammar=self._guide(),
        )
        generation = Generation(
            text.tokens,
            self._parts,
            self._pieces,
            is_end=llm.model.is_end,
            limit=max_tokens,
            at_stop=FINISH_UNTIL,
            watch=self._watch,
        )
        started = time.monotonic()
        for pieces in generation.run(text.write(self._writer, max_tokens)):
            self._count(time.monotonic() - started, n_read)
            n_read = 0
            self._ended = False
            self.finish = generation.finish
            yield self._certain(pieces)
            if self.finish is None and not text.is_there():
                raise PyH2OError(
                    "the model was used for another text while the story was generated: call "
                    "write() again, which reads the story first"
                )
            started = time.monotonic()
        if generation.finish == FINISH_STOP:
            self._count(time.monotonic() - started, n_read)
            self._ended = True
            self._writer = None  # the next one continues as if this token had not been sampled
            self.finish = FINISH_STOP
            yield self._certain(self._pieces.feed(b""))
        elif generation.finish is None:
            self.finish = finish_without_room(llm.evicting)

    def _guide(self) -> ChatGuide | None:
        """Return the guide that ends the reasoning, if it has a budget."""
        if self.thinking.limit is None:
            return None
        request = Request(messages=[{"role": "user", "content": "?"}], reasoning=self.thinking)
        guide = rendered(self.llm.model, request).guide
        assert isinstance(guide, ChatGuide)
        for token in self.tokens[self.n_prompt :]:
            guide.take(token)
        return guide

    def _prepare_cache(self) -> None:
        """Restore the text in the cache, with at least one token left to evaluate."""
        llm, text = self.llm, self._text
        check_room(llm, len(text.tokens) - 1)
        text.reclaim()
        self._insert_note()
        # If the model has ended its text, all is evaluated, but the logits are needed again.
        if llm.n_tokens == len(text.tokens):
            if not llm.remove_tail(llm.n_tokens - 1):
                text.recover(len(text.tokens) - 1)
            text.look()

    def _insert_note(self) -> None:
        """Insert lore and note of this passage, and drop those of the previous one."""
        own = self.own_tokens if self.lore else []
        # nearly all tokens have at least one character
        newest = written_bytes(self.llm, own, max(0, len(own) - KEY_CHARACTERS))
        note = note_for_passage(newest.decode(errors="ignore"), self.lore, self.note)
        # a prompt that is not shown is not split
        first = 0 if self._opening else n_with_notes(self.n_prompt, self.inserted)
        inserted = insert_note(self._text, self.inserted, note, first)
        for passage in self.passages:
            start = passage.start
            passage.start = n_with_notes(start - n_of_notes(start, self.inserted), inserted)
        self.inserted = inserted
        if note and not self._brackets:
            self._brackets = bracket_tokens(self.llm.model)
        self._has_note = bool(note)

    def _watch(self, token: int) -> str | None:
        """Check for loops after each token; return a finish reason if the text has to end."""
        if not self._ignore_eos:
            self._refused = []
        if self._guard is None:
            return None
        self._guard.add(token)
        return FINISH_REPETITION if self._guard.hopeless else None

    def _certain(self, pieces: list[Piece]) -> str:
        """Return the text that is final; a stop text stays held back."""
        if self._pieces.stopped:
            pieces = pieces + self._pieces.finish()
        return "".join(piece.text for piece in pieces)

    def _count(self, seconds: float, n_read: int) -> None:
        """Add the time of a token; if prompt tokens were read for it, to the prefill time."""
        if n_read:
            self.n_read += n_read
            self.read_seconds += seconds
        else:
            self.seconds += seconds

    def _forbid(
        self, _input_ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        forbidden = [] if self._guard is None else self._guard.forbidden
        logits[[*forbidden, *self._refused]] = -np.inf
        if self._has_note:
            logits[self._brackets] = -np.inf
        return logits
