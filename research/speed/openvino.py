"""OpenVINO GenAI on the same GGUF file, with its full cache or its own eviction."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from pyh2o.bench.process import Use
from pyh2o.errors import MissingPackageError, SettingsError, UnsupportedModelError

# Tokens of a block: on the CPU it allocates and evicts no less.
BLOCK = 32


def check_packages() -> None:
    """Refuse to start without what is needed.

    Raises:
        MissingPackageError: names what is missing, and the extra that brings it.
    """
    if find_spec("openvino_genai") is None:
        raise MissingPackageError("--compare openvino", "openvino-genai", "openvino")


def eviction_parts(rows: int) -> tuple[int, int, int]:
    """The tokens of a budget in whole blocks: one block of the first, half of all recent.

    Returns:
        (first tokens that stay, recent ones that stay, most tokens after an eviction).

    Raises:
        SettingsError: it has no room for three blocks.
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

    All else is as it comes: the precision of the products, prompts in batches of 256 tokens, and
    scores from a prompt's last 8 queries.

    Args:
        path: of the file.
        threads: of the CPU.
        cells: tokens that there is room for.
        most_tokens: of a prompt and what is generated after it.
        rows: that its eviction keeps of a prompt; 0 is the full cache.

    Raises:
        SettingsError: too few rows for its blocks.
        UnsupportedModelError: it does not take the file.
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
        # The lines before the last one tell where in its sources that was.
        raise UnsupportedModelError(
            f"OpenVINO does not take this file ({str(error).strip().splitlines()[-1]}): give one "
            "with tensors of F16, Q4_0, Q4_1, Q8_0, Q4_K or Q6_K and a BPE tokenizer"
        ) from None
    return OpenVINOModel(pipeline, cells, most_tokens=most_tokens)


class OpenVINOModel:
    """A pipeline with one request at a time, which it computes step by step.

    It takes a prompt as a whole, so all pieces are read with the last one. A step then is one
    token, the likeliest one: what follows the prompt is its own text and not the one that the other
    caches are given, which takes as long.
    """

    def __init__(self, pipeline: Any, cells: int, *, most_tokens: int) -> None:
        """No request is begun.

        Args:
            pipeline: a ContinuousBatchingPipeline.
            cells: tokens that its blocks have room for.
            most_tokens: of a prompt and what is generated after it.
        """
        self._pipeline = pipeline
        self._cells = cells
        self._tensor = import_module("openvino").Tensor
        self._config = import_module("openvino_genai").GenerationConfig()
        # It must not end by itself, so it may say one token more than is ever asked for.
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
        """A text without one before it."""
        self._pending += tokens
        if last:
            prompt, self._pending = self._pending, []
            self._begin(prompt)

    def generate(self, token: int) -> None:
        """The next token; `token` is evaluated only where there is no text yet."""
        if self._request is None:
            self._begin([token])
        else:
            self._step()
            self._n_tokens += 1

    def reset(self) -> None:
        self._pending = []
        if self._request is not None:
            self._request.cancel()
            # The next step gives its blocks back.
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
            self._request = None
            self._n_tokens = 0

    def use(self) -> Use:
        metrics = self._pipeline.get_metrics()
        # Of a request that has ended the metrics still tell the last step.
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
        """Compute until there is one token more; of a prompt each step is a batch."""
        while not self._request.can_read() and self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        # A request that it gives up ends without a token.
        if not self._request.can_read() or not self._request.read():
            raise SettingsError(
                f"OpenVINO has no room for the text in {self._cells} cells: raise --ctx"
            )
