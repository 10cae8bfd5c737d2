"""A folder that pyh2o keeps files in: whether there is room, and whether it can be written to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Folder:
    """A folder as it is now.

    Attributes:
        keeps: what lies in it, such as "models".
        path: of the folder.
        variable: of the environment, which names another one.
        is_there: whether it exists; it is created when it is needed.
        writable: whether files can be written there, or the folder be created.
        free_bytes: of its disk; None where the system does not tell.
        n_items: that it keeps, models or sessions; each may lie in several files.
        n_bytes: that those take.
        names: of what it keeps, if they are to be told.
    """

    keeps: str
    path: str
    variable: str
    is_there: bool
    writable: bool
    free_bytes: int | None
    n_items: int
    n_bytes: int
    names: tuple[str, ...]


def look_at_folder(
    keeps: str, path: Path, variable: str, *, sizes: Sequence[int], names: Sequence[str] = ()
) -> Folder:
    """The folder at a path, which need not exist.

    Args:
        keeps, path, variable, names: as in `Folder`.
        sizes: bytes of each thing that it keeps.
    """
    nearest = next(each for each in (path, *path.parents) if os.path.exists(each))  # noqa: PTH110
    try:
        free = shutil.disk_usage(nearest).free
    except OSError:
        free = None
    return Folder(
        keeps,
        str(path),
        variable,
        is_there=nearest == path,
        writable=nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        free_bytes=free,
        n_items=len(sizes),
        n_bytes=sum(sizes),
        names=tuple(names),
    )
