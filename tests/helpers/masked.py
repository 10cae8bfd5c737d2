"""llama.cpp's full cache with rows masked in single heads: the oracle of dropped rows.

It needs no second implementation, so it covers every architecture: while a graph runs, the
probabilities after each softmax are replaced by those of a softmax without the masked rows.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pyh2o import Llama
from pyh2o.core.model import Model
from pyh2o.core.parameters import Parameters
from pyh2o.core.text import Text
from tiny_llama import EXACT_ROWS, ONE_THREAD

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_OBSERVER = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


class _Tensor(ctypes.Structure):
    """The start of a ggml_tensor, up to its name."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    )


@dataclass(frozen=True)
class _Observed(Parameters):
    """Parameters of a context whose graphs are observed while they run."""

    observer: Any = None

    def for_context(self, n_ctx: int) -> Any:
        params = super().for_context(n_ctx)
        params.cb_eval = ctypes.cast(self.observer, llama_cpp.ggml_backend_sched_eval_callback)
        return params


class MaskedLlama(Llama):
    """A full cache whose attention probabilities can be read and changed.

    Attributes:
        visible: positions that each KV head of a layer attends to; other layers attend to all.
        probabilities: [n_head, n_tokens, n_rows] of each layer in the last graph.
    """

    def __init__(self, path: Path, *, n_ctx: int = 0, **settings: Any) -> None:
        self.visible: Mapping[int, Sequence[IntArray]] = {}
        self.probabilities: dict[int, FloatArray] = {}
        observer = _OBSERVER(self._observe)
        parameters = _Observed(**ONE_THREAD, **EXACT_ROWS, **settings, observer=observer)
        self._arguments = {}
        model = Model(str(path), evict=False, n_ctx=n_ctx, parameters=parameters)
        self._adapt(Text(model, keeps_logits=parameters.logits_all), owns_model=True)

    def _observe(self, address: int, is_question: bool, _: object) -> bool:
        tensor = _Tensor.from_address(address)
        found = re.fullmatch(rb"kq_soft_max-(\d+)", tensor.name)
        if is_question or not found:
            return bool(found)
        n_kv, n_tokens, n_head, _ = tensor.ne
        buffer = (ctypes.c_float * (n_kv * n_tokens * n_head)).from_address(tensor.data)
        probabilities = np.frombuffer(buffer, np.float32).reshape(n_head, n_tokens, n_kv)
        layer = int(found[1])
        if layer in self.visible:
            _hide(probabilities, self.visible[layer])
        self.probabilities[layer] = probabilities.copy()
        return True


def _hide(probabilities: FloatArray, visible: Sequence[IntArray]) -> None:
    """Replace them by those of a softmax without the masked rows; sinks stay."""
    group = len(probabilities) // len(visible)
    for head, of_head in enumerate(probabilities):
        hidden = np.ones(of_head.shape[1], dtype=np.bool_)
        hidden[visible[head // group]] = False
        rest = 1 - of_head[:, hidden].sum(axis=1, keepdims=True)
        of_head[:, hidden] = 0
        of_head /= rest
