"""Many texts at once: one model, one context, one batch after the other."""

from .engine import Engine

__all__ = ["Engine"]
