"""The models folder, and what fetching a model into it needs."""

from __future__ import annotations

import errno
import hashlib
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from ..errors import ModelError
from ..system.home import user_folder

PACKAGE_PREFIX = ".fetching-"
"""Of folders with packages that pip downloads."""

HUB_PREFIX = ".hub-"
"""Of partial downloads from the hub."""

KEPT_SECONDS = 7 * 24 * 3600
"""How long an interrupted download is kept."""

Progress = Callable[[int, int], None]
"""Called with the bytes received and the bytes expected."""


@dataclass(frozen=True)
class Fetched:
    """A model in the models folder; `new` is False if it was there before."""

    path: Path
    new: bool


def models_folder() -> Path:
    """Return the folder of fetched models: PYH2O_MODELS, or one in the user's cache folder."""
    return user_folder("PYH2O_MODELS", platformdirs.user_cache_dir, "models")


def prepare_folder(folder: Path) -> None:
    """Create the models folder, or remove interrupted downloads that are too old to resume."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob(f"{PACKAGE_PREFIX}*"), *folder.glob(f"{HUB_PREFIX}*")]:
        with suppress(OSError):  # another process has removed it
            if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def check_space(folder: Path, needed: int) -> None:
    """Refuse to fetch `needed` bytes to a disk with less free space."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{folder} has {free / 1e6:.0f} MB free and the fetch needs {needed / 1e6:.0f} MB: "
            "free some space, or set PYH2O_MODELS to a folder on another disk"
        )


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def disk_message(folder: Path, error: OSError) -> str:
    """Return why the models folder cannot be used, and the cure."""
    if error.errno == errno.ENOSPC:
        return f"the disk of {folder} is full: free some space, or set PYH2O_MODELS elsewhere"
    return (
        f"the models folder {folder} cannot be used ({error.strerror}): make it writable, or set "
        "PYH2O_MODELS to another folder"
    )
