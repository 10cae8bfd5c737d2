"""What the full cache expects at every position of a text, kept where it takes no memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pyh2o.errors import SettingsError
from pyh2o.llama import Llama

from .metrics import FloatArray, surprises
from .reading import predictions

# Log-probabilities below this are so far from mattering that float16 need not hold them.
LEAST = -6e4


class FullPredictions:
    """Log-probabilities [n, n_vocab] as float16 in a file without a name.

    The file goes with this process, however that ends. Rounding to float16 moves a divergence by
    less than a millionth, because the rounded probabilities are made to add up to 1 again.

    Attributes:
        nll: [n] negative log-likelihood of the tokens that came, unrounded.
        n_bytes: that the file takes.
        top: [n] the likeliest tokens, by the unrounded predictions.
    """

    def __init__(self, folder: Path, n: int, n_vocab: int) -> None:
        """Take the place on the disk.

        Args:
            folder: for the file.
            n: positions.
            n_vocab: tokens that the model knows.

        Raises:
            SettingsError: there is not enough of it.
        """
        self.n_bytes = n * n_vocab * np.dtype(np.float16).itemsize
        free = shutil.disk_usage(folder).free
        if self.n_bytes > free:
            raise SettingsError(
                f"the full cache's predictions take {self.n_bytes / 2**20:,.0f} MiB and {folder} "
                f"has {free / 2**20:,.0f} free: give --json on another disk, or fewer --tokens"
            )
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # open as long as the array
        self._log_probs = np.memmap(self._file, np.float16, mode="w+", shape=(n, n_vocab))
        self.nll: FloatArray = np.empty(n, dtype=np.float32)
        self.top = np.empty(n, dtype=np.int64)

    def read(self, llm: Llama, tokens: Sequence[int]) -> None:
        """Let the full cache read n + 1 tokens."""
        for start, log_probs in predictions(llm, tokens[:-1]):
            part = slice(start, start + len(log_probs))
            self._log_probs[part] = np.maximum(log_probs, LEAST)
            self.nll[part] = surprises(log_probs, tokens[start + 1 : start + 1 + len(log_probs)])
            self.top[part] = log_probs.argmax(axis=1)

    def log_probs(self, start: int, n: int) -> FloatArray:
        """[n, n_vocab] from a position on."""
        return np.asarray(self._log_probs[start : start + n], dtype=np.float32)

    def close(self) -> None:
        """Give the place on the disk back."""
        del self._log_probs
        self._file.close()
