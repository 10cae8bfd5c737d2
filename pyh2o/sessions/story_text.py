"""The text of a story: prompt, passages and notes as tokens, their changes, and their storage."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..core.detokenizer import Detokenizer, detokenizer
from ..core.text import HasText, Text, text_of
from ..core.tokens import n_common
from ..core.utf8 import utf8
from ..core.vocabulary import suffix_tokens
from ..errors import SessionError
from ..writing.cached_text import CachedText, Span
from ..writing.finish import FINISH_INTERRUPTED, FINISH_STOP
from ..writing.pieces import TextPieces
from ..writing.prompt import check_prompt, prompt_text, prompt_tokens
from ..writing.repetition import RepetitionGuard
from ..writing.sampling import Sampling
from ..writing.thinking import USUAL, Thinking
from ..writing.writer import Writer
from .identity import model_identity
from .lorebooks import LoreEntry
from .messages import STORY, Contents, Message, packed, unpacked
from .records import in_one_line, record_of
from .story_notes import hidden_spans, n_of_notes, n_with_notes, own_tokens
from .story_passages import Passage, edited, n_same_characters
from .text_session import TextSession
from .text_settings import StorySettings, damage_found

AnyStory = TypeVar("AnyStory", bound="StoryText")


class StoryText(TextSession):
    """Prompt and passages as a text; `Story` adds generation."""

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
        self.inserted: tuple[Span, ...] = ()
        self.passages: list[Passage] = []
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

    @property
    def written(self) -> int:
        """Number of generated tokens."""
        n_tokens = len(self.tokens)
        return n_tokens - n_of_notes(n_tokens, self.inserted) - self.n_prompt

    @property
    def own_tokens(self) -> list[int]:
        """The tokens without notes."""
        return own_tokens(self.tokens, self.inserted)

    @property
    def hidden(self) -> list[Span]:
        """The spans of tokens that are not part of the text: memory and notes."""
        return hidden_spans(
            self.llm.model,
            self.tokens,
            self.inserted,
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
        story = written_bytes(self.llm, self.own_tokens, self.n_prompt)
        whole = self._opening + story.decode(errors="ignore")
        return whole.encode()[: self._pieces.size].decode()

    def begins_with(self, prompt: str | Sequence[int]) -> bool:
        """Return whether this is the prompt of the story."""
        return self._prompt_tokens(prompt) == self.own_tokens[: self.n_prompt]

    def _prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the tokens of a prompt, after the memory if it is text."""
        has_memory = self.memory and isinstance(prompt, str)
        return prompt_tokens(self.llm.model, f"{self.memory}\n{prompt}" if has_memory else prompt)

    def _new_pieces(self, **state: Any) -> TextPieces:
        return TextPieces([utf8(text) for text in self._until], **state)

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
        if written_bytes(self.llm, tokens, n_prompt) != utf8(text[len(opening) :]):
            n_prompt, opening = len(tokens), text  # some texts cannot be tokenized exactly
        self._text.reclaim()
        n_left = n_with_notes(n_same, self.inserted)
        self._text.truncate(n_left)
        self._text.tokens += tokens[n_same:]
        self.inserted = tuple(span for span in self.inserted if span[1] <= n_left)
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

    def set_ends(
        self,
        until: Sequence[str] | None = None,
        loop_guard: bool | None = None,
        ignore_eos: bool | None = None,
    ) -> None:
        """Change what ends the story; None keeps a setting.

        Args:
            until: stop texts.
            loop_guard: whether loops are broken.
            ignore_eos: whether end-of-text tokens are suppressed.
        """
        if until is not None:
            self._until, pieces = [*until], self._pieces
            self._pieces = self._new_pieces(
                held=pieces.held, unsearched=pieces.unsearched, size=pieces.size
            )
        if loop_guard is not None:
            self._guard = RepetitionGuard() if loop_guard else None
            self._follow_written()
        if ignore_eos is not None:
            self._ignore_eos = ignore_eos

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
            inserted=self.inserted,
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
    def _of(cls: type[AnyStory], contents: Contents, kv_file: Path, llm: Text) -> AnyStory:
        with damage_found(kv_file.with_suffix("")):
            if contents.info.kind != STORY:
                raise SessionError(f"{contents.info.title} is a conversation: open it with chat")
            saved = record_of(StorySettings, contents.info.settings, "settings")
            prompt, *written = contents.messages
            tokens = unpacked(b"".join(message.tokens for message in contents.messages))
            own = own_tokens(tokens, saved.inserted)
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
            story.reread_reason = saved.model.why_reread()
            return story
        story._prompt, story._opening = prompt.user, whole[: saved.opening]
        story.memory, story.inserted = saved.memory, saved.inserted
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


def written_bytes(llm: Text, tokens: Sequence[int], n_prompt: int) -> bytes:
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
