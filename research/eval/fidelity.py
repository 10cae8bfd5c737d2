"""Fidelity: how far predictions for a text differ from those of the full cache.

Every token of a text is predicted from the cache at that moment, as when the text streams through a
conversation. Perplexity in independent chunks, as llama-perplexity computes it, would never evict
anything. Compared with the full cache are the loss (negative log-likelihood of the next token), the
divergence KL(full || cache) of the predictions, and whether both have the same most probable token
(llama-perplexity's `--kl-divergence`).

Caches are compared at equal rows: cached rows plus retrieved rows. The gap is the loss of sinks and
a window against the full cache; other caches close a share of it.

Position i of the lists of a unit is the prediction of token i + 1 of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt

from pyh2o.compat.llama import Llama
from pyh2o.errors import SettingsError

from .caches import FULL, FULL_CACHE, MeasuredCache, check_budgets, check_full
from .fidelity_figures import fidelity_tables, summed_up
from .measurement import Job, Measurement, Settings, grouped
from .metrics import FloatArray, divergence, surprises
from .model import NamedText, bos_tokens, open_for_tokens, text_tokens, trained_context
from .reading import CHUNK, found_share, predictions
from .results import ResultFile, Unit
from .tables import TextTable

# Log-probabilities below this matter so little that float16 need not represent them.
LEAST = -6e4

# Positions skipped by default: at most this many, or a quarter.
LONGEST_SKIP = 1024


@dataclass(frozen=True, kw_only=True)
class FidelitySettings(Settings):
    """Requested texts and lengths.

    Attributes:
        texts: to be read.
        tokens: lengths that are read of each.
        start: first token of a text that is read.
        first: first token, counted from `start`, whose prediction counts; None for `LONGEST_SKIP`,
            or a quarter of a shorter text.
        stretch: tokens of the parts with a separate perplexity.
        at_once: maximum chunk size (see reading.predictions).
    """

    texts: tuple[NamedText, ...]
    tokens: tuple[int, ...]
    start: int = 0
    first: int | None = None
    stretch: int = 2048
    at_once: int = CHUNK

    def __post_init__(self) -> None:
        """Refuse settings that leave nothing to compare.

        Raises:
            SettingsError: two texts have the same name, or no token counts.
        """
        names = [text.name for text in self.texts]
        if len(set(names)) < len(names):
            raise SettingsError("two texts have the same name: rename one of the files")
        for tokens in self.tokens:
            if not 1 <= self.first_of(tokens) < tokens:
                raise SettingsError(
                    f"--tokens {tokens} with --from {self.first_of(tokens)} leaves no token to "
                    "predict: give more tokens, or a --from of 1 or more"
                )

    def first_of(self, tokens: int) -> int:
        """Return the first token that counts in a text of this length."""
        return min(LONGEST_SKIP, tokens // 4) if self.first is None else self.first

    def options(self) -> dict[str, Any]:
        return {"start": self.start, "at-once": self.at_once}


@dataclass(frozen=True)
class _Reference:
    """The full cache's predictions at every position of a text.

    Attributes:
        log_probs: [n, n_vocab] float16, in an unnamed file that ends with this process. Rounding
            changes a divergence by less than a millionth, because the rounded probabilities are
            normalised again.
        nll: [n] loss of the next tokens, unrounded.
        top: [n] the most probable tokens of the unrounded predictions.
    """

    log_probs: npt.NDArray[np.float16]
    nll: FloatArray
    top: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, folder: Path, n: int, n_vocab: int) -> _Reference:
        """Reserve the disk space."""
        with TemporaryFile(dir=folder) as file:  # the mapping keeps the file open
            log_probs = np.memmap(file, np.float16, mode="w+", shape=(n, n_vocab))
        return cls(log_probs, np.empty(n, dtype=np.float32), np.empty(n, dtype=np.int64))

    def of(self, start: int, n: int) -> FloatArray:
        """Return [n, n_vocab] from a position on."""
        return np.asarray(self.log_probs[start : start + n], dtype=np.float32)


class Fidelity(Measurement[FidelitySettings]):
    """Reads every text with every cache; a job's `what` is the text and its tokens."""

    kind = "fidelity"

    def __init__(self, settings: FidelitySettings, file: ResultFile) -> None:
        super().__init__(settings, file)
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
        # One window for all caches compared with the full cache: LongRoPE's factors depend on it.
        self._window = self._n_bos + max(filter(self._has_reference, settings.tokens), default=0)
        self._full: _Reference | None = None
        if not all(map(self._has_reference, settings.tokens)):
            self.notes = (
                f"texts of more than {self._trained - self._n_bos} tokens are longer than the "
                "context the model was trained on: the full cache is no valid reference for them, "
                "and only their perplexity is measured",
            )

    def wanted(self) -> list[Job]:
        """Return every text, length and cache.

        Beyond the trained context the full cache takes part only if it is requested by name.
        """
        by_name = FULL in self._settings.caches.policies
        return [
            self._job(cache, text, tokens)
            for text in self._settings.texts
            for tokens in self._settings.tokens
            for cache in self._caches[tokens]
            if not cache.is_full or by_name or self._has_reference(tokens)
        ]

    def _job(self, cache: MeasuredCache, text: NamedText, tokens: int) -> Job:
        name = f"{text.name} {text.digest[:12]}/{tokens}/{cache.name}"
        return Job(cache, name, (text, tokens), opening=name)

    def _has_reference(self, tokens: int) -> bool:
        """Return whether the trained context allows so long a text in a full cache."""
        return tokens + self._n_bos <= self._trained

    # ---- measuring -----------------------------------------------------------------------------

    def opened(self, job: Job) -> Llama:
        # Beyond the trained context only llama.cpp's own full cache never re-bases.
        own = {"evict": False, "flash_attn": True} if job.cache.is_full else {}
        return self._open(job.cache, max(self._window, job.what[1] + self._n_bos), **own)

    def run(self) -> None:
        for text, jobs in grouped(self._missing(), lambda job: job.what[0]).items():
            referred = [n for _, n in (job.what for job in jobs) if self._has_reference(n)]
            self._full = self._read_full(text, max(referred)) if referred else None
            for job in jobs:
                if job.cache.is_full and self._has_reference(job.what[1]):
                    self._file.add(job.name, self._unit_of_full(job))
                else:
                    with self.opened(job) as llm:
                        self._measure(llm, job)
            self._full = None

    def measured(self, llm: Llama, job: Job) -> Unit:
        """Without a reference kl and same_top are empty."""
        text, tokens = job.what
        full = self._full if self._has_reference(tokens) else None
        sequence = self._tokens[text][: self._n_bos + tokens]
        nll: list[Any] = []
        kl: list[Any] = []
        same_top: list[Any] = []
        for start, log_probs in predictions(llm, sequence[:-1], self._settings.at_once):
            n = len(log_probs)
            nll += surprises(log_probs, sequence[start + 1 : start + 1 + n]).tolist()
            if full is not None:
                kl += divergence(full.of(start, n), log_probs).tolist()
                same_top += (log_probs.argmax(axis=1) == full.top[start : start + n]).tolist()
        kv = llm.kv
        return {
            **self._of_text(job),
            "compactions": kv.compactions,
            "rebases": kv.rebases,
            "attention": found_share(llm),
            # The prediction after BOS is skipped: not every model has one.
            "nll": nll[self._n_bos :],
            "kl": kl[self._n_bos :],
            "same_top": same_top[self._n_bos :],
        }

    def _unit_of_full(self, job: Job) -> Unit:
        """Return the unit of the full cache from its predictions read for comparison."""
        assert self._full is not None
        n = job.what[1] - 1
        return {
            **_TOLD_OF_FULL,
            **self._of_text(job),
            "nll": self._full.nll[self._n_bos : self._n_bos + n].tolist(),
            "kl": [0.0] * n,
            "same_top": [True] * n,
        }

    def _of_text(self, job: Job) -> Unit:
        text, tokens = job.what
        return {"text": text.name, "tokens": tokens}

    def _read_full(self, text: NamedText, tokens: int) -> _Reference:
        """Read the longest text with the full cache; it contains the shorter ones."""
        sequence = self._tokens[text][: self._n_bos + tokens]
        reference = _Reference.empty(self._file.folder, len(sequence) - 1, self._n_vocab)
        with self._open(FULL_CACHE, self._window) as llm:
            for start, log_probs in predictions(llm, sequence[:-1]):
                end = start + len(log_probs)
                reference.log_probs[start:end] = np.maximum(log_probs, LEAST)
                reference.nll[start:end] = surprises(log_probs, sequence[start + 1 : end + 1])
                reference.top[start:end] = log_probs.argmax(axis=1)
            check_full(llm)
        return reference

    # ---- summing up ----------------------------------------------------------------------------

    def tables(self) -> list[TextTable]:
        done = [job for job in self.wanted() if job.name in self._file.units]
        return fidelity_tables([self._summary(job) for job in done], self._settings.stretch)

    def _summary(self, job: Job) -> dict[str, Any]:
        text, tokens = job.what
        full = streaming = None
        if self._has_reference(tokens) and not job.cache.is_full:
            full = self._nll_of(self._job(FULL_CACHE, text, tokens))
        # Sinks and a window with the budget of the cache, if requested.
        for other in self._caches[tokens]:
            if other.is_streaming and other.budget == job.cache.budget:
                streaming = self._nll_of(self._job(other, text, tokens))
                break
        return summed_up(
            self._file.units[job.name],
            first=self._settings.first_of(tokens),
            stretch=self._settings.stretch,
            full=full,
            streaming=streaming,
        )

    def _nll_of(self, job: Job) -> FloatArray | None:
        """Return the losses that count, if they were measured."""
        if job.name not in self._file.units:
            return None
        nll = np.array(self._file.units[job.name]["nll"], dtype=np.float32)
        return nll[self._settings.first_of(job.what[1]) - 1 :]


_TOLD_OF_FULL = {
    "cache": FULL,
    "policy": FULL,
    "budget": "",
    "rows": 0,
    "capacity": 0,
    "recall": 0,
    "compactions": 0,
    "rebases": 0,
    "attention": None,
}
