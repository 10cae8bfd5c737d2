"""Continuous batching: several texts in one context."""

from .engine import Engine

__all__ = ["Engine"]
