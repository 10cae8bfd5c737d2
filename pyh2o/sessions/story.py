"""Stories: texts of any length that can be left at any token and gone on with exactly there.

A story's tokens are a function of the model, its settings, the prompt and the sampling: a story
that was saved and loaded goes on with the tokens it would have had without.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Generator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.detokenizer import Detokenizer, detokenizer
from ..core.prefixes import n_common
from ..core.text import HasText, Text, text_of
from ..core.utf8 import utf8
from ..core.vocabulary import suffix_tokens
from ..errors import PyH2OError, SessionError, SettingsError
from ..writing.cache_copies import DEFAULT_MIB
from ..writing.cached_text import CachedText, Span
from ..writing.chat_guide import ChatGuide
from ..writing.chat_template import ChatTemplate
from ..writing.finish import (
    FINISH_INTERRUPTED,
    FINISH_REPETITION,
    FINISH_STOP,
    FINISH_UNTIL,
    finish_without_room,
)
from ..writing.generation import Generation
from ..writing.pieces import Piece, TextPieces
from ..writing.prompt import check_prompt, check_room, prompt_text, prompt_tokens
from ..writing.repetition import RepetitionGuard
from ..writing.sampling import Sampling
from ..writing.thinking import USUAL, Thinking
from ..writing.writer import Writer
from .headers import SavedStory, open_session
from .layout import check_pins
from .lorebooks import KEY_CHARACTERS, LoreEntry, told_in_story
from .records import in_one_line
from .session_file import damage_found
from .story_notes import bracket_tokens, hidden_spans, n_with_told, own_tokens, tell
from .text_session import TextSession
from .unfinished import Notes


class Story(TextSession):
    """A text that goes on after a prompt, for as long as one likes.

    The model belongs to the story while it is written. If it was used for something else in
    between, the story is read again from the last copy of the cache (cache_copies.py).

    What the model is told of a lorebook, and the author's note, stand as a note in brackets near
    where a passage (a `write`) begins: between two paragraphs or sentences among the 128 tokens
    before it, which are read again. Small models copy them, so none can write "[" then. They are no
    part of the text, and are dropped (`Text.drop_spans`) when the next passage begins, which has
    its own: nothing behind them is read again for that. A full cache keeps them.

    Attributes:
        llm: the model.
        n_prompt: how many of its own tokens are the prompt's.
        sampling: how tokens are drawn.
        finish: why the last `write` has ended: "stop" (the model ended its text), "length" (enough
            tokens, or without eviction a full window), "until" (a stop text came), "repetition"
            (loop after loop), "trained_context" (no positions left), or "interrupted" (the caller
            wanted no more). None before, and while it goes on.
        n_read, read_seconds: tokens that were read before the first one was written, and how long
            that took, with the first one.
        seconds: it took to write the others, also in earlier processes.
        notes: what whoever writes the story wants to find again when it is loaded; fit for JSON.
        memory: what the model is told before the prompt, and what is no part of the text.
        lore: what it is told where a passage begins, if it has come up (see `lorebooks`).
        note: what it is told where each passage begins; "" for nothing.
        told: where that is among the tokens.
        noted_beside: the file that it is saved as, beside which a passage is noted while it is
            written, with its text behind that in the notes (`text`; see `unfinished`); None notes
            nothing.
        thinking: how long the model thinks first.
    """

    def __init__(
        self,
        llm: Text | HasText,
        prompt: str | Sequence[int],
        *,
        sampling: Sampling | None = None,
        until: Sequence[str] = (),
        echo: bool = False,
        memory: str = "",
        loop_guard: bool = True,
        ignore_eos: bool = False,
        thinking: Thinking = USUAL,
        copies_mib: int = DEFAULT_MIB,
    ) -> None:
        """Begin a story; nothing is evaluated yet.

        Args:
            llm: the model; its cache is emptied.
            prompt: text, or tokens as they are.
            sampling: how tokens are drawn; None for the defaults.
            until: texts that the story ends before.
            echo: whether the text begins with the prompt.
            memory: what the model is told before a prompt of text, and what is never evicted.
            loop_guard: whether loops are broken (see repetition.py).
            ignore_eos: whether the model may not end its text.
            thinking: how long the model thinks first, of a prompt that `asked_for` made.
            copies_mib: most MiB of memory that copies of the cache may take; 0 for none.

        Raises:
            ValueError: the prompt has no token.
            TextError: the prompt, the memory or a text of `until` is not Unicode.
            ContextLimitError: the prompt leaves no position to write at.
            SettingsError: the memory does not fit the budget, or the model has no such thoughts.
        """
        self.llm = llm = text_of(llm)
        self.memory, self.thinking = memory, thinking
        self.lore: tuple[LoreEntry, ...] = ()
        self.note = ""
        self.told: tuple[Span, ...] = ()
        self.noted_beside: Path | None = None
        self._saved: list[int] = []  # tokens in its file
        self._brackets: list[int] = []  # tokens that notes begin with
        self._is_told = False
        tokens = self._prompt_tokens(prompt)
        check_prompt(llm, tokens)
        self.n_prompt = len(tokens)
        self.sampling = sampling or Sampling()
        self.finish: str | None = None
        self.n_read, self.read_seconds, self.seconds = 0, 0.0, 0.0
        self.notes: dict[str, Any] = {}
        self._opening = prompt_text(llm.model, prompt) if echo else ""
        self._until = list(until)
        held = self._opening.encode()
        self._pieces = self._new_pieces(held=held, unsearched=len(held))
        self._text = CachedText(llm, copies_mib=copies_mib)
        self._text.begin(tokens)
        if memory:
            self.pin(0, n_common(tokens, prompt_tokens(llm.model, f"{memory}\n")))
        self._guard = RepetitionGuard() if loop_guard else None
        self._follow_written()
        self._ignore_eos = ignore_eos
        self._writer: Writer | None = None
        self._ended = False
        self._refused: list[int] = []

    @property
    def written(self) -> int:
        """Tokens of the story, without the prompt's."""
        n_told = sum(end - start for start, end in self.told)
        return len(self.tokens) - n_told - self.n_prompt

    @property
    def own_tokens(self) -> list[int]:
        """Those of the prompt and of the text, without what the model was told in between."""
        return own_tokens(self.tokens, self.told)

    @property
    def hidden(self) -> list[Span]:
        """Where its tokens are no part of its text: the memory, what the model was told."""
        return hidden_spans(
            self.llm.model,
            self.tokens,
            self.told,
            n_prompt=self.n_prompt,
            opening=self._opening,
            memory=self.memory,
        )

    @property
    def loops(self) -> int:
        """Loops broken so far."""
        return 0 if self._guard is None else self._guard.loops

    @property
    def held_back(self) -> str:
        """Text that `write` has not given out: a stop text may begin in it, or one came."""
        return self._pieces.held.decode(errors="ignore")

    def text(self) -> str:
        """All text given out so far, with the opening."""
        story = _written(self.llm, self.own_tokens, self.n_prompt)
        whole = self._opening + story.decode(errors="ignore")
        return whole.encode()[: self._pieces.size].decode()

    def begins_with(self, prompt: str | Sequence[int]) -> bool:
        """Whether this is the prompt that the story goes on after."""
        return self._prompt_tokens(prompt) == self.own_tokens[: self.n_prompt]

    def _prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        """Those to begin with: with the memory before a text."""
        has_memory = self.memory and isinstance(prompt, str)
        return prompt_tokens(self.llm.model, f"{self.memory}\n{prompt}" if has_memory else prompt)

    # ---------------------------------------------------------------------------------------------
    # Writing
    # ---------------------------------------------------------------------------------------------

    def write(self, max_tokens: int | None = None) -> Generator[str, None, None]:
        """Go on with the story; may be called again and again.

        To go on after the model ended its text forbids it to do so again at once. To go on after a
        stop text makes that a part of the story.

        Args:
            max_tokens: most tokens to write; None for no limit.

        Yields:
            The text that each token adds, perhaps none. Together they are the story without what is
            `held_back` in the end.

        Raises:
            SettingsError: less than one token is asked for.
            ContextLimitError: there is no position left.
        """
        if max_tokens is not None and max_tokens < 1:
            raise SettingsError(f"max_tokens is {max_tokens}: give 1 or more, or None")
        self.finish = None
        notes, new = Notes(self.noted_beside, self._saved), list[str]()
        before = self.text() if self.noted_beside else ""
        try:
            for piece in self._write(max_tokens):
                if self.noted_beside:
                    new.append(piece)
                if notes.is_due:
                    self._note(notes, before, "".join(new))
                yield piece
        except (GeneratorExit, KeyboardInterrupt):
            self.finish = self.finish or FINISH_INTERRUPTED
            raise

    def _note(self, notes: Notes, before: str, new: str) -> None:
        """Note a passage in the making, behind the text that was before."""
        n_same = len(before) if str(self.notes.get("text", "")).startswith(before) else 0
        header = self._own_header() | {"finish": FINISH_INTERRUPTED}
        del header["lore"]  # it is long, and as it was
        header["notes"] = {**self.notes, "text": before[n_same:] + new}
        notes.note_story(self.tokens, n_common(self._saved, self.tokens), header, n_same)

    def _write(self, max_tokens: int | None) -> Generator[str, None, None]:
        llm, text = self.llm, self._text
        self._prepare_cache()
        # The token written last is always unread; to read more, or the prompt, is no writing.
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
        asked = time.monotonic()
        for pieces in generation.run(text.write(self._writer, max_tokens)):
            self._count(time.monotonic() - asked, n_read)
            n_read = 0
            self._ended = False
            self.finish = generation.finish
            yield self._certain(pieces)
            if self.finish is None and not text.is_there():
                raise PyH2OError(
                    "the model was used for another text while the story was being written: call "
                    "write() again, which reads the story first"
                )
            asked = time.monotonic()
        if generation.finish == FINISH_STOP:
            self._count(time.monotonic() - asked, n_read)
            self._ended = True
            self._writer = None  # another one goes on as if this token had not been drawn
            self.finish = FINISH_STOP
            yield self._certain(self._pieces.feed(b""))
        elif generation.finish is None:
            self.finish = finish_without_room(llm.evicting)

    def _guide(self) -> ChatGuide | None:
        """What ends the thoughts of the text, if they have a budget."""
        if self.thinking.limit is None:
            return None
        template = ChatTemplate(self.llm.model, None, thinking=self.thinking)
        return template.guide(self.tokens[self.n_prompt :])

    def _prepare_cache(self) -> None:
        """Have some of the text to evaluate, usually the token written last, and no other text."""
        llm, text = self.llm, self._text
        check_room(llm, len(text.tokens) - 1)
        text.reclaim()
        self._tell()
        # All is evaluated when the model has ended its text; the logits are needed once more.
        if llm.n_tokens == len(text.tokens):
            if not llm.remove_tail(llm.n_tokens - 1):
                text.recover(len(text.tokens) - 1)
            text.look()

    def _tell(self) -> None:
        """Tell the model what this passage is to know; what the one before was told goes."""
        own = self.own_tokens if self.lore else []
        # a character has a token or less, but for a few
        newest = _written(self.llm, own, max(0, len(own) - KEY_CHARACTERS))
        note = told_in_story(newest.decode(errors="ignore"), self.lore, self.note)
        # a prompt that is not shown is no text
        first = 0 if self._opening else n_with_told(self.n_prompt, self.told)
        self.told = tell(self._text, self.told, note, first)
        if note and not self._brackets:
            self._brackets = bracket_tokens(self.llm.model)
        self._is_told = bool(note)

    def _watch(self, token: int) -> str | None:
        """Look for a loop with each token that was drawn; whether the text has to end for it."""
        if not self._ignore_eos:
            self._refused = []
        if self._guard is None:
            return None
        self._guard.add(token)
        return FINISH_REPETITION if self._guard.hopeless else None

    def _certain(self, pieces: list[Piece]) -> str:
        """The text that is certain now; a stop text stays held back."""
        if self._pieces.stopped:
            pieces = pieces + self._pieces.finish()
        return "".join(piece.text for piece in pieces)

    def _count(self, seconds: float, n_read: int) -> None:
        """Time a token; if others were read for it, that was the reading."""
        if n_read:
            self.n_read += n_read
            self.read_seconds += seconds
        else:
            self.seconds += seconds

    def _new_pieces(self, **state: Any) -> TextPieces:
        return TextPieces([utf8(text) for text in self._until], **state)

    def _forbid(
        self, _input_ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        forbidden = [] if self._guard is None else self._guard.forbidden
        logits[forbidden + self._refused] = -np.inf
        if self._is_told:
            logits[self._brackets] = -np.inf
        return logits

    # ---------------------------------------------------------------------------------------------
    # Editing
    # ---------------------------------------------------------------------------------------------

    def edit(self, text: str) -> None:
        """Put another text in the place of all that was given out.

        The tokens stay up to where it differs; the next `write` reads the others, and what of
        their prefix is neither in the cache nor in a copy of it. As many characters as before
        count as the prompt's, and the others as written.

        Args:
            text: with the prompt, if the story's text begins with it.

        Raises:
            ValueError, ContextLimitError: as for a prompt.
        """
        n_prompt, opening, own = self.n_prompt, self._opening, self.own_tokens
        if text.startswith(opening):
            same = takewhile(lambda pair: pair[0] == pair[1], zip(text, self.text(), strict=False))
            n_written, n_characters = _whole_tokens(
                _parts_after(self.llm, own[:n_prompt]),
                own[n_prompt:],
                text[len(opening) : sum(1 for _ in same)],
            )
            n_same = n_prompt + n_written
            end = suffix_tokens(self.llm.model, text[len(opening) + n_characters :])
            tokens = [*own[:n_same], *end]
        else:
            opening = text[: len(opening)]
            tokens = self._prompt_tokens(opening)
            n_prompt = len(tokens)
            tokens += suffix_tokens(self.llm.model, text[len(opening) :])
            n_same = n_common(tokens, own)
        check_prompt(self.llm, tokens)
        if _written(self.llm, tokens, n_prompt) != utf8(text[len(opening) :]):
            n_prompt, opening = len(tokens), text  # tokens cannot say everything that is typed
        self._text.reclaim()
        n_left = n_with_told(n_same, self.told)
        self._text.truncate(n_left)
        self._text.tokens += tokens[n_same:]
        self.told = tuple(span for span in self.told if span[1] <= n_left)
        self.n_prompt, self._opening = n_prompt, opening
        self.finish, self._ended, self._writer = None, False, None
        self._pieces = self._new_pieces(size=len(text.encode()))
        self._follow_written()

    def cut(self, n_characters: int) -> None:
        """Take back what was given out behind so many characters; otherwise as `edit`."""
        self.edit(self.text()[:n_characters])

    def _follow_written(self) -> None:
        """Tell what watches the tokens of those that were written already."""
        own = self.own_tokens
        self._parts = _parts_after(self.llm, own[: self.n_prompt])
        if self._guard is not None:
            self._guard = RepetitionGuard(own[: self.n_prompt])
        for token in own[self.n_prompt :]:
            self._parts.feed(token)
            if self._guard is not None:
                self._guard.add(token)

    # ---------------------------------------------------------------------------------------------
    # Files
    # ---------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a session file that `load` goes on from; an old one stays whole until it is there.

        It can be called while `write` waits to be asked for more. If the model has another text by
        now, the file has no state of the cache, and the story is read again when it is loaded.

        Raises:
            SessionError: the file cannot be written.
        """
        self._write_file(path, SavedStory(**self._header(), **self._own_header()))
        self._saved = list(self.tokens)

    def _own_header(self) -> dict[str, Any]:
        """What the header of its file has because it is a story."""
        return {
            "prompt_tokens": self.n_prompt,
            "opening": self._opening,
            "text_bytes": self._pieces.size,
            "held": self._pieces.held.hex(),
            "unsearched": self._pieces.unsearched,
            "finish": self.finish,
            "ended": self._ended,
            "until": self._until,
            "loop_guard": self._guard is not None,
            "ignore_eos": self._ignore_eos,
            "seconds": self.seconds,
            "notes": self.notes,
            "memory": self.memory,
            "told": self.told,
            "lore": self.lore,
            "note": self.note,
            "thinking": self.thinking,
        }

    @classmethod
    def load(
        cls,
        path: str | Path,
        llm: Text | HasText,
        *,
        reread: bool = False,
        until: Sequence[str] | None = None,
        loop_guard: bool | None = None,
        ignore_eos: bool | None = None,
        copies_mib: int = DEFAULT_MIB,
    ) -> Story:
        """Go on with a story that was saved, in the same model with the same settings.

        A state of the cache that does not fit is left: the text is read again then, and the tokens
        that follow may be others than without the break, because other rows are kept.
        `story.llm.archive_trouble` says what the archive of recall has lost.

        Args:
            path: of the session file, which stays as it is.
            llm: the model; its cache is replaced, unless the file is refused.
            reread: read all of the text again with the next `write`, which builds the archive anew,
                under any model and any settings. The same model reads its tokens, another one the
                text in the notes of whoever saved it, and has no pins.
            until: texts that the story ends before from now on; None for those it had.
            loop_guard: whether loops are broken from now on; None for what it was.
            ignore_eos: whether the model may not end its text from now on; None for what it was.
            copies_mib: as for a new story.

        Raises:
            SessionError: no such file, or it is damaged, of another format, or without `reread` of
                another model or other settings; with `reread` its notes do not have its text.
            SettingsError: with `reread`: there is no room for what is pinned.
        """
        llm = text_of(llm)
        session, saved, is_same_model = open_session(path, SavedStory, llm.model, reread=reread)
        own, text = own_tokens(session.tokens, saved.told), saved.notes.get("text")
        if is_same_model:
            with damage_found(path):
                saved.check_text(_written(llm, own, saved.prompt_tokens))
            if reread:
                budget = llm.model.budget
                check_pins(llm, 0 if budget is None else budget.pinned, saved.pins)
        elif not isinstance(text, str):
            raise SessionError(
                f"{path} has the story in tokens only, which another model does not know: go on "
                f"with the model {in_one_line(saved.model.file)}"
            )
        story = cls(
            llm,
            own[: saved.prompt_tokens] if is_same_model else str(text),
            sampling=saved.sampling,
            until=saved.until if until is None else until,
            echo=not is_same_model,
            memory="" if is_same_model else saved.memory,
            loop_guard=saved.loop_guard if loop_guard is None else loop_guard,
            ignore_eos=saved.ignore_eos if ignore_eos is None else ignore_eos,
            thinking=saved.thinking if is_same_model else USUAL,
            copies_mib=copies_mib,
        )
        story.notes, story.memory = saved.notes, saved.memory
        story.lore, story.note = saved.lore, saved.note
        if not is_same_model:
            story.edit(str(text))  # what comes next is new text only
            return story
        story.told, story._saved = saved.told, session.tokens
        if reread:
            story._text.begin(session.tokens, pins=saved.pins, forgotten=saved.forgotten)
        else:
            story._read_file(path, session, saved)
        story.finish = saved.finish
        story._ended = saved.ended
        story.seconds = saved.seconds
        story._opening = saved.opening
        story._pieces = story._new_pieces(
            held=bytes.fromhex(saved.held), unsearched=saved.unsearched, size=saved.text_bytes
        )
        story._follow_written()
        return story


def _parts_after(llm: Text, prompt: Sequence[int]) -> Detokenizer:
    """The bytes of the tokens that a story has after its prompt."""
    return detokenizer(llm.model, prompt, starts_text=list(prompt) == [llm.model.token_bos()])


def _written(llm: Text, tokens: Sequence[int], n_prompt: int) -> bytes:
    """What a story says behind its prompt."""
    parts = _parts_after(llm, tokens[:n_prompt])
    return b"".join(map(parts.feed, tokens[n_prompt:]))


def _whole_tokens(parts: Detokenizer, tokens: Sequence[int], text: str) -> tuple[int, int]:
    """How many of the first tokens make a beginning of a text, and how many characters it has."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
    n_all = n_tokens = n_characters = 0
    for n, token in enumerate(tokens, 1):
        if n_all >= len(text):
            break
        n_all += len(decoder.decode(parts.feed(token)))
        is_amid_character = bool(decoder.getstate()[0])
        if n_all <= len(text) and not is_amid_character:
            n_tokens, n_characters = n, n_all
    return n_tokens, n_characters
