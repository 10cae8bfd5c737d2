"""Cached results of trying this library on this processor."""

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
"""For a miscompiled library, for example one without AMX."""

_MOST_LIBRARIES = 8  # in the file: each Python environment has its own


@dataclass
class Verdicts:
    """Results of trying weights.

    Attributes:
        products: the error of weights that ggml rearranges, by type and device; "" for none. These
            types are right as stored in the file.
        passed_over: CPU variants that are not loaded, with the types that are wrong in them.
    """

    products: dict[str, str] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)


def passed_over_text(variant: str, types: str) -> str:
    """Return the message that a variant is not loaded because of some types."""
    return f"{variant} is skipped because it fails on this processor with weights in {types}"


def read_verdicts(folder: Path = LIBRARY_FOLDER) -> Verdicts:
    """Return the results of the library in a folder; none if the file is damaged."""
    try:
        known = Verdicts(**_read()[_identity(folder)])
        texts = [*known.products.values(), *known.passed_over.values()]
        return known if all(isinstance(text, str) for text in texts) else Verdicts()
    except (LookupError, TypeError, AttributeError):
        return Verdicts()


def keep_verdicts(verdicts: Verdicts, folder: Path = LIBRARY_FOLDER) -> None:
    """Write the results, if the file can be written."""
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
    """Return a hash of the library's files and the processor."""
    files = [(path.name, path.stat()) for path in sorted(folder.glob("lib*"))]
    about = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    whole = repr((str(folder), about, cpu_name(), instruction_sets()))
    return hashlib.sha256(whole.encode()).hexdigest()
