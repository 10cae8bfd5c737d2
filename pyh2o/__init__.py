"""Long dialogues and long stories on a small machine: llama.cpp with a KV cache of fixed size.

    from pyh2o import Llama

    llm = Llama(model_path="model.gguf", n_ctx=8192, hh=0.1, recent=0.1)

`Llama` is `llama_cpp.Llama` with the same methods. It keeps the recent tokens and those that have
collected most attention, per layer and KV head (H2O, the Heavy-Hitter Oracle).

    from pyh2o import Conversation

    conversation = Conversation(llm, system="You are a guide of Venice.")
    for text in conversation.say("What should I see first?"):
        print(text, end="", flush=True)

`Conversation` feeds only new messages to the model, and can be saved and resumed. `Story` writes a
text of any length, which can be interrupted at any token and resumed exactly there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import library
from .cache.settings import EvictionSettings
from .cache.statistics import KVStatistics
from .errors import PyH2OError
from .library import __version__, build_info
from .writing.sampling import Sampling
from .writing.thinking import Thinking

if TYPE_CHECKING:
    from .compat.llama import Llama
    from .core.rows import HeavyHitter
    from .sessions.conversation import Conversation
    from .sessions.story import Story
    from .sessions.turns import Turn

__path__ = library.package_folders()
library.lend_to_llama_cpp()

__all__ = [
    "Conversation",
    "EvictionSettings",
    "HeavyHitter",
    "KVStatistics",
    "Llama",
    "PyH2OError",
    "Sampling",
    "Story",
    "Thinking",
    "Turn",
    "__version__",
    "build_info",
]


_LOADED_WHEN_USED = {
    "Conversation": "sessions.conversation",
    "HeavyHitter": "core.rows",
    "Llama": "compat.llama",
    "Story": "sessions.story",
    "Turn": "sessions.turns",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # Loading the native libraries takes a moment that `pyh2o --help` does not need.
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    library.check_library()
    return getattr(import_module(f".{_LOADED_WHEN_USED[name]}", __name__), name)
