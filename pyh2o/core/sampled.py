"""Match prompts against generated texts, to reuse the sampled tokens and with them the cache."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from .detokenizer import PieceDetokenizer
from .projector import is_of_picture
from .tokens import n_common
from .vocabulary import HasVocabulary

# Maximum number of tokens of all recorded texts; a token takes about 14 bytes.
MAX_TOKENS = 2**20
# Maximum number of recorded texts: a prompt is compared with each of them.
MAX_TEXTS = 1000
# Minimum match, in bytes, after messages dropped by the client.
MIN_AFTER_GAP = 96
# Maximum number of matches to try in a text that repeats itself.
MAX_TRIES = 1000
# A byte that never occurs in UTF-8, but may occur in a token.
NO_CHARACTER = b"\xff"
USER_DEFINED = llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED

Array = npt.NDArray[Any]


class TextTokens(list[int]):
    """Tokens from the tokenizer: as a prompt, they may be replaced by other tokens of this text."""


def is_text(prompt: str | Sequence[int], suffix: str | None) -> bool:
    """Return whether a prompt may be split into other tokens, which rules out filling a gap."""
    return suffix is None and isinstance(prompt, str | TextTokens)


class SampledTexts:
    """The generated texts of a model with their sampled tokens.

    The tokens of an answer often differ from those that the tokenizer splits its text into, and
    templates strip answers. A tokenized chat history would therefore differ from the cache within
    the first answer. After an eviction, all of the history would have to be read again. This class
    records the tokens in the cache. `as_sampled` replaces the first tokens of a prompt by recorded
    tokens of the same text, up to the end of a turn: a special token, white space or the end of
    the prompt.

    The replacement has the same bytes and the same special tokens as the prompt, with one
    exception: an answer also matches the text that the template renders it to, such as a tool call
    with other white space (`record_rendered`). The tokens can differ from those of a new
    tokenization, which may change the next answer slightly. If several recorded texts have the same
    bytes, the last one recorded or used counts, also if it is from another client.

    Only llama.cpp's own tokenizers are supported: with others, the text of a token depends on the
    tokens before it. The methods are thread-safe.
    """

    def __init__(self, most_tokens: int = MAX_TOKENS, most_texts: int = MAX_TEXTS) -> None:
        """Set the limits; beyond them, the least recently used texts are removed."""
        self._most_tokens = most_tokens
        self._most_texts = most_texts
        self._texts: list[RecordedText] = []  # the one used last is the last
        self._pieces: dict[int, _Piece] = {}
        self._lock = threading.Lock()

    def record(
        self, prompt: Sequence[int], sampled: Sequence[int], *, keep_dropped: bool = False
    ) -> RecordedText:
        """Record a text, in place of recorded prefixes of it, and return it.

        Args:
            prompt: tokens as returned by `as_sampled`.
            sampled: the tokens sampled after the prompt.
            keep_dropped: whether `with_dropped_messages` may restore parts of this text.
        """
        tokens = np.array([*prompt, *sampled], dtype=np.intc)
        recorded = RecordedText(tokens, len(prompt), keep_dropped=keep_dropped)
        with self._lock:
            left = []
            for each in self._texts:
                n = n_common(each.tokens, recorded.tokens)
                recorded.is_sampled[:n] |= each.is_sampled[:n]
                recorded.rendered |= {at: each.rendered[at] for at in each.rendered if at[1] <= n}
                if n < len(each.tokens):
                    left.append(each)
            self._texts = left
            if len(recorded.tokens) <= self._most_tokens:
                self._texts.append(recorded)
            while self._count() > self._most_tokens or len(self._texts) > self._most_texts:
                del self._texts[0]
        return recorded

    def record_rendered(
        self, model: HasVocabulary, recorded: RecordedText, prompt: Sequence[int], reasoning: bytes
    ) -> None:
        """Record how a template renders the answer at the end of a recorded text.

        Args:
            model: the model of the text.
            recorded: a return value of `record`.
            prompt: a prompt whose history contains the answer.
            reasoning: reasoning of the answer; a rendered answer without it does not count.
        """
        with self._lock:
            wanted = self._cut(model, np.array(prompt, dtype=np.intc))
            own, start = self._cuts(model, recorded)[-1], 0
            if recorded.n_prompt:
                start = int(own.ends[recorded.n_prompt - 1])
            if n_common(own.data[:start], wanted.data) < start:
                return
            first = int(np.searchsorted(wanted.ends, start, "right"))
            ends = (n for n, token in enumerate(prompt[first:], first) if model.is_end(token))
            n_before = next(ends, 0)
            if n_before <= first:
                return
            rendered = wanted.data[start : int(wanted.ends[n_before - 1])].tobytes()
            if reasoning in rendered and rendered != own.data[start:].tobytes():
                recorded.rendered[recorded.n_prompt, len(recorded.tokens)] = rendered
                recorded.cuts = []

    def as_sampled(self, model: HasVocabulary, tokens: list[int]) -> list[int]:
        """Replace the first tokens of a prompt by those of the text with the longest match.

        The match is measured up to its last sampled token.
        """
        if not tokens or model.tokenizer is not None:
            return tokens
        with self._lock:
            if not self._texts:
                return tokens
            wanted = self._cut(model, np.array(tokens, dtype=np.intc))
            turn_ends, data = self._turn_ends(wanted), wanted.data.tobytes()
            best, most_sampled = None, 1
            for recorded in self._texts:
                for cut in self._cuts(model, recorded):
                    if not data.startswith(cut.head):
                        continue
                    n_same = n_common(wanted.data, cut.data)
                    if n_same < most_sampled:
                        continue
                    n_wanted, n_recorded = _in_both(wanted, cut, turn_ends, n_same)
                    n_sampled = recorded.end_of_sampled(cut, n_recorded)
                    if n_sampled >= most_sampled:
                        best, most_sampled = (recorded, n_recorded, n_wanted), n_sampled
            if best is None:
                return tokens
            recorded, n_recorded, n_wanted = best
            self._texts.remove(recorded)
            self._texts.append(recorded)
            sampled: list[int] = recorded.tokens[:n_recorded].tolist()
            return sampled + tokens[n_wanted:]

    def with_dropped_messages(self, model: HasVocabulary, tokens: list[int]) -> list[int]:
        """Restore the messages that a client has dropped from the start of a chat.

        A client with a small window drops the oldest messages. Its prompt starts like a recorded
        text, up to some token before the first answer, such as the end of the system prompt. It
        continues with a later part of that text, which contains an answer. In a chat, the part
        between must contain an answer too; otherwise it may be a note that has moved. The recorded
        text with the longest match is used, unless another text matches as far without a gap.

        Returns:
            the recorded text as far as it matches, and the rest of the prompt; [] if no text
            matches.
        """
        if not tokens or model.tokenizer is not None:
            return []
        with self._lock:
            wanted = self._cut(model, np.array(tokens, dtype=np.intc))
            turn_ends = self._turn_ends(wanted)
            found, furthest = [], 0
            is_chat = NO_CHARACTER in wanted.data[wanted.ends[0] :].tobytes()
            for recorded in self._texts:
                if not recorded.keep_dropped:
                    continue
                cut = self._cuts(model, recorded)[-1]
                start, gap, n_same = _after_gap(wanted.data, cut.data)
                furthest = max(furthest, start)
                n_wanted, n_recorded = _in_both(wanted, cut, turn_ends, start + n_same, gap)
                end = int(wanted.ends[n_wanted - 1]) if n_wanted else 0
                cuts = np.searchsorted(cut.ends, [start, start + gap], "right")
                parts = np.split(recorded.is_sampled[:n_recorded], cuts)
                first, between, later = (bool(part.any()) for part in parts)
                is_dropped = later and not first and (between or not is_chat)
                if end - start >= MIN_AFTER_GAP and is_dropped:
                    found.append((end, n_recorded, n_wanted, recorded))
            best = max(found, key=lambda each: each[:2], default=None)
            if best is None or best[0] <= furthest:
                return []
            _, n_recorded, n_wanted, recorded = best
            self._texts.remove(recorded)
            self._texts.append(recorded)
            longer: list[int] = recorded.tokens[:n_recorded].tolist() + tokens[n_wanted:]
            return longer if len(longer) > len(tokens) else []

    def _count(self) -> int:
        return sum(len(each.tokens) for each in self._texts)

    def _cuts(self, model: HasVocabulary, recorded: RecordedText) -> list[_CutText]:
        """Return the text as it was sampled, and as the template renders it."""
        if not recorded.cuts:
            forms: list[Mapping[tuple[int, int], bytes]] = [{}]
            if recorded.rendered:
                forms.append(recorded.rendered)
            first = int(recorded.is_sampled.argmax())
            for form in forms:
                cut = self._cut(model, recorded.tokens, form)
                cut.head = cut.data[: cut.ends[first - 1] + 1 if first else 1].tobytes()
                recorded.cuts.append(cut)
        return recorded.cuts

    def _cut(
        self, model: HasVocabulary, tokens: Array, rendered: Mapping[tuple[int, int], bytes] = {}
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
        """Return the byte offsets of a text at which a turn may end, ascending."""
        can_end = [self._pieces[token].is_apart for token in text.tokens[1:].tolist()]
        ends: Array = text.ends[np.array([*can_end, True])]
        return ends


@dataclass(frozen=True)
class _Piece:
    """The bytes of a token, unique for special tokens, and whether a turn may end before it."""

    data: bytes
    is_apart: bool


@dataclass
class _CutText:
    """The tokens of a text, its bytes, and the byte offset at which each token ends.

    Attributes:
        head: first bytes of a recorded text, up to the first byte of a sampled token.
    """

    tokens: Array
    data: Array
    ends: Array
    head: bytes = b""


class RecordedText:
    """The tokens of a text and which of them were sampled.

    Attributes:
        n_prompt: number of tokens before the last answer.
        rendered: bytes of token spans as a template renders them.
        cuts: split into bytes by the first search; [] before.
    """

    def __init__(self, tokens: Array, n_prompt: int, *, keep_dropped: bool) -> None:
        self.tokens, self.n_prompt = tokens, n_prompt
        self.keep_dropped = keep_dropped
        self.is_sampled = np.arange(len(tokens)) >= n_prompt
        self.rendered: dict[tuple[int, int], bytes] = {}
        self.cuts: list[_CutText] = []

    def end_of_sampled(self, cut: _CutText, n_tokens: int) -> int:
        """Return the byte offset after the last sampled one of the first `n_tokens`, or 0."""
        sampled = np.flatnonzero(self.is_sampled[:n_tokens])
        return int(cut.ends[sampled[-1]]) if sampled.size else 0


def _piece(model: HasVocabulary, token: int) -> _Piece:
    if is_of_picture(token):
        return _Piece(NO_CHARACTER + token.to_bytes(4, "big", signed=True), is_apart=True)
    vocab = model.native.vocab
    data = PieceDetokenizer(vocab, model.token_bos(), starts_text=False).piece(token)
    is_mark = bool(llama_cpp.llama_vocab_get_attr(vocab, token) & USER_DEFINED)
    is_apart = is_mark or not data.strip()
    if not data:  # a special token must match nothing but itself
        return _Piece(NO_CHARACTER + token.to_bytes(4, "big"), is_apart)
    return _Piece(data.replace(NO_CHARACTER, 2 * NO_CHARACTER), is_apart)


def _in_both(
    wanted: _CutText, recorded: _CutText, turn_ends: Array, n_same: int, gap: int = 0
) -> tuple[int, int]:
    """Return the number of tokens of each text up to the last end of a turn within the match.

    Args:
        turn_ends: byte offsets of `wanted` at which turns may end.
        n_same: bytes of `wanted` that match.
        gap: bytes of `recorded` that are missing in `wanted`.
    """
    ends = turn_ends[turn_ends <= n_same]
    at = np.minimum(np.searchsorted(recorded.ends, ends + gap), len(recorded.ends) - 1)
    in_both = ends[recorded.ends[at] == ends + gap]
    if not in_both.size:
        return 0, 0
    n_wanted = np.searchsorted(wanted.ends, in_both[-1]) + 1
    n_recorded = np.searchsorted(recorded.ends, in_both[-1] + gap) + 1
    return int(n_wanted), int(n_recorded)


def _after_gap(wanted: Array, recorded: Array) -> tuple[int, int, int]:
    """Return the bytes of the common prefix, of a gap in `wanted`, and of the match after it."""
    start, best = n_common(wanted, recorded), (0, 0)
    begin, data = wanted[start : start + MIN_AFTER_GAP].tobytes(), recorded.tobytes()
    at = data.rfind(begin, start) if len(begin) == MIN_AFTER_GAP else -1
    for _ in range(MAX_TRIES):
        if at == -1:
            break
        n_same = n_common(wanted[start:], recorded[at:])
        if n_same > best[1]:
            best = at - start, n_same
        at = data.rfind(begin, start, at + len(begin) - 1)
    return start, *best
