"""Folders of the user, and paths with ~."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """Expand ~ in a path; as in a shell, that of an unknown user is kept."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def user_folder(variable: str, usual: Callable[..., str], name: str) -> Path:
    """Return the folder in an environment variable, or platformdirs' `usual` one with `name`."""
    if chosen := os.environ.get(variable):
        return expanded(chosen).absolute()
    try:
        return Path(usual("pyh2o", appauthor=False)) / name
    except RuntimeError:
        raise OSError(f"this user has no home folder: set HOME, or {variable}") from None
