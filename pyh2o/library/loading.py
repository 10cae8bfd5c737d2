"""ggml's backends, where they are loaded when a program starts: wheels are built so.

A wheel has the CPU's backend for every kind of processor (GGML_CPU_ALL_VARIANTS), and ggml takes
the best one that runs here. Other builds are linked with their backends.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..errors import LibraryError
from .verdicts import read_verdicts

# ggml loads what it names as well: it may be of another ggml, and meant for another program.
_VARIABLE = "GGML_BACKEND_PATH"


def open_ggml(folder: Path) -> Any:
    """The library that loads backends, as ctypes has it."""
    (path,) = folder.glob("libggml.*")
    ggml = ctypes.CDLL(str(path))
    ggml.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    return ggml


def load_backends(ggml: Any, folder: Path) -> None:
    """Load the backends of this folder, and only those, unless ggml is linked with them.

    llama.cpp would do it by itself, but from the current folder and that of Python's program. A
    variant for the CPU that was found wrong on this processor is passed over.

    Args:
        ggml: `open_ggml(folder)`.
        folder: of the libraries.

    Raises:
        LibraryError: there is no backend for this processor.
    """
    if hasattr(ggml, "ggml_backend_cpu_reg"):
        return
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    named = os.environ.pop(_VARIABLE, None)
    ggml.ggml_log_set(quiet, None)
    try:
        if passed_over := read_verdicts(folder).passed_over:
            for path in without_variants(folder, passed_over):
                ggml.ggml_backend_load(os.fsencode(path))
        else:
            ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
    finally:
        ggml.ggml_log_set(None, None)
        if named is not None:
            os.environ[_VARIABLE] = named
    if not ggml.ggml_backend_reg_by_name(b"CPU"):
        raise LibraryError(
            f"pyh2o's library cannot be loaded: no libggml-cpu in {folder} fits this processor; "
            "install pyh2o again, on this machine"
        )


def variants(folder: Path) -> list[Path]:
    """ggml's code for the CPU where there is more than one: a file for each kind of processor."""
    return sorted(folder.glob("libggml-cpu-*.so"))


def without_variants(folder: Path, passed_over: Collection[str]) -> list[Path]:
    """The backends that ggml would load, with the best variant but for some.

    Args:
        folder: of the libraries.
        passed_over: names of files.
    """
    scores = {path: _score(path) for path in variants(folder) if path.name not in passed_over}
    best = max(scores, key=lambda path: scores[path], default=None)
    others = [
        path
        for path in sorted(folder.glob("libggml-*.so"))
        if not path.name.startswith(("libggml-base", "libggml-cpu"))
    ]
    return [*others, best] if best is not None and scores[best] else others


def _score(variant: Path) -> int:
    """What ggml chooses by; 0 where the variant does not run on this processor."""
    try:
        return int(ctypes.CDLL(str(variant)).ggml_backend_score())
    except (OSError, AttributeError):
        return 0
