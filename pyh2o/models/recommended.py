"""Models to begin with, and which of them this machine has memory and speed for.

Files and their sizes are those of the hub's repositories, parameters those of the models' cards.
The caches are what `describe_model` says of models with the layers, KV heads and head sizes of the
cards, which a test has and computes again.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..library.backends import discrete_gpus
from ..library.devices import MARGIN
from ..system.bandwidth import bytes_per_second
from ..system.memory import available_bytes
from ..system.threads import physical_cores

WINDOW = 32_768
"""Tokens that the caches are for."""

READABLE = 5.0
"""Tokens per second that a person reads without waiting."""


@dataclass(frozen=True)
class KnownModel:
    """A model that `pyh2o models fetch` can fetch.

    Attributes:
        title: for people.
        name: what `fetch` is given.
        parameters: billions of them.
        active: billions that a token is computed with; fewer in a mixture of experts.
        file_bytes: of the GGUF file.
        full_bytes: of the full cache, where layers with a window keep that, as in llama-server.
        evicting_bytes: of the cache of fixed size with the settings that are the default.
    """

    title: str
    name: str
    parameters: float
    active: float
    file_bytes: int
    full_bytes: int
    evicting_bytes: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes of weights and cache that are read for a token, if all weights have equal bits."""
        return self.file_bytes * self.active / self.parameters + self.evicting_bytes


# fmt: off
KNOWN_MODELS = (
    KnownModel("Llama 3.2 1B Instruct, Q4_K_M", "bartowski/Llama-3.2-1B-Instruct-GGUF",
               1.2, 1.2, 807_694_464, 1_073_741_824, 204_472_320),
    KnownModel("Llama 3.2 3B Instruct, Q4_K_M", "bartowski/Llama-3.2-3B-Instruct-GGUF",
               3.2, 3.2, 2_019_377_696, 3_758_096_384, 710_148_096),
    KnownModel("Gemma 3 4B, Q4_K_M", "ggml-org/gemma-3-4b-it-GGUF",
               3.9, 3.9, 2_489_757_856, 853_540_864, 308_772_864),
    KnownModel("Qwen3 4B, Q4_K_M", "Qwen/Qwen3-4B-GGUF",
               4.0, 4.0, 2_497_280_256, 4_831_838_208, 913_047_552),
    KnownModel("Llama 3.1 8B Instruct, Q4_K_M", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
               8.0, 8.0, 4_920_739_232, 4_294_967_296, 811_597_824),
    KnownModel("Qwen3 8B, Q4_K_M", "Qwen/Qwen3-8B-GGUF",
               8.2, 8.2, 5_027_783_488, 4_831_838_208, 913_047_552),
    KnownModel("Gemma 3 12B, Q4_K_M", "ggml-org/gemma-3-12b-it-GGUF",
               11.8, 11.8, 7_300_574_976, 2_650_800_128, 907_542_528),
    KnownModel("Mistral Nemo 12B Instruct, Q4_K_M", "bartowski/Mistral-Nemo-Instruct-2407-GGUF",
               12.2, 12.2, 7_477_208_192, 5_368_709_120, 1_014_497_280),
    KnownModel("Qwen3 14B, Q4_K_M", "Qwen/Qwen3-14B-GGUF",
               14.8, 14.8, 9_001_752_960, 5_368_709_120, 1_014_497_280),
    KnownModel("gpt-oss 20B, MXFP4", "ggml-org/gpt-oss-20b-GGUF:MXFP4",
               20.9, 3.6, 12_109_566_560, 824_180_736, 172_228_608),
)
# fmt: on
"""The smallest file first."""


@dataclass(frozen=True)
class Recommendation:
    """The models, and what there is for them.

    Attributes:
        memory: bytes that are free: of the GPUs if a model fits there, else of main memory.
        gpus: names of those; empty for main memory.
        bandwidth: bytes of main memory that are read per second; None if that was not measured.
        choice: the largest model that fits and is READABLE on a CPU, or else the fastest that fits;
            None if none does.
    """

    memory: int
    gpus: tuple[str, ...]
    bandwidth: float | None = None
    choice: KnownModel | None = None

    def needed(self, model: KnownModel) -> int:
        """Bytes of a model's weights and cache and beside them.

        Beside them is in main memory the archive of a long text, on a GPU what llama.cpp computes
        in.
        """
        return model.file_bytes + model.evicting_bytes + MARGIN * max(1, len(self.gpus))

    def fits(self, model: KnownModel) -> bool:
        """Whether there is memory for a model."""
        return self.needed(model) <= self.memory

    def speed(self, model: KnownModel) -> float | None:
        """Tokens per second, at most: those that the bandwidth allows. None if that is unknown."""
        return self.bandwidth and self.bandwidth / model.bytes_per_token

    def record(self) -> dict[str, Any]:
        """All of it, fit for JSON."""
        models = [
            {
                **asdict(model),
                "needed_bytes": self.needed(model),
                "fits": self.fits(model),
                "tokens_per_second": self.speed(model),
            }
            for model in KNOWN_MODELS
        ]
        return {
            "window": WINDOW,
            "memory_bytes": self.memory,
            "bytes_per_second": self.bandwidth,
            "gpus": list(self.gpus),
            "choice": self.choice and self.choice.name,
            "models": models,
        }


def recommend() -> Recommendation:
    """Look what memory this machine has left and how fast it is read, and choose a model."""
    gpus = discrete_gpus()
    names, free = tuple(gpu.name for gpu in gpus), sum(gpu.free_bytes() for gpu in gpus)
    found = Recommendation(free, names)
    if fitting := list(filter(found.fits, KNOWN_MODELS)):
        return replace(found, choice=fitting[-1])
    found = Recommendation(available_bytes(), ())
    if not (fitting := list(filter(found.fits, KNOWN_MODELS))):
        return found
    bandwidth = _bandwidth()
    speeds = {model: bandwidth / model.bytes_per_token for model in fitting}
    readable = [model for model, speed in speeds.items() if speed >= READABLE]
    choice = readable[-1] if readable else max(fitting, key=speeds.__getitem__)
    return replace(found, bandwidth=bandwidth, choice=choice)


@functools.cache
def _bandwidth() -> float:
    """Bytes of main memory that all cores together read per second; it takes part of a second."""
    return bytes_per_second(physical_cores(), size=256 * 2**20, tries=3)
