"""What was found out about this library on this processor, kept from one start to the next."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import platformdirs

from ..system.files import replacement
from . import LIBRARY_FOLDER
from .machine import cpu_name, instruction_sets

Verdicts = dict[str, str]
"""What is wrong with weights as ggml rearranges them, by their type and the device; "" for nothing.
As they lie in the file they are right."""


def read_verdicts(folder: Path = LIBRARY_FOLDER) -> Verdicts:
    """What is known of the library in a folder; nothing, if its file is damaged."""
    try:
        known = json.loads(_path(folder).read_bytes())
    except (OSError, ValueError):
        return {}
    is_sound = isinstance(known, dict) and all(isinstance(text, str) for text in known.values())
    return known if is_sound else {}


def keep_verdicts(verdicts: Verdicts, folder: Path = LIBRARY_FOLDER) -> None:
    """Keep what is known, if the file can be written."""
    with contextlib.suppress(OSError):
        path = _path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacement(path, prefix="verdicts") as file:
            file.write(json.dumps(verdicts).encode())


def _path(folder: Path) -> Path:
    """The file of the library and the processor: each environment of a user has its own."""
    try:
        place = Path(platformdirs.user_cache_dir("pyh2o", appauthor=False))
    except RuntimeError:
        raise OSError("this user has no home folder") from None
    files = [(path.name, path.stat()) for path in sorted(folder.glob("lib*"))]
    about = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    whole = repr((str(folder), about, cpu_name(), instruction_sets()))
    return place / f"verdicts-{hashlib.sha256(whole.encode()).hexdigest()[:16]}.json"
