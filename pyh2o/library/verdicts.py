"""What was found out about this library on this processor, kept from one start to the next."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import platformdirs

from ..system.files import replacement
from . import LIBRARY_FOLDER
from .machine import cpu_name, instruction_sets

CURE = (
    "install pyh2o again with a newer compiler, or with "
    'CMAKE_ARGS="-DLLAMA_BUILD=OFF -DGGML_NATIVE=OFF"'
)
"""For a library that was compiled wrongly: without AMX, for one."""

_MOST_LIBRARIES = 8  # that the file remembers: each environment of a user has its own


@dataclass
class Verdicts:
    """What is known.

    Attributes:
        products: what is wrong with weights as ggml rearranges them, by their type and the device;
            "" for nothing. As they lie in the file they are right.
        passed_over: variants of ggml's code for the CPU that are not loaded: which types are wrong
            in them, and how.
    """

    products: dict[str, str] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)


def passed_over_text(variant: str, types: str) -> str:
    """That a variant is not loaded, and for which types."""
    return f"{variant} is passed over, which fails on this processor with weights in {types}"


def read_verdicts(folder: Path = LIBRARY_FOLDER) -> Verdicts:
    """What is known of the library in a folder; nothing, if the file is damaged."""
    try:
        known = Verdicts(**_read()[_identity(folder)])
        texts = [*known.products.values(), *known.passed_over.values()]
        return known if all(isinstance(text, str) for text in texts) else Verdicts()
    except (LookupError, TypeError, AttributeError):
        return Verdicts()


def keep_verdicts(verdicts: Verdicts, folder: Path = LIBRARY_FOLDER) -> None:
    """Keep what is known, if the file can be written."""
    identity = _identity(folder)
    others = {name: known for name, known in _read().items() if name != identity}
    newest = [*others.items()][1 - _MOST_LIBRARIES :]
    with contextlib.suppress(OSError):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacement(path, prefix=path.stem) as file:
            file.write(json.dumps({**dict(newest), identity: asdict(verdicts)}).encode())


def _read() -> dict[str, dict[str, dict[str, str]]]:
    try:
        content = json.loads(_path().read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _path() -> Path:
    try:
        return Path(platformdirs.user_cache_dir("pyh2o", appauthor=False)) / "verdicts.json"
    except RuntimeError:
        raise OSError("this user has no home folder") from None


def _identity(folder: Path) -> str:
    """Of the library's files and the processor."""
    files = [(path.name, path.stat()) for path in sorted(folder.glob("lib*"))]
    about = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    whole = repr((str(folder), about, cpu_name(), instruction_sets()))
    return hashlib.sha256(whole.encode()).hexdigest()
