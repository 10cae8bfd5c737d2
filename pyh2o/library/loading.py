"""Loading ggml's backends, in builds that are not linked with them.

A wheel has a variant of the CPU backend for every kind of processor (GGML_CPU_ALL_VARIANTS), of
which ggml chooses the best one. Other builds are linked with their backends.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..errors import LibraryError
from .verdicts import read_verdicts

# ggml loads the library that it names, too, which may belong to another version of ggml.
_VARIABLE = "GGML_BACKEND_PATH"


def open_ggml(folder: Path) -> Any:
    (path,) = folder.glob("libggml.*")
    ggml = ctypes.CDLL(str(path))
    ggml.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    return ggml


def load_backends(ggml: Any, folder: Path) -> None:
    """Load only the backends of this folder, unless ggml is linked with its backends.

    llama.cpp would load them from the current folder and that of the Python executable. CPU
    variants that gave wrong results on this processor are skipped.
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
            f"pyh2o's library cannot be loaded: no libggml-cpu in {folder} runs on this processor; "
            "install pyh2o again, on this machine"
        )


def variants(folder: Path) -> list[Path]:
    """Return the variants of the CPU backend, one for each kind of processor."""
    return sorted(folder.glob("libggml-cpu-*.so"))


def without_variants(folder: Path, passed_over: Collection[str]) -> list[Path]:
    """Return the backends that ggml would load without some CPU variants."""
    scores = {path: _score(path) for path in variants(folder) if path.name not in passed_over}
    best = max(scores, key=lambda path: scores[path], default=None)
    others = [
        path
        for path in sorted(folder.glob("libggml-*.so"))
        if not path.name.startswith(("libggml-base", "libggml-cpu"))
    ]
    return [*others, best] if best is not None and scores[best] else others


def _score(variant: Path) -> int:
    """Return ggml's score of a variant; 0 if it does not run on this processor."""
    try:
        return int(ctypes.CDLL(str(variant)).ggml_backend_score())
    except (OSError, AttributeError):
        return 0
