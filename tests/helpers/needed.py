"""Packages that not every machine has: the tests that need one say how to get it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest


def needed(module: str, *, name: str = "", install: str = "'.[test]'") -> Any:
    """The module, or skip: a test, or a whole file where this is called at its top.

    An import of pyh2o's own that fails is an error: no package is missing.

    Args:
        module: to import.
        name: of what is missing, if not the module itself.
        install: what pip is to install.
    """
    try:
        return import_module(module)
    except ImportError as error:
        if str(error.name).partition(".")[0] == "pyh2o":
            raise
        pytest.skip(f"needs {name or module}: pip install {install}", allow_module_level=True)
