"""OpenVINO GenAI on the same GGUF file, with its full cache or its own eviction."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from pyh2o.bench.process import Use
from pyh2o.errors import MissingPackageError, SettingsError, UnsupportedModelError

# Tokens of a block: on the CPU its unit of allocation and eviction.
BLOCK = 32


def check_packages() -> None:
    """Check the required packages.

    Raises:
        MissingPackageError: names the missing package and its extra.
    """
    if find_spec("openvino_genai") is None:
        raise MissingPackageError("--compare openvino", "openvino-genai", "openvino")


def eviction_parts(rows: int) -> tuple[int, int, int]:
    """Return the tokens of a budget in whole blocks: one at the start, half of the rest recent.

    Returns:
        (first tokens kept, recent tokens kept, maximum tokens after an eviction).

    Raises:
        SettingsError: it is smaller than three blocks.
    """
    blocks = rows // BLOCK
    if blocks < 3:
        raise SettingsError(
            f"OpenVINO evicts blocks of {BLOCK} tokens and keeps at least three: give a --budget "
            f"of {3 * BLOCK} rows or more"
        )
    return BLOCK, blocks // 2 * BLOCK, blocks * BLOCK


def open_openvino(
    path: str, *, threads: int, cells: int, most_tokens: int, rows: int = 0
) -> OpenVINOModel:
    """Load the model from its GGUF file, with f16 rows.

    Other settings are defaults: the precision of products, prompts in batches of 256 tokens, and
    scores from a prompt's last 8 queries.

    Args:
        path: of the file.
        threads: of the CPU.
        cells: capacity in tokens.
        most_tokens: of a prompt and its answer.
        rows: that its eviction keeps of a prompt; 0 is the full cache.

    Raises:
        SettingsError: too few rows for its blocks.
        UnsupportedModelError: it cannot load the file.
    """
    genai = import_module("openvino_genai")
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = cells // BLOCK
    if rows:
        scheduler.use_cache_eviction = True
        scheduler.cache_eviction_config = genai.CacheEvictionConfig(
            *eviction_parts(rows), genai.AggregationMode.NORM_SUM
        )
    properties = {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": "f16"}
    try:
        pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties, {})
    except (RuntimeError, LookupError, ValueError) as error:
        # The lines before the last one are its source location.
        raise UnsupportedModelError(
            f"OpenVINO does not take this file ({str(error).strip().splitlines()[-1]}): give one "
            "with tensors of F16, Q4_0, Q4_1, Q8_0, Q4_K or Q6_K and a BPE tokenizer"
        ) from None
    return OpenVINOModel(pipeline, cells, most_tokens=most_tokens)


class OpenVINOModel:
    """A pipeline with one request at a time, computed step by step.

    It takes a prompt as a whole, so all pieces are read with the last one. A step is then one
    greedily sampled token: after the prompt it generates its own text instead of the one that the
    other caches read, which takes the same time.
    """

    def __init__(self, pipeline: Any, cells: int, *, most_tokens: int) -> None:
        """Start without a request.

        Args:
            pipeline: a ContinuousBatchingPipeline.
            cells: capacity of its blocks in tokens.
            most_tokens: of a prompt and its answer.
        """
        self._pipeline = pipeline
        self._cells = cells
        self._tensor = import_module("openvino").Tensor
        self._config = import_module("openvino_genai").GenerationConfig()
        # It must not end early, so it may generate one token more than is ever requested.
        self._config.max_new_tokens = most_tokens + 1
        self._config.ignore_eos = True
        self._request: Any = None
        self._n_requests = 0
        self._pending: list[int] = []
        self._n_tokens = 0

    @property
    def position(self) -> int:
        return self._n_tokens + len(self._pending)

    def read(self, tokens: Sequence[int], *, last: bool) -> None:
        """Read tokens as an empty text's prompt."""
        self._pending += tokens
        if last:
            prompt, self._pending = self._pending, []
            self._begin(prompt)

    def generate(self, token: int) -> None:
        """Return the next token; `token` is evaluated only if there is no text yet."""
        if self._request is None:
            self._begin([token])
        else:
            self._step()
            self._n_tokens += 1

    def reset(self) -> None:
        self._pending = []
        if self._request is not None:
            self._request.cancel()
            # The next step frees its blocks.
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
            self._request = None
            self._n_tokens = 0

    def use(self) -> Use:
        metrics = self._pipeline.get_metrics()
        # The metrics of an ended request still describe its last step.
        share = 0.0 if self._request is None else metrics.cache_usage / 100
        used = round(self._cells * share)
        return Use(metrics.kv_cache_size_in_bytes, self._cells, used)

    def _begin(self, prompt: Sequence[int]) -> None:
        """Evaluate a prompt."""
        self._n_requests += 1
        tensor = self._tensor(np.array([prompt], dtype=np.int64))
        self._request = self._pipeline.add_request(self._n_requests, tensor, self._config)
        self._step()
        self._n_tokens = len(prompt)

    def _step(self) -> None:
        """Compute until there is one more token; each step of a prompt is a batch."""
        while not self._request.can_read() and self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        # An aborted request ends without a token.
        if not self._request.can_read() or not self._request.read():
            raise SettingsError(
                f"OpenVINO has no room for the text in {self._cells} cells: raise --ctx"
            )
