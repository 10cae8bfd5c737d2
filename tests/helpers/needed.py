"""Packages that not every machine has: the tests that need one say how to get it."""

from __future__ import annotations

from typing import Any

import pytest


def needed(module: str, *, name: str = "", install: str = "'.[test]'") -> Any:
    """The module, or skip: a test, or a whole file where this is called at its top.

    Args:
        module: to import.
        name: of what is missing, if not the module itself.
        install: what pip is to install.
    """
    reason = f"needs {name or module}: pip install {install}"
    return pytest.importorskip(module, reason=reason, exc_type=ImportError)
