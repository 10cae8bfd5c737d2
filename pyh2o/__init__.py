"""Long dialogues and long stories on a small machine: llama.cpp with a KV cache of fixed size.

    from pyh2o import Llama

    llm = Llama(model_path="model.gguf", n_ctx=8192, hh=0.1, recent=0.1)

`Llama` is `llama_cpp.Llama` with the same methods. It keeps the recent tokens and those that have
collected most attention, per layer and KV head (H2O, the Heavy-Hitter Oracle).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ._library import build_info
from .errors import PyH2OError
from .settings import EvictionSettings
from .statistics import KVStatistics

if TYPE_CHECKING:
    from .llama import HeavyHitter, Llama

try:
    __version__ = version("pyh2o-llm")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0"

__all__ = [
    "EvictionSettings",
    "HeavyHitter",
    "KVStatistics",
    "Llama",
    "PyH2OError",
    "__version__",
    "build_info",
]


def __getattr__(name: str) -> Any:
    # Loading the native libraries takes a moment that `pyh2o --help` does not need.
    if name in ("HeavyHitter", "Llama"):
        from . import llama

        return getattr(llama, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
