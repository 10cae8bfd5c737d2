"""Folders of the user, and paths that begin with one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with the home folder for ~; that of a user who is not there stays, as in a shell."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def user_folder(variable: str, usual: Callable[..., str], name: str) -> Path:
    """The place that a variable of the environment names, or else the usual one.

    Args:
        variable: its name.
        usual: of platformdirs, in which folder the usual one is.
        name: of the usual one in our part of that.

    Raises:
        OSError: this user has no home folder.
    """
    if chosen := os.environ.get(variable):
        return expanded(chosen).absolute()
    try:
        return Path(usual("pyh2o", appauthor=False)) / name
    except RuntimeError:
        raise OSError(f"this user has no home folder: set HOME, or {variable}") from None
