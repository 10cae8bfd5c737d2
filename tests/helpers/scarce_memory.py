"""Limit the memory of a process in tests."""

from __future__ import annotations

import os
import resource
import sys

import pytest


def can_limit_memory() -> bool:
    """Return False on macOS, an emulated kernel, or with a sanitizer, which reserves all memory."""
    if not sys.platform.startswith("linux") or "asan" in os.environ.get("LD_PRELOAD", ""):
        return False
    limits = resource.getrlimit(resource.RLIMIT_AS)
    other = 2**46 if limits[0] == resource.RLIM_INFINITY else limits[0] - 1
    resource.setrlimit(resource.RLIMIT_AS, (other, limits[1]))
    is_heard = resource.getrlimit(resource.RLIMIT_AS)[0] == other
    resource.setrlimit(resource.RLIMIT_AS, limits)
    return is_heard


limits_memory = pytest.mark.skipif(not can_limit_memory(), reason="nothing limits memory here")
