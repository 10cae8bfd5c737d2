"""Long dialogues and long stories on a small machine: llama.cpp with a KV cache of fixed size.

    from pyh2o import Llama

    llm = Llama(model_path="model.gguf", n_ctx=8192, hh=0.1, recent=0.1)

`Llama` is `llama_cpp.Llama` with the same methods. It keeps the recent tokens and those that have
collected most attention, per layer and KV head (H2O, the Heavy-Hitter Oracle).

    from pyh2o import Conversation

    conversation = Conversation(llm, system="You are a guide of Venice.")
    for text in conversation.say("What should I see first?"):
        print(text, end="", flush=True)

`Conversation` feeds the model only what is new, and can be saved and gone on with. `Story` writes a
text of any length that can be left at any token and gone on with exactly there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import library
from .errors import PyH2OError
from .library import build_info

if TYPE_CHECKING:
    from .cache.settings import EvictionSettings
    from .cache.statistics import KVStatistics
    from .generation.sampling import Sampling
    from .llama import HeavyHitter, Llama
    from .sessions.conversation import Conversation
    from .sessions.story import Story
    from .sessions.turns import Turn

    __version__: str

__path__ = library.package_folders()
library.lend_to_llama_cpp()

# Where the rest is. It is imported when it is asked for: NumPy and the native libraries take a
# moment, in which the command line could not answer to Ctrl-C.
_RECORDS = {
    "EvictionSettings": ".cache.settings",
    "KVStatistics": ".cache.statistics",
    "Sampling": ".generation.sampling",
}
_ON_LLAMA_CPP = {
    "Conversation": ".sessions.conversation",
    "HeavyHitter": ".llama",
    "Llama": ".llama",
    "Story": ".sessions.story",
    "Turn": ".sessions.turns",
}

__all__ = [
    "Conversation",
    "EvictionSettings",
    "HeavyHitter",
    "KVStatistics",
    "Llama",
    "PyH2OError",
    "Sampling",
    "Story",
    "Turn",
    "__version__",
    "build_info",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _ON_LLAMA_CPP:
        library.check_library()
    module = _RECORDS.get(name) or _ON_LLAMA_CPP.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module, __name__), name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pyh2o-llm")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0"
