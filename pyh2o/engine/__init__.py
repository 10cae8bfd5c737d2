"""Many texts at once: one model, one context, one batch after the other."""

from .async_engine import AsyncEngine
from .engine import Engine

__all__ = ["AsyncEngine", "Engine"]
