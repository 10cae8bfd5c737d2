"""The folder in which models live, and what all that put files there need."""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from ..errors import ModelError
from ..system.home import user_folder

CHUNK = 1 << 20

Progress = Callable[[int, int], None]
"""Called with the bytes that have arrived and the bytes expected."""


@dataclass(frozen=True)
class Fetched:
    """Where a model is; `new` is False if it was there already."""

    path: Path
    new: bool


def models_folder() -> Path:
    """The folder for fetched models: PYH2O_MODELS, or one in the user's cache folder."""
    return user_folder("PYH2O_MODELS", platformdirs.user_cache_dir, "models")


def check_space(folder: Path, needed: int) -> None:
    """Refuse a disk without room for so many bytes.

    Raises:
        ModelError: what it has free is too little.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{folder} has {free / 1e6:.0f} MB free and the fetch needs {needed / 1e6:.0f} MB: "
            "free some, or set PYH2O_MODELS to a folder on another disk"
        )


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def disk_message(folder: Path, error: OSError) -> str:
    """Why the models folder could not be used, and what helps."""
    if error.errno == errno.ENOSPC:
        return f"the disk of {folder} became full: free some space, or set PYH2O_MODELS elsewhere"
    return (
        f"the models folder {folder} cannot be used ({error.strerror}): make it writable, or set "
        "PYH2O_MODELS to another folder"
    )
