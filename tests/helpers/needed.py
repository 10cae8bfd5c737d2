"""Optional packages: tests that need one skip with instructions to install it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest


def needed(module: str, *, name: str = "", install: str = "'.[test]'") -> Any:
    """Import the module, or skip a test, or a whole file if called at its top.

    A failed import of pyh2o itself is an error. `install` is what pip installs the package by.
    """
    try:
        return import_module(module)
    except ImportError as error:
        if str(error.name).partition(".")[0] == "pyh2o":
            raise
        pytest.skip(f"needs {name or module}: pip install {install}", allow_module_level=True)
