"""Models to begin with, and which of them this machine has memory for.

Files and their sizes are those of the hub's repositories, parameters those of the models' cards.
The caches are what `describe_model` says of models with the layers, KV heads and head sizes of the
cards, which a test has and computes again.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..library.backends import discrete_gpus
from ..library.devices import MARGIN
from ..system.memory import available_bytes

WINDOW = 32_768
"""Tokens that the caches are for."""

MOST_ON_CPU = 9.0
"""Billions of parameters that a CPU computes with for each token while a person waits."""


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
        choice: the largest model that fits and is not too slow; None if none is.
    """

    memory: int
    gpus: tuple[str, ...]
    choice: KnownModel | None = None

    def needed(self, model: KnownModel) -> int:
        """Bytes of a model's weights and cache and beside them.

        Beside them is in main memory the archive at its largest, on a GPU what llama.cpp computes
        in.
        """
        return model.file_bytes + model.evicting_bytes + MARGIN * max(1, len(self.gpus))

    def fits(self, model: KnownModel) -> bool:
        """Whether there is memory for a model."""
        return self.needed(model) <= self.memory

    def record(self) -> dict[str, Any]:
        """All of it, fit for JSON."""
        models = [
            {**asdict(model), "needed_bytes": self.needed(model), "fits": self.fits(model)}
            for model in KNOWN_MODELS
        ]
        return {
            "window": WINDOW,
            "memory_bytes": self.memory,
            "gpus": list(self.gpus),
            "choice": self.choice and self.choice.name,
            "models": models,
        }


def recommend() -> Recommendation:
    """Look what memory this machine has left, and choose a model."""
    gpus = discrete_gpus()
    names, free = tuple(gpu.name for gpu in gpus), sum(gpu.free_bytes() for gpu in gpus)
    for found, most_active in (
        (Recommendation(free, names), math.inf),
        (Recommendation(available_bytes(), ()), MOST_ON_CPU),
    ):
        fitting = [
            model for model in KNOWN_MODELS if found.fits(model) and model.active <= most_active
        ]
        if fitting:
            return replace(found, choice=fitting[-1])
    return found
