"""Stories: texts of any length that can be stopped and continued at any token.

A story's tokens are a function of model, settings, prompt and sampling: a story that was saved and
loaded continues with the same tokens as without the break.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.detokenizer import Detokenizer, detokenizer
from ..core.text import HasText, Text, text_of
from ..core.tokens import n_common
from ..core.utf8 import utf8
from ..core.vocabulary import suffix_tokens
from ..errors import PyH2OError, SessionError, SettingsError
from ..writing.cached_text import CachedText, Span
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
from ..writing.pieces import Piece, TextPieces
from ..writing.prompt import check_prompt, check_room, prompt_text, prompt_tokens
from ..writing.repetition import RepetitionGuard
from ..writing.request import Request
from ..writing.sampling import Sampling
from ..writing.thinking import USUAL, Thinking
from ..writing.writer import Writer
from .identity import model_identity
from .lorebooks import KEY_CHARACTERS, LoreEntry, note_for_passage
from .messages import STORY, Contents, Message, packed, unpacked
from .records import in_one_line, record_of
from .story_notes import (
    bracket_tokens,
    hidden_spans,
    insert_note,
    n_of_notes,
    n_with_notes,
    own_tokens,
)
from .story_passages import Passage, edited, n_same_characters
from .text_session import TextSession
from .text_settings import StorySettings, damage_found


class Story(TextSession):
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
        told: spans of the inserted notes.
        passages: the generated or edited passages, in order.
        thinking: reasoning settings.
    """

    kind = STORY

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
    ) -> None:
        """Start a story without evaluating the prompt.

        Args:
            llm: the model; its cache is emptied.
            prompt: text or tokens.
            sampling: sampling settings; None for the defaults.
            until: stop texts, before which the story ends.
            echo: whether the text includes the prompt.
            memory: text before a text prompt, which is pinned.
            loop_guard: whether loops are broken (see repetition.py).
            ignore_eos: whether end-of-text tokens are suppressed.
            thinking: reasoning settings, for a prompt from `prompt_for_message`.

        Raises:
            ValueError: the prompt has no tokens.
            TextError: the prompt, the memory or a stop text is not Unicode.
            ContextLimitError: the prompt leaves no position to generate a token.
            SettingsError: the memory does not fit the budget, or the model does not support the
                reasoning settings.
        """
        self.llm = llm = text_of(llm)
        self.memory, self.thinking = memory, thinking
        self.lore: tuple[LoreEntry, ...] = ()
        self.note = ""
        self.told: tuple[Span, ...] = ()
        self.passages: list[Passage] = []
        self._brackets: list[int] = []  # tokens with an opening bracket
        self._has_note = False
        tokens = self._prompt_tokens(prompt)
        check_prompt(llm, tokens)
        self.n_prompt = len(tokens)
        self.sampling = sampling or Sampling()
        self.finish: str | None = None
        self.n_read, self.read_seconds, self.seconds = 0, 0.0, 0.0
        self.notes: dict[str, Any] = {}
        self._prompt = prompt_text(llm.model, prompt)
        self._echo = echo
        self._opening = self._prompt if echo else ""
        self._until = list(until)
        held = self._opening.encode()
        self._pieces = self._new_pieces(held=held, unsearched=len(held))
        self._text = CachedText(llm)
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
        """Number of generated tokens."""
        n_tokens = len(self.tokens)
        return n_tokens - n_of_notes(n_tokens, self.told) - self.n_prompt

    @property
    def own_tokens(self) -> list[int]:
        """The tokens without notes."""
        return own_tokens(self.tokens, self.told)

    @property
    def hidden(self) -> list[Span]:
        """The spans of tokens that are not part of the text: memory and notes."""
        return hidden_spans(
            self.llm.model,
            self.tokens,
            self.told,
            n_prompt=self.n_prompt,
            has_opening=bool(self._opening),
            memory=self.memory,
        )

    @property
    def loops(self) -> int:
        """Number of loops broken so far."""
        return 0 if self._guard is None else self._guard.loops

    @property
    def held_back(self) -> str:
        """Text that `write` has not yielded, as it is or may become a stop text."""
        return self._pieces.held.decode(errors="ignore")

    def text(self) -> str:
        """Return all text yielded so far, after the prompt if it is included."""
        story = _written(self.llm, self.own_tokens, self.n_prompt)
        whole = self._opening + story.decode(errors="ignore")
        return whole.encode()[: self._pieces.size].decode()

    def begins_with(self, prompt: str | Sequence[int]) -> bool:
        """Return whether this is the prompt of the story."""
        return self._prompt_tokens(prompt) == self.own_tokens[: self.n_prompt]

    def _prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the tokens of a prompt, after the memory if it is text."""
        has_memory = self.memory and isinstance(prompt, str)
        return prompt_tokens(self.llm.model, f"{self.memory}\n{prompt}" if has_memory else prompt)

    # ---------------------------------------------------------------------------------------------
    # Writing
    # ---------------------------------------------------------------------------------------------

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
        newest = _written(self.llm, own, max(0, len(own) - KEY_CHARACTERS))
        note = note_for_passage(newest.decode(errors="ignore"), self.lore, self.note)
        # a prompt that is not shown is not split
        first = 0 if self._opening else n_with_notes(self.n_prompt, self.told)
        told = insert_note(self._text, self.told, note, first)
        for passage in self.passages:
            start = passage.start
            passage.start = n_with_notes(start - n_of_notes(start, self.told), told)
        self.told = told
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

    def _new_pieces(self, **state: Any) -> TextPieces:
        return TextPieces([utf8(text) for text in self._until], **state)

    def _forbid(
        self, _input_ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        forbidden = [] if self._guard is None else self._guard.forbidden
        logits[forbidden + self._refused] = -np.inf
        if self._has_note:
            logits[self._brackets] = -np.inf
        return logits

    # ---------------------------------------------------------------------------------------------
    # Editing
    # ---------------------------------------------------------------------------------------------

    def edit(self, text: str) -> None:
        """Replace the whole text.

        Tokens up to the first difference stay. The next `write` reads the others, and the part of
        the prefix that is neither in the cache nor in a snapshot. The length of the prompt in
        characters does not change.

        Args:
            text: the new text, with the prompt if the story includes it.

        Raises:
            ValueError, ContextLimitError: as for a prompt.
        """
        n_prompt, opening, own = self.n_prompt, self._opening, self.own_tokens
        old = self.text()
        if text.startswith(opening):
            n_written, n_characters = _whole_tokens(
                _parts_after(self.llm, own[:n_prompt]),
                own[n_prompt:],
                text[len(opening) : n_same_characters(text, old)],
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
            n_prompt, opening = len(tokens), text  # some texts cannot be tokenized exactly
        self._text.reclaim()
        n_left = n_with_notes(n_same, self.told)
        self._text.truncate(n_left)
        self._text.tokens += tokens[n_same:]
        self.told = tuple(span for span in self.told if span[1] <= n_left)
        prompt = self._prompt if self._echo else ""
        n_tokens = len(self.tokens)
        prompt, self.passages = edited(prompt, self.passages, text, n_left, n_tokens)
        if self._echo:
            self._prompt = prompt
        self.n_prompt, self._opening = n_prompt, opening
        self.finish, self._ended, self._writer = None, False, None
        self._pieces = self._new_pieces(size=len(text.encode()))
        self._follow_written()

    @property
    def _starts(self) -> list[int]:
        return [passage.start for passage in self.passages]

    def cut(self, n_characters: int) -> None:
        """Truncate the text to its first `n_characters` characters; see `edit`."""
        self.edit(self.text()[:n_characters])

    def _follow_written(self) -> None:
        """Pass the generated tokens to the new decoder and loop guard."""
        own = self.own_tokens
        self._parts = _parts_after(self.llm, own[: self.n_prompt])
        if self._guard is not None:
            self._guard = RepetitionGuard(own[: self.n_prompt])
        for token in own[self.n_prompt :]:
            self._parts.feed(token)
            if self._guard is not None:
                self._guard.add(token)

    # ---------------------------------------------------------------------------------------------
    # Storage
    # ---------------------------------------------------------------------------------------------

    def _settings(self) -> StorySettings:
        return StorySettings(
            **self._common_settings(),
            prompt_tokens=self.n_prompt,
            echo=self._echo,
            opening=len(self._opening),
            text_bytes=self._pieces.size,
            held=self._pieces.held.hex(),
            unsearched=self._pieces.unsearched,
            finish=self.finish,
            ended=self._ended,
            until=self._until,
            loop_guard=self._guard is not None,
            ignore_eos=self._ignore_eos,
            seconds=self.seconds,
            notes=self.notes,
            memory=self.memory,
            told=self.told,
            lore=self.lore,
            note=self.note,
            thinking=self.thinking,
        )

    def _messages(self) -> tuple[list[Message], list[Message]]:
        """Return the prompt and the passages."""
        starts = [*self._starts, len(self.tokens)]
        prompt = Message(
            self._prompt,
            "",
            FINISH_STOP,
            n_before=starts[0],
            tokens=packed(self.tokens[: starts[0]]),
        )
        written = [
            Message("", each.text, each.finish, tokens=packed(self.tokens[each.start : end]))
            for each, end in zip(self.passages, starts[1:], strict=True)
        ]
        return [prompt, *written], []

    @classmethod
    def load(
        cls,
        path: str | Path,
        llm: Text | HasText,
        *,
        until: Sequence[str] | None = None,
        loop_guard: bool | None = None,
        ignore_eos: bool | None = None,
    ) -> Story:
        """Load a saved story; see `TextSession.load`.

        Args:
            path: the session file, also one of an older pyh2o; it is not changed.
            llm: the model. Its cache is emptied, unless the file is rejected.
            until: new stop texts; None for the saved ones.
            loop_guard: whether loops are broken; None for the saved value.
            ignore_eos: whether end-of-text tokens are suppressed; None for the saved value.
        """
        story = super().load(path, llm)
        if until is not None:
            story._until = [*until]
            pieces = story._pieces
            story._pieces = story._new_pieces(
                held=pieces.held, unsearched=pieces.unsearched, size=pieces.size
            )
        if loop_guard is not None:
            story._guard = RepetitionGuard() if loop_guard else None
            story._follow_written()
        if ignore_eos is not None:
            story._ignore_eos = ignore_eos
        return story

    @classmethod
    def _of(cls, contents: Contents, kv_file: Path, llm: Text) -> Story:
        with damage_found(kv_file.with_suffix("")):
            if contents.info.kind != STORY:
                raise SessionError(f"{contents.info.title} is a conversation: open it with chat")
            saved = record_of(StorySettings, contents.info.settings, "settings")
            prompt, *written = contents.messages
            tokens = unpacked(b"".join(message.tokens for message in contents.messages))
            own = own_tokens(tokens, saved.told)
            whole = prompt.user if saved.echo else ""
            whole += "".join(message.answer for message in written)
        is_same = saved.model.is_same(model_identity(llm.model))
        if not is_same and not prompt.user:
            raise SessionError(
                f"{contents.info.title} has only tokens of the story, which another model cannot "
                f"read: continue it with the model {in_one_line(saved.model.file)}"
            )
        story = cls(
            llm,
            own[: saved.prompt_tokens] if is_same else prompt.user,
            sampling=saved.sampling,
            until=saved.until,
            echo=saved.echo,
            memory="" if is_same else saved.memory,
            loop_guard=saved.loop_guard,
            ignore_eos=saved.ignore_eos,
            thinking=saved.thinking if is_same else USUAL,
        )
        story.notes, story.lore, story.note = saved.notes, saved.lore, saved.note
        if not is_same:
            story.edit(whole)
            story._prompt = prompt.user
            story.passages = [
                Passage(len(story.tokens), [message.answer], message.finish) for message in written
            ]
            story.reread_reason = f"it was saved with another model ({saved.model.file})"
            return story
        story._prompt, story._opening = prompt.user, whole[: saved.opening]
        story.memory, story.told = saved.memory, saved.told
        story._load_text(tokens, saved, kv_file)
        story.finish, story._ended, story.seconds = saved.finish, saved.ended, saved.seconds
        if written and written[-1].finish == FINISH_INTERRUPTED:
            story.finish = FINISH_INTERRUPTED
        story._pieces = story._new_pieces(
            held=bytes.fromhex(saved.held), unsearched=saved.unsearched, size=saved.text_bytes
        )
        start = len(prompt.tokens) // 4
        for message in written:
            story.passages.append(Passage(start, [message.answer], message.finish))
            start += len(message.tokens) // 4
        story._follow_written()
        if written and story.text() != whole:  # older files may lack the text
            text = story.text().removeprefix(story._opening)
            story.passages = [Passage(story._starts[0], [text], saved.finish)]
        return story


def _parts_after(llm: Text, prompt: Sequence[int]) -> Detokenizer:
    """Return a decoder of the tokens after a prompt."""
    return detokenizer(llm.model, prompt, starts_text=list(prompt) == [llm.model.token_bos()])


def _written(llm: Text, tokens: Sequence[int], n_prompt: int) -> bytes:
    """Return the bytes of the tokens after a prompt."""
    parts = _parts_after(llm, tokens[:n_prompt])
    return b"".join(map(parts.feed, tokens[n_prompt:]))


def _whole_tokens(parts: Detokenizer, tokens: Sequence[int], text: str) -> tuple[int, int]:
    """Return how many first tokens, of how many characters, are a prefix of a text."""
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
