"""The C interface of native/include/llama-h2o.h, as it is. Friendlier layers stand above it."""

from __future__ import annotations

from ._ffi import ffi, lib

__all__ = ["ffi", "lib"]
