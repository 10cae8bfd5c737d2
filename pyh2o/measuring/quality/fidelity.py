"""Fidelity: how far the predictions for a text move away from those of the full cache.

Every token of a text is predicted from what the cache holds at that moment, as when the text
streams through a conversation. Perplexity in independent chunks, as llama-perplexity computes it,
would never evict anything. Compared with the full cache are the loss (negative log-likelihood of
the token that came), the divergence KL(full || cache) of the predictions, and whether both have the
same token on top (llama-perplexity's `--kl-divergence`).

Position i of the arrays is the prediction of token i + 1 of the text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import SettingsError
from ...llama import Llama
from .caches import (
    FULL,
    FULL_CACHE,
    CacheSettings,
    Compute,
    EvalCache,
    caches_to_compare,
    check_caches,
    check_full,
    open_for_tokens,
    open_llama,
)
from .full_predictions import FullPredictions, file_bytes
from .metrics import (
    BLOCK,
    FloatArray,
    divergence,
    gap_closed,
    mean_and_error,
    perplexity,
    surprises,
)
from .progress import Progress
from .reading import predictions
from .results import ResultFile
from .texts import EvalText, bos_tokens, text_tokens

# Positions that are left out where nothing else is asked for: at most so many, or a quarter.
LONGEST_SKIP = 1024


# The gap between sinks and a window and the full cache has to be so many times its standard error:
# a share of nothing but noise would be any number.
CLEAR_GAP = 2


@dataclass(frozen=True)
class FidelitySettings:
    """What the user asks for.

    Attributes:
        model: a GGUF file.
        compute: what computes.
        texts: to be read.
        tokens: lengths that are read of each.
        start: first token of a text that is read.
        first: first token, counted from `start`, whose prediction counts; None for `LONGEST_SKIP`,
            or a quarter of a shorter text.
        stretch: tokens of the parts that have a perplexity of their own.
        caches: what is compared.
    """

    model: Path
    compute: Compute
    texts: tuple[EvalText, ...]
    tokens: tuple[int, ...]
    start: int
    first: int | None
    stretch: int
    caches: CacheSettings

    def __post_init__(self) -> None:
        """Refuse what leaves nothing to compare.

        Raises:
            SettingsError: two texts of one name, no token that counts, or too short stretches.
        """
        names = [text.name for text in self.texts]
        if len(set(names)) < len(names):
            raise SettingsError("two texts have the same name: rename one of the files")
        for tokens in self.tokens:
            if tokens < 2 or not 1 <= self.first_of(tokens) < tokens:
                raise SettingsError(
                    f"--tokens {tokens} with --from {self.first_of(tokens)} leaves no token to "
                    "predict: give more tokens, or a --from of 1 or more"
                )
        if self.stretch < 1 or self.start < 0:
            raise SettingsError("give a --stretch of 1 or more tokens and a --start of 0 or more")

    def first_of(self, tokens: int) -> int:
        """The first token that counts in a text of this length."""
        return min(LONGEST_SKIP, tokens // 4) if self.first is None else self.first


@dataclass(frozen=True)
class FidelityUnit:
    """One cache that has read one text. Its arrays are nll, kl and same_top, [tokens - 1] each.

    Attributes:
        text, tokens, cache: which.
        policy, budget, positions, rows, heavy, recent, pinned: of the cache.
        capacity: rows that it has at most, just before a compaction; 0 without a limit.
        compactions, rebases: while it was read.
        seconds: that took.
    """

    text: str
    tokens: int
    cache: str
    policy: str
    budget: str
    positions: str
    rows: int
    capacity: int
    heavy: int
    recent: int
    pinned: int
    compactions: int
    rebases: int
    seconds: float


@dataclass(frozen=True)
class FidelitySummary:
    """One cache on one text, over the tokens from `first` on.

    Attributes:
        text, tokens, cache, policy, budget, positions, rows, capacity: see FidelityUnit.
        first: first token whose prediction counts.
        perplexity: of all tokens that count.
        nll: their mean loss, in nats.
        nll_to_full, nll_to_full_error: mean difference of the losses to the full cache's at the
            same positions, and its standard error (see metrics.BLOCK); None where there is none.
        nll_to_streaming, nll_to_streaming_error: to those of sinks and a window of the same budget.
        gap_closed: share of what sinks and a window lose in perplexity against the full cache that
            this cache does not lose; None where their loss is not clear (see CLEAR_GAP).
        kl_mean, kl_median, kl_90, kl_99: of KL(full || cache); None without a valid reference.
        same_top: share of positions with the full cache's token on top.
        stretches: perplexity of each part of the text; None where no token of it counts.
    """

    text: str
    tokens: int
    cache: str
    policy: str
    budget: str
    positions: str
    rows: int
    capacity: int
    first: int
    perplexity: float
    nll: float
    nll_to_full: float | None
    nll_to_full_error: float | None
    nll_to_streaming: float | None
    nll_to_streaming_error: float | None
    gap_closed: float | None
    kl_mean: float | None
    kl_median: float | None
    kl_90: float | None
    kl_99: float | None
    same_top: float | None
    stretches: tuple[float | None, ...]


class Fidelity:
    """Lets every cache read every text.

    Attributes:
        notes: what to know when reading the figures.
    """

    def __init__(
        self,
        settings: FidelitySettings,
        file: ResultFile,
        progress: Progress,
        folder: Path,
    ) -> None:
        """Look at the model and the texts; nothing is measured yet.

        Args:
            settings: what is asked for.
            file: where the results go.
            progress: told what goes on.
            folder: for the full cache's predictions, while they are needed.

        Raises:
            PyH2OError: the model is refused, a text is too short, or a budget makes no sense.
        """
        self._settings = settings
        self._file = file
        self._progress = progress
        self._folder = folder
        with open_for_tokens(settings.model) as llm:
            longest = max(settings.tokens)
            self._texts = {
                text.name: text_tokens(llm, text, settings.start, longest)
                for text in settings.texts
            }
            self._digests = {text.name: text.sha256[:12] for text in settings.texts}
            self._n_bos = len(bos_tokens(llm))
            self._n_vocab = llm.n_vocab()
            self._trained = llm._model.n_ctx_train()
        self._caches = {
            tokens: caches_to_compare(settings.caches, tokens) for tokens in settings.tokens
        }
        for tokens, caches in self._caches.items():
            check_caches(caches, tokens + self._n_bos, self._trained)
        self.notes = self._note_long_texts()

    def run(self) -> None:
        """Measure what the file has not.

        Raises:
            PyH2OError: a cache is refused, or there is too little memory or disk space.
        """
        missing = [
            unit for unit in self._wanted() if not self._file.has(self._name(*unit), *_ARRAYS)
        ]
        self._progress.plan(sum(tokens for _, tokens, _ in missing))
        for text in self._texts:
            lengths = [tokens for name, tokens, _ in missing if name == text]
            referred = [tokens for tokens in lengths if self._has_reference(tokens)]
            with ExitStack() as stack:
                full = None
                if referred:
                    full = self._read_full(text, max(referred))
                    stack.callback(full.close)
                for name, tokens, cache in missing:
                    if name == text:
                        valid = full if self._has_reference(tokens) else None
                        self._measure(text, tokens, cache, valid)

    def summaries(self) -> list[FidelitySummary]:
        """The figures of all that has been measured, in the order in which it was asked for."""
        return [
            self._summary(text, tokens, cache)
            for text, tokens, cache in self._wanted()
            if self._file.has(self._name(text, tokens, cache), *_ARRAYS)
        ]

    def _wanted(self) -> list[tuple[str, int, EvalCache]]:
        """Every text, length and cache. Beyond the trained context the full cache takes part only
        if it is asked for by name."""
        by_name = FULL in self._settings.caches.policies
        return [
            (text, tokens, cache)
            for text in self._texts
            for tokens in self._settings.tokens
            for cache in self._caches[tokens]
            if not cache.is_full or by_name or self._has_reference(tokens)
        ]

    def _has_reference(self, tokens: int) -> bool:
        """Whether the model was trained for so much text in a full cache."""
        return bool(tokens + self._n_bos <= self._trained)

    def _note_long_texts(self) -> tuple[str, ...]:
        if all(self._has_reference(tokens) for tokens in self._settings.tokens):
            return ()
        return (
            f"texts of more than {self._trained - self._n_bos} tokens are longer than the context "
            "the model was trained on: the full cache is no valid reference for them, and only "
            "their perplexity is measured",
        )

    def _name(self, text: str, tokens: int, cache: EvalCache) -> str:
        """Of a unit; another text in a file of the same name has others."""
        return f"{text} {self._digests[text]}/{tokens}/{cache.name}"

    def _tokens_of(self, text: str, tokens: int) -> list[int]:
        return self._texts[text][: self._n_bos + tokens]

    def _read_full(self, text: str, tokens: int) -> FullPredictions:
        """Predictions of the full cache for the longest text, which has the shorter ones in it."""
        n = self._n_bos + tokens - 1
        size = file_bytes(n, self._n_vocab) / 2**20
        self._progress.note(
            f"{text}: the full cache's predictions take {size:,.0f} MiB in {self._folder} until "
            "the text is done"
        )
        full = FullPredictions(self._folder, n, self._n_vocab)
        try:
            with open_llama(
                self._settings.model,
                FULL_CACHE,
                window=n + 1,
                compute=self._settings.compute,
            ) as llm:
                label = f"{text}, {tokens} tokens, {FULL}"
                full.read(
                    llm,
                    self._tokens_of(text, tokens),
                    lambda done: self._progress.extra(label, done, n),
                )
                check_full(llm)
        except BaseException:
            full.close()
            raise
        return full

    def _measure(
        self, text: str, tokens: int, cache: EvalCache, full: FullPredictions | None
    ) -> None:
        started = time.perf_counter()
        n = tokens - 1
        if cache.is_full and full is not None:
            # It was read to have something to compare with.
            arrays = {
                "nll": full.nll[self._n_bos : self._n_bos + n].copy(),
                "kl": np.zeros(n, dtype=np.float32),
                "same_top": np.ones(n, dtype=np.bool_),
            }
            compactions = rebases = capacity = 0
            self._progress.advance(self._name(text, tokens, cache), tokens)
        else:
            # Beyond the trained context only llama.cpp's own full cache never re-bases.
            settings = {"evict": False, "flash_attn": True} if cache.is_full else {}
            with open_llama(
                self._settings.model,
                cache,
                window=tokens + self._n_bos,
                compute=self._settings.compute,
                **settings,
            ) as llm:
                arrays = self._read(llm, text, tokens, cache, full)
                kv = llm.kv
                compactions, rebases = kv.compactions, kv.rebases
                capacity = 0 if cache.is_full else kv.capacity
        unit = FidelityUnit(
            text=text,
            tokens=tokens,
            cache=cache.name,
            policy=cache.policy,
            budget=cache.budget,
            positions=cache.positions,
            rows=cache.rows,
            capacity=capacity,
            heavy=cache.heavy,
            recent=cache.recent,
            pinned=cache.pinned,
            compactions=compactions,
            rebases=rebases,
            seconds=round(time.perf_counter() - started, 3),
        )
        self._file.add(self._name(text, tokens, cache), asdict(unit), arrays)

    def _read(
        self, llm: Llama, text: str, tokens: int, cache: EvalCache, full: FullPredictions | None
    ) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays of one cache; without a reference kl and same_top are empty."""
        sequence = self._tokens_of(text, tokens)
        parts: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in _ARRAYS}
        for start, log_probs in predictions(llm, sequence[:-1]):
            n = len(log_probs)
            parts["nll"].append(surprises(log_probs, sequence[start + 1 : start + 1 + n]))
            if full is not None:
                parts["kl"].append(divergence(full.log_probs(start, n), log_probs))
                parts["same_top"].append(log_probs.argmax(axis=1) == full.top[start : start + n])
            # BOS is nothing that was asked for, and the last token is not evaluated.
            is_last = start + n == len(sequence) - 1
            self._progress.advance(
                self._name(text, tokens, cache), n - (self._n_bos if start == 0 else 0) + is_last
            )
        # What follows BOS is left out: not every model has one.
        joined = {name: np.concatenate(some or [_NOTHING]) for name, some in parts.items()}
        return {name: array[self._n_bos :] for name, array in joined.items()}

    def _summary(self, text: str, tokens: int, cache: EvalCache) -> FidelitySummary:
        first = self._settings.first_of(tokens)
        own = self._file.arrays(self._name(text, tokens, cache))
        counted = {name: array[first - 1 :] for name, array in own.items()}
        nll, kl = counted["nll"], counted["kl"]
        full = self._nll_of(text, tokens, FULL_CACHE) if self._has_reference(tokens) else None
        streaming = self._nll_of(text, tokens, self._streaming_like(tokens, cache))
        closed = None
        if full is not None and streaming is not None and not cache.is_full:
            gap, gap_error = _difference(streaming, full)
            if gap is not None and gap_error is not None and gap > CLEAR_GAP * gap_error:
                closed = gap_closed(perplexity(full), perplexity(streaming), perplexity(nll))
        to_full = _difference(nll, None if cache.is_full else full)
        to_streaming = _difference(nll, None if cache.is_streaming else streaming)
        quantiles: Sequence[float | None] = [None] * 3
        if kl.size:
            quantiles = [float(value) for value in np.quantile(kl, (0.5, 0.9, 0.99))]
        return FidelitySummary(
            text=text,
            tokens=tokens,
            cache=cache.name,
            policy=cache.policy,
            budget=cache.budget,
            positions=cache.positions,
            rows=cache.rows,
            capacity=self._file.units[self._name(text, tokens, cache)]["capacity"],
            first=first,
            perplexity=perplexity(nll),
            nll=float(nll.mean(dtype=np.float64)),
            nll_to_full=to_full[0],
            nll_to_full_error=to_full[1],
            nll_to_streaming=to_streaming[0],
            nll_to_streaming_error=to_streaming[1],
            gap_closed=closed,
            kl_mean=float(kl.mean(dtype=np.float64)) if kl.size else None,
            kl_median=quantiles[0],
            kl_90=quantiles[1],
            kl_99=quantiles[2],
            same_top=float(counted["same_top"].mean()) if kl.size else None,
            stretches=self._stretches(own["nll"], first),
        )

    def _streaming_like(self, tokens: int, cache: EvalCache) -> EvalCache | None:
        """Sinks and a window with the budget of a cache, if it was asked for."""
        return next(
            (
                other
                for other in self._caches[tokens]
                if other.is_streaming
                and (other.budget, other.positions) == (cache.budget, cache.positions)
            ),
            None,
        )

    def _nll_of(self, text: str, tokens: int, cache: EvalCache | None) -> FloatArray | None:
        """Losses that count, if they were measured."""
        if cache is None or not self._file.has(self._name(text, tokens, cache), *_ARRAYS):
            return None
        nll: FloatArray = self._file.arrays(self._name(text, tokens, cache))["nll"]
        return nll[self._settings.first_of(tokens) - 1 :]

    def _stretches(self, nll: FloatArray, first: int) -> tuple[float | None, ...]:
        """Perplexity of tokens [0, stretch), [stretch, 2 stretch) ..., as far as they count."""
        size = self._settings.stretch
        parts = [
            nll[max(start, first) - 1 : start + size - 1] for start in range(0, len(nll) + 1, size)
        ]
        return tuple(perplexity(part) if part.size else None for part in parts)


_ARRAYS = ("nll", "kl", "same_top")
_NOTHING: FloatArray = np.empty(0, dtype=np.float32)


def _difference(
    nll: FloatArray, reference: FloatArray | None
) -> tuple[float, float | None] | tuple[None, None]:
    if reference is None:
        return None, None
    return mean_and_error(nll.astype(np.float64) - reference, BLOCK)
