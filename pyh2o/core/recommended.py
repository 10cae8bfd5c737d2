"""Recommended models, by the memory and speed of a machine or GPU.

File sizes are from the hub, parameter counts from the model cards, and layer shapes from the
models' config.json.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..cache.native import Layer
from ..cache.settings import EvictionSettings
from ..library.backends import discrete_gpus
from ..library.devices import MARGIN
from ..system.bandwidth import bytes_per_second
from ..system.memory import available_bytes
from ..system.threads import physical_cores
from .estimate import TextBytes, text_bytes

WINDOW = 32_768
"""Default window, in tokens."""

READABLE = 5.0
"""Tokens per second at which a person can read without waiting."""

MAX_TOKENS = 131_072
"""Context that most of the models were trained on, or can be extended to."""


@dataclass(frozen=True)
class KnownModel:
    """A model for `pyh2o models fetch`.

    Attributes:
        parameters: billions of parameters.
        active: billions of active parameters, fewer in a mixture of experts.
        window: sliding window in tokens; 0 for none.
        full_every: every n-th layer has full attention.
    """

    title: str
    name: str
    parameters: float
    active: float
    file_bytes: int
    layers: int
    kv_heads: int
    head_size: int
    window: int = 0
    full_every: int = 1

    def text(self, n_tokens: int, *, on_gpu: bool) -> TextBytes:
        """Estimate the memory of a text of `n_tokens` tokens, with default settings."""
        sizes = (self.kv_heads, self.head_size, self.head_size)
        layers = [
            Layer(i, i, self.window if (i + 1) % self.full_every else None, False, False, *sizes)
            for i in range(self.layers)
        ]
        budget = EvictionSettings().resolve(n_tokens, MAX_TOKENS, on_gpu=on_gpu)
        return text_bytes(layers, budget)


# fmt: off
KNOWN_MODELS = (
    KnownModel("Llama 3.2 1B Instruct, Q4_K_M", "bartowski/Llama-3.2-1B-Instruct-GGUF",
               1.2, 1.2, 807_694_464, 16, 8, 64),
    KnownModel("Llama 3.2 3B Instruct, Q4_K_M", "bartowski/Llama-3.2-3B-Instruct-GGUF",
               3.2, 3.2, 2_019_377_696, 28, 8, 128),
    KnownModel("Gemma 3 4B, Q4_K_M", "ggml-org/gemma-3-4b-it-GGUF",
               3.9, 3.9, 2_489_757_856, 34, 4, 256, window=1024, full_every=6),
    KnownModel("Qwen3 4B, Q4_K_M", "Qwen/Qwen3-4B-GGUF",
               4.0, 4.0, 2_497_280_256, 36, 8, 128),
    KnownModel("Llama 3.1 8B Instruct, Q4_K_M", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
               8.0, 8.0, 4_920_739_232, 32, 8, 128),
    KnownModel("Qwen3 8B, Q4_K_M", "Qwen/Qwen3-8B-GGUF",
               8.2, 8.2, 5_027_783_488, 36, 8, 128),
    KnownModel("Gemma 3 12B, Q4_K_M", "ggml-org/gemma-3-12b-it-GGUF",
               11.8, 11.8, 7_300_574_976, 48, 8, 256, window=1024, full_every=6),
    KnownModel("Mistral Nemo 12B Instruct, Q4_K_M", "bartowski/Mistral-Nemo-Instruct-2407-GGUF",
               12.2, 12.2, 7_477_208_192, 40, 8, 128),
    KnownModel("Qwen3 14B, Q4_K_M", "Qwen/Qwen3-14B-GGUF",
               14.8, 14.8, 9_001_752_960, 40, 8, 128),
    KnownModel("gpt-oss 20B, MXFP4", "ggml-org/gpt-oss-20b-GGUF:MXFP4",
               20.9, 3.6, 12_109_566_560, 24, 8, 64, window=128, full_every=2),
    KnownModel("Mistral Small 24B Instruct, Q4_K_M",
               "bartowski/Mistral-Small-24B-Instruct-2501-GGUF",
               23.6, 23.6, 14_333_908_672, 40, 8, 128),
    KnownModel("Gemma 3 27B, Q4_K_M", "ggml-org/gemma-3-27b-it-GGUF",
               27.0, 27.0, 16_546_404_736, 62, 16, 128, window=1024, full_every=6),
    KnownModel("Qwen3 30B-A3B, Q4_K_M", "Qwen/Qwen3-30B-A3B-GGUF",
               30.5, 3.3, 18_556_685_824, 48, 4, 128),
    KnownModel("Qwen3 32B, Q4_K_M", "Qwen/Qwen3-32B-GGUF",
               32.8, 32.8, 19_762_149_024, 64, 8, 128),
)
# fmt: on
"""Sorted by file size."""


@dataclass(frozen=True)
class Memory:
    """Free memory for a model, on GPUs or, if there are none, in main memory."""

    free: int
    gpus: tuple[str, ...] = ()

    @property
    def reserved(self) -> int:
        """Bytes reserved for compute buffers of each GPU, or for an archive in main memory."""
        return MARGIN * max(1, len(self.gpus))


def gpu_memory() -> Memory:
    gpus = discrete_gpus()
    return Memory(sum(gpu.free_bytes() for gpu in gpus), tuple(gpu.name for gpu in gpus))


@dataclass(frozen=True)
class Recommendation:
    """The recommended model.

    Attributes:
        memory: memory of the GPUs if a model fits there, otherwise main memory.
        n_tokens: length of the text and of its window.
        bandwidth: read bandwidth of main memory, in bytes per second; None if not measured.
        choice: the largest model that fits and reaches READABLE on a CPU, otherwise the fastest
            that fits; None if none fits.
    """

    memory: Memory
    n_tokens: int
    bandwidth: float | None = None
    choice: KnownModel | None = None

    def text(self, model: KnownModel, n_tokens: int | None = None) -> TextBytes:
        return model.text(n_tokens or self.n_tokens, on_gpu=bool(self.memory.gpus))

    def left(self, model: KnownModel) -> int:
        """Return the memory left for a cache, in bytes; token embeddings count as weights."""
        return self.memory.free - self.memory.reserved - model.file_bytes

    def fits(self, model: KnownModel) -> bool:
        return self.text(model).gpu <= self.left(model)

    def longest(self, model: KnownModel) -> tuple[int, int]:
        """Return the longest text with a full f16 cache, and with eviction, in tokens.

        They are multiples of 1,024, up to MAX_TOKENS.
        """
        left, steps = self.left(model), range(1024, MAX_TOKENS + 1, 1024)
        full = bisect_right(steps, left, key=lambda n: self.text(model, n).full)
        return 1024 * full, 1024 * bisect_right(steps, left, key=lambda n: self.text(model, n).gpu)

    def speed(self, model: KnownModel) -> float | None:
        """Return the upper limit of tokens per second by bandwidth; None if it is unknown.

        A token reads the cache and the active weights, assuming the same bits for all weights.
        """
        weights = model.file_bytes * model.active / model.parameters
        return self.bandwidth and self.bandwidth / (weights + self.text(model).evicting)

    def record(self) -> dict[str, Any]:
        return {
            "window": self.n_tokens,
            "memory_bytes": self.memory.free,
            "reserved_bytes": self.memory.reserved,
            "bytes_per_second": self.bandwidth,
            "gpus": list(self.memory.gpus),
            "choice": self.choice and self.choice.name,
            "models": list(map(self._record, KNOWN_MODELS)),
        }

    def _record(self, model: KnownModel) -> dict[str, Any]:
        text, (longest_full, longest) = self.text(model), self.longest(model)
        return {
            **asdict(model),
            **text.record(),
            "needed_bytes": model.file_bytes + text.gpu + self.memory.reserved,
            "fits": self.fits(model),
            "longest_full": longest_full,
            "longest_evicting": longest,
            "tokens_per_second": self.speed(model),
        }


def recommend(memory: Memory | None = None, n_tokens: int = WINDOW) -> Recommendation:
    """Choose a model for a GPU; None: for this machine's GPUs, or else its main memory."""
    found = Recommendation(memory or gpu_memory(), n_tokens)
    if fitting := list(filter(found.fits, KNOWN_MODELS)):
        return replace(found, choice=fitting[-1])
    if memory is not None:
        return found
    found = replace(found, memory=Memory(available_bytes()))
    if not (fitting := list(filter(found.fits, KNOWN_MODELS))):
        return found
    found = replace(found, bandwidth=_bandwidth())
    speeds = {model: found.speed(model) or 0.0 for model in fitting}
    readable = [model for model, speed in speeds.items() if speed >= READABLE]
    choice = readable[-1] if readable else max(fitting, key=speeds.__getitem__)
    return replace(found, choice=choice)


@functools.cache
def _bandwidth() -> float:
    """Measure the read bandwidth of main memory with all cores, in under a second."""
    return bytes_per_second(physical_cores(), size=256 * 2**20, tries=3)
