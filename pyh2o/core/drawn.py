"""Texts in the tokens that were drawn, for prompts in which they come back."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from .detokenizer import PieceDetokenizer
from .prefixes import n_common
from .projector import is_of_picture

if TYPE_CHECKING:
    from .model import Model

# Of all texts together; each takes some 14 bytes.
MOST_TOKENS = 2**20
# A prompt is compared with each of them.
MOST_TEXTS = 1000
# Bytes behind a gap by which a text is recognised whose client has dropped messages.
LEAST_BEHIND_GAP = 96
# So often such bytes are looked for in a text: where it repeats itself.
MOST_TRIES = 1000
# A byte that no character has; a token may.
NO_CHARACTER = b"\xff"
USER_DEFINED = llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED

Array = npt.NDArray[Any]


class TextTokens(list[int]):
    """The tokens of a text as the tokenizer cut it: as a prompt, they stand for the text."""


def is_text(prompt: str | Sequence[int], suffix: str | None) -> bool:
    """Whether a prompt is a text, which may be cut into other tokens; not if it has a gap."""
    return suffix is None and isinstance(prompt, str | TextTokens)


class DrawnTexts:
    """Texts that a model wrote in, by which a prompt is cut into the tokens that are in the cache.

    A model does not always draw the tokens that the tokenizer cuts its answer into, and templates
    strip answers. A chat that comes back with its history, cut anew, would leave the text in the
    cache at the first token that differs; and where rows were evicted since, all of it would be
    read again. So the tokens of texts are noted as they are in the cache, and a prompt gets them
    for as much as it begins with the same text, up to the end of a turn: before a special token or
    white space, or at the end of the prompt.

    So the text of a prompt is the same in any case, byte by byte and special token by special
    token, and nothing of another text that was noted can get into it. An answer may also be known
    by what a template makes of it (`note_rendered`), such as a call with other white space: the
    text has it as it was drawn, where the prompt has it as rendered. The limit: the tokens of the
    history may differ from those of a fresh reading, and with them, a little, the answer. Of two
    noted texts that are the same but for their tokens the one counts that was noted or used last,
    whoever it came from.

    Only llama.cpp's own tokenizers are served: with others the text of a token depends on those
    before it.

    Any thread may use this.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS, most_texts: int = MOST_TEXTS) -> None:
        """Note no more than so much; the texts go first that were not used for longest."""
        self._most_tokens = most_tokens
        self._most_texts = most_texts
        self._texts: list[NotedText] = []  # the one used last is the last
        self._pieces: dict[int, _Piece] = {}
        self._lock = threading.Lock()

    def note(
        self, prompt: Sequence[int], drawn: Sequence[int], *, keep_dropped: bool = False
    ) -> NotedText:
        """Note a text, in place of the shorter one that it went on from, and return it.

        Args:
            prompt: its tokens, as `as_drawn` gave them.
            drawn: those that the model has drawn behind them.
            keep_dropped: whether somebody who has a later part of it may have all (`with_dropped`).
        """
        tokens = np.array([*prompt, *drawn], dtype=np.intc)
        noted = NotedText(tokens, len(prompt), keep_dropped=keep_dropped)
        with self._lock:
            left = []
            for each in self._texts:
                n = n_common(each.tokens, noted.tokens)
                noted.is_drawn[:n] |= each.is_drawn[:n]
                noted.rendered |= {at: each.rendered[at] for at in each.rendered if at[1] <= n}
                if n < len(each.tokens):
                    left.append(each)
            self._texts = left
            if len(noted.tokens) <= self._most_tokens:
                self._texts.append(noted)
            while self._count() > self._most_tokens or len(self._texts) > self._most_texts:
                del self._texts[0]
        return noted

    def note_rendered(
        self, model: Model, noted: NotedText, prompt: Sequence[int], thought: bytes
    ) -> None:
        """Note what a template makes of the answer at the end of a noted text.

        Args:
            model: of the text.
            noted: as `note` returned it.
            prompt: a prompt in which the answer is part of the history.
            thought: what the answer has of thoughts; where the prompt has them not, it is another.
        """
        with self._lock:
            wanted = self._cut(model, np.array(prompt, dtype=np.intc))
            own, start = self._cuts(model, noted)[-1], 0
            if noted.n_prompt:
                start = int(own.ends[noted.n_prompt - 1])
            if n_common(own.data[:start], wanted.data) < start:
                return
            first = int(np.searchsorted(wanted.ends, start, "right"))
            ends = (n for n, token in enumerate(prompt[first:], first) if model.is_end(token))
            n_before = next(ends, 0)
            if n_before <= first:
                return
            rendered = wanted.data[start : int(wanted.ends[n_before - 1])].tobytes()
            if thought in rendered and rendered != own.data[start:].tobytes():
                noted.rendered[noted.n_prompt, len(noted.tokens)] = rendered
                noted.cuts = []

    def as_drawn(self, model: Model, tokens: list[int]) -> list[int]:
        """The tokens of a prompt, with those of a noted text in place of its first ones.

        It is the text of which most that was drawn is in the prompt.
        """
        if not tokens or model.tokenizer is not None:
            return tokens
        with self._lock:
            if not self._texts:
                return tokens
            wanted = self._cut(model, np.array(tokens, dtype=np.intc))
            turn_ends = self._turn_ends(wanted)
            best, most_drawn = None, 1
            for noted in self._texts:
                for cut in self._cuts(model, noted):
                    n_same = n_common(wanted.data, cut.data)
                    n_wanted, n_noted = _in_both(wanted, cut, turn_ends, n_same)
                    n_drawn = noted.end_of_drawn(cut, n_noted)
                    if n_drawn >= most_drawn:
                        best, most_drawn = (noted, n_noted, n_wanted), n_drawn
            if best is None:
                return tokens
            noted, n_noted, n_wanted = best
            self._texts.remove(noted)
            self._texts.append(noted)
            drawn: list[int] = noted.tokens[:n_noted].tolist()
            return drawn + tokens[n_wanted:]

    def with_dropped(self, model: Model, tokens: list[int]) -> list[int]:
        """The tokens of a prompt with those of a noted text that its client has left out.

        A client with a small window drops the oldest messages: its prompt is what a noted text has
        before its first answer, such as the system prompt, and goes on with a later part of that,
        in which is an answer. So it is with what is between, or that is a note that has moved; in a
        text without special tokens it may be any part. What is left out elsewhere stays out. It is
        the text of which most comes back, and that further than any other one from which nothing
        was dropped.

        Returns:
            the noted text up to where the prompt leaves it, and the rest of the prompt; none if
            there is no such text.
        """
        if not tokens or model.tokenizer is not None:
            return []
        with self._lock:
            wanted = self._cut(model, np.array(tokens, dtype=np.intc))
            turn_ends = self._turn_ends(wanted)
            found, furthest = [], 0
            is_chat = NO_CHARACTER in wanted.data[wanted.ends[0] :].tobytes()
            for noted in self._texts:
                if not noted.keep_dropped:
                    continue
                cut = self._cuts(model, noted)[-1]
                start, gap, n_same = _behind_gap(wanted.data, cut.data)
                furthest = max(furthest, start)
                n_wanted, n_noted = _in_both(wanted, cut, turn_ends, start + n_same, gap)
                end = int(wanted.ends[n_wanted - 1]) if n_wanted else 0
                cuts = np.searchsorted(cut.ends, [start, start + gap], "right")
                parts = np.split(noted.is_drawn[:n_noted], cuts)
                first, between, later = (bool(part.any()) for part in parts)
                is_dropped = later and not first and (between or not is_chat)
                if end - start >= LEAST_BEHIND_GAP and is_dropped:
                    found.append((end, n_noted, n_wanted, noted))
            best = max(found, key=lambda each: each[:2], default=None)
            if best is None or best[0] <= furthest:
                return []
            _, n_noted, n_wanted, noted = best
            self._texts.remove(noted)
            self._texts.append(noted)
            longer: list[int] = noted.tokens[:n_noted].tolist() + tokens[n_wanted:]
            return longer if len(longer) > len(tokens) else []

    def _count(self) -> int:
        return sum(len(each.tokens) for each in self._texts)

    def _cuts(self, model: Model, noted: NotedText) -> list[_CutText]:
        """The text as it was drawn, and as templates make it."""
        if not noted.cuts:
            noted.cuts = [self._cut(model, noted.tokens)]
            if noted.rendered:
                noted.cuts.append(self._cut(model, noted.tokens, noted.rendered))
        return noted.cuts

    def _cut(
        self, model: Model, tokens: Array, rendered: Mapping[tuple[int, int], bytes] = {}
    ) -> _CutText:
        listed = tokens.tolist()
        for token in set(listed) - self._pieces.keys():
            self._pieces[token] = _piece(model, token)
        data = [self._pieces[token].data for token in listed]
        for (start, end), text in rendered.items():
            data[start:end] = [b""] * (end - start - 1) + [text]
        ends = np.cumsum([len(each) for each in data], dtype=np.intc)
        return _CutText(tokens, np.frombuffer(b"".join(data), dtype=np.uint8), ends)

    def _turn_ends(self, text: _CutText) -> Array:
        """Where in the bytes of a text a turn may end, ascending."""
        can_end = [self._pieces[token].is_apart for token in text.tokens[1:].tolist()]
        ends: Array = text.ends[np.array([*can_end, True])]
        return ends


@dataclass(frozen=True)
class _Piece:
    """The bytes of a token, which are those of no other text, and whether a turn may end before."""

    data: bytes
    is_apart: bool


@dataclass(frozen=True)
class _CutText:
    """The tokens of a text, its bytes, and where in these each token ends."""

    tokens: Array
    data: Array
    ends: Array


class NotedText:
    """The tokens of a text and which of them were drawn; it is cut when it is looked at first.

    Attributes:
        tokens: of it.
        n_prompt: those before the last answer.
        rendered: the bytes of spans that templates write otherwise.
    """

    def __init__(self, tokens: Array, n_prompt: int, *, keep_dropped: bool) -> None:
        self.tokens, self.n_prompt = tokens, n_prompt
        self.keep_dropped = keep_dropped
        self.is_drawn = np.arange(len(tokens)) >= n_prompt
        self.rendered: dict[tuple[int, int], bytes] = {}
        self.cuts: list[_CutText] = []

    def end_of_drawn(self, cut: _CutText, n_tokens: int) -> int:
        """Where in the bytes the last of these first tokens ends that was drawn; 0 for none."""
        drawn = np.flatnonzero(self.is_drawn[:n_tokens])
        return int(cut.ends[drawn[-1]]) if drawn.size else 0


def _piece(model: Model, token: int) -> _Piece:
    if is_of_picture(token):
        return _Piece(NO_CHARACTER + token.to_bytes(4, "big", signed=True), is_apart=True)
    vocab = model.native.vocab
    data = PieceDetokenizer(vocab, model.token_bos(), starts_text=False).piece(token)
    is_mark = bool(llama_cpp.llama_vocab_get_attr(vocab, token) & USER_DEFINED)
    is_apart = is_mark or not data.strip()
    if not data:  # a special token is the same as none but itself
        return _Piece(NO_CHARACTER + token.to_bytes(4, "big"), is_apart)
    return _Piece(data.replace(NO_CHARACTER, 2 * NO_CHARACTER), is_apart)


def _in_both(
    wanted: _CutText, noted: _CutText, turn_ends: Array, n_same: int, gap: int = 0
) -> tuple[int, int]:
    """How many tokens of each it is up to the last end of a turn before which both are the same.

    Args:
        wanted, noted: the texts.
        turn_ends: where in the bytes of the wanted one turns may end.
        n_same: bytes of it that are in the other one.
        gap: bytes of the other one that are not in this one.
    """
    ends = turn_ends[turn_ends <= n_same]
    places = np.minimum(np.searchsorted(noted.ends, ends + gap), len(noted.ends) - 1)
    in_both = ends[noted.ends[places] == ends + gap]
    if not in_both.size:
        return 0, 0
    n_wanted = np.searchsorted(wanted.ends, in_both[-1]) + 1
    n_noted = np.searchsorted(noted.ends, in_both[-1] + gap) + 1
    return int(n_wanted), int(n_noted)


def _behind_gap(wanted: Array, noted: Array) -> tuple[int, int, int]:
    """Where two texts are the same again behind a gap in the wanted one.

    Returns:
        how many bytes both begin with, the bytes of the gap, and how many are the same behind it.
    """
    start, best = n_common(wanted, noted), (0, 0)
    begin, data = wanted[start : start + LEAST_BEHIND_GAP].tobytes(), noted.tobytes()
    at = data.rfind(begin, start) if len(begin) == LEAST_BEHIND_GAP else -1
    for _ in range(MOST_TRIES):
        if at == -1:
            break
        n_same = n_common(wanted[start:], noted[at:])
        if n_same > best[1]:
            best = at - start, n_same
        at = data.rfind(begin, start, at + len(begin) - 1)
    return start, *best
