"""Fidelity: how far the predictions for a text move away from those of the full cache.

Every token of a text is predicted from what the cache holds at that moment, as when the text
streams through a conversation. Perplexity in independent chunks, as llama-perplexity computes it,
would never evict anything. Compared with the full cache are the loss (negative log-likelihood of
the token that came), the divergence KL(full || cache) of the predictions, and whether both have the
same token on top (llama-perplexity's `--kl-divergence`).

Caches are compared at equal rows: those that stay, and those that a token finds among the evicted
ones. What sinks and a window alone lose against the full cache is the gap that others close a share
of.

Position i of the arrays is the prediction of token i + 1 of the text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pyh2o.errors import SettingsError
from pyh2o.llama import Llama

from .caches import FULL, FULL_CACHE, MeasuredCache, check_budgets, check_full
from .fidelity_figures import (
    FidelitySummary,
    FidelityUnit,
    fidelity_picture,
    fidelity_tables,
    summed_up,
)
from .full_predictions import FullPredictions
from .measurement import Job, Measurement, Progress, QualitySettings, told_of
from .metrics import FloatArray, divergence, surprises
from .model import NamedText, bos_tokens, open_for_tokens, text_tokens, trained_context
from .reading import CHUNK, found_share, predictions
from .results import ResultFile
from .tables import TextTable

# Positions that are left out where nothing else is asked for: at most so many, or a quarter.
LONGEST_SKIP = 1024


@dataclass(frozen=True, kw_only=True)
class FidelitySettings(QualitySettings):
    """What the user asks for.

    Attributes:
        texts: to be read.
        tokens: lengths that are read of each.
        start: first token of a text that is read.
        first: first token, counted from `start`, whose prediction counts; None for `LONGEST_SKIP`,
            or a quarter of a shorter text.
        stretch: tokens of the parts that have a perplexity of their own.
        at_once: most tokens that are evaluated at once (see reading.predictions).
    """

    texts: tuple[NamedText, ...]
    tokens: tuple[int, ...]
    start: int = 0
    first: int | None = None
    stretch: int = 2048
    at_once: int = CHUNK

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
        if self.at_once < 1:
            raise SettingsError(f"--at-once {self.at_once}: give 1 or more tokens")

    def first_of(self, tokens: int) -> int:
        """The first token that counts in a text of this length."""
        return min(LONGEST_SKIP, tokens // 4) if self.first is None else self.first

    def options(self) -> dict[str, Any]:
        return {"start": self.start, "at-once": self.at_once}

    def record(self) -> dict[str, Any]:
        texts = [{"name": one.name, "sha256": one.digest} for one in self.texts]
        return {**super().record(), "texts": texts}


@dataclass(frozen=True)
class FidelityJob(Job):
    """A cache that reads so many tokens of a text; another text of the same name has others."""

    text: NamedText
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.text.name} {self.text.digest[:12]}/{self.tokens}/{self.cache.name}"


class Fidelity(Measurement[FidelitySettings, FidelityJob, FidelityUnit, FidelitySummary]):
    """Lets every cache read every text."""

    kind = "fidelity"
    unit = FidelityUnit
    arrays = ("nll", "kl", "same_top")

    def __init__(self, settings: FidelitySettings, file: ResultFile, progress: Progress) -> None:
        super().__init__(settings, file, progress)
        with open_for_tokens(settings.model) as llm:
            longest = max(settings.tokens)
            self._tokens = {
                text: text_tokens(llm, text, settings.start, longest) for text in settings.texts
            }
            self._n_bos = len(bos_tokens(llm))
            self._n_vocab = llm.n_vocab()
            self._trained = trained_context(llm)
        self._caches = {tokens: settings.caches.for_text(tokens) for tokens in settings.tokens}
        for tokens, caches in self._caches.items():
            check_budgets(caches, tokens + self._n_bos, self._trained)
        # One for all that is compared with the full cache: LongRoPE rotates by the window.
        self._window = self._n_bos + max(filter(self._has_reference, settings.tokens), default=0)
        if not all(map(self._has_reference, settings.tokens)):
            self.notes = (
                f"texts of more than {self._trained - self._n_bos} tokens are longer than the "
                "context the model was trained on: the full cache is no valid reference for them, "
                "and only their perplexity is measured",
            )

    def wanted(self) -> list[FidelityJob]:
        """Every text, length and cache. Beyond the trained context the full cache takes part only
        if it is asked for by name."""
        by_name = FULL in self._settings.caches.policies
        return [
            FidelityJob(cache, text, tokens)
            for text in self._settings.texts
            for tokens in self._settings.tokens
            for cache in self._caches[tokens]
            if not cache.is_full or by_name or self._has_reference(tokens)
        ]

    def _has_reference(self, tokens: int) -> bool:
        """Whether the model was trained for so much text in a full cache."""
        return tokens + self._n_bos <= self._trained

    # ---- measuring -----------------------------------------------------------------------------

    def work(self, job: FidelityJob) -> int:
        return job.tokens

    def opened(self, job: FidelityJob) -> Llama:
        # Beyond the trained context only llama.cpp's own full cache never re-bases.
        own = {"evict": False, "flash_attn": True} if job.cache.is_full else {}
        return self._open(job.cache, max(self._window, job.tokens + self._n_bos), **own)

    def run(self) -> None:
        for jobs in self._planned(lambda job: job.text):
            with ExitStack() as stack:
                referred = [job.tokens for job in jobs if self._has_reference(job.tokens)]
                full = None
                if referred:
                    n = self._n_bos + max(referred) - 1
                    full = FullPredictions(self._file.folder, n, self._n_vocab)
                    stack.enter_context(closing(full))
                    self._read_full(full, jobs[0].text, max(referred))
                for job in jobs:
                    self._measure(job, full if self._has_reference(job.tokens) else None)

    def _measure(self, job: FidelityJob, full: FullPredictions | None) -> None:
        started = time.perf_counter()
        if job.cache.is_full and full is not None:
            # It was read to have something to compare with.
            n = job.tokens - 1
            arrays = {
                "nll": full.nll[self._n_bos : self._n_bos + n].copy(),
                "kl": np.zeros(n, dtype=np.float32),
                "same_top": np.ones(n, dtype=np.bool_),
            }
            self._add(job, _unit(job, None), started, arrays)
            self._progress.advance(job.name, job.tokens)
        else:
            with self.opened(job) as llm:
                arrays = self._read(llm, job, full)
                self._add(job, _unit(job, llm), started, arrays)

    def _read(
        self, llm: Llama, job: FidelityJob, full: FullPredictions | None
    ) -> dict[str, FloatArray]:
        """The arrays of one cache; without a reference kl and same_top are empty."""
        sequence = self._sequence(job.text, job.tokens)
        parts: dict[str, list[Any]] = {name: [] for name in self.arrays}
        for start, log_probs in predictions(llm, sequence[:-1], self._settings.at_once):
            n = len(log_probs)
            parts["nll"].append(surprises(log_probs, sequence[start + 1 : start + 1 + n]))
            if full is not None:
                parts["kl"].append(divergence(full.log_probs(start, n), log_probs))
                parts["same_top"].append(log_probs.argmax(axis=1) == full.top[start : start + n])
            # BOS is nothing that was asked for, and the last token is not evaluated.
            is_last = start + n == len(sequence) - 1
            self._progress.advance(job.name, n - (self._n_bos if start == 0 else 0) + is_last)
        # What follows BOS is left out: not every model has one.
        return {
            name: np.concatenate(some or [_NOTHING])[self._n_bos :] for name, some in parts.items()
        }

    def _read_full(self, full: FullPredictions, text: NamedText, tokens: int) -> None:
        """Let the full cache read the longest text, which has the shorter ones in it."""
        self._progress.note(
            f"{text.name}: the full cache's predictions take {full.n_bytes / 2**20:,.0f} MiB in "
            f"{self._file.folder} until the text is done"
        )
        label = f"{text.name}, {tokens} tokens, {FULL}"
        sequence = self._sequence(text, tokens)
        n = len(sequence) - 1
        with self._open(FULL_CACHE, self._window) as llm:
            full.read(llm, sequence, lambda done: self._progress.extra(label, done, n))
            check_full(llm)

    def _sequence(self, text: NamedText, tokens: int) -> list[int]:
        return self._tokens[text][: self._n_bos + tokens]

    # ---- summing up ----------------------------------------------------------------------------

    def summaries(self) -> list[FidelitySummary]:
        return [self._summary(job) for job in self.wanted() if self._is_measured(job)]

    def _summary(self, job: FidelityJob) -> FidelitySummary:
        full = streaming = None
        if self._has_reference(job.tokens):
            full = self._nll_of(replace(job, cache=FULL_CACHE))
        if (other := self._streaming_like(job)) is not None:
            streaming = self._nll_of(replace(job, cache=other))
        return summed_up(
            self._unit_of(job),
            self._file.arrays(job.name),
            first=self._settings.first_of(job.tokens),
            stretch=self._settings.stretch,
            full=None if job.cache.is_full else full,
            streaming=streaming,
        )

    def _streaming_like(self, job: FidelityJob) -> MeasuredCache | None:
        """Sinks and a window with the budget of a cache, if it was asked for."""
        own = (job.cache.budget, job.cache.positions)
        return next(
            (
                other
                for other in self._caches[job.tokens]
                if other.is_streaming and (other.budget, other.positions) == own
            ),
            None,
        )

    def _nll_of(self, job: FidelityJob) -> FloatArray | None:
        """Losses that count, if they were measured."""
        if not self._is_measured(job):
            return None
        nll: FloatArray = self._file.arrays(job.name)["nll"]
        return nll[self._settings.first_of(job.tokens) - 1 :]

    def tables(self, summaries: Sequence[FidelitySummary]) -> list[TextTable]:
        return fidelity_tables(summaries, self._settings.stretch)

    def picture(self, summaries: Sequence[FidelitySummary], file_format: str) -> bytes:
        return fidelity_picture(summaries, self._settings.stretch, file_format)


_NOTHING: FloatArray = np.empty(0, dtype=np.float32)


def _unit(job: FidelityJob, llm: Llama | None) -> FidelityUnit:
    """What has been read, and by which cache; None for what was read as the reference."""
    cache, kv = job.cache, None if llm is None else llm.kv
    return FidelityUnit(
        **told_of(cache, llm),
        text=job.text.name,
        tokens=job.tokens,
        positions=cache.positions,
        heavy=cache.heavy,
        recent=cache.recent,
        pinned=cache.pinned,
        compactions=0 if kv is None else kv.compactions,
        rebases=0 if kv is None else kv.rebases,
        attention=None if llm is None else found_share(llm),
    )
