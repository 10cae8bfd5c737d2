"""Python policies as callbacks of the native library at compactions (see llama_h2o_scorer)."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from .._native import ffi, lib
from ..policies import NATIVE_POLICIES, HeadRows, Policy, checked_scores

_SCOPES = {
    "head": lib.LLAMA_H2O_SCOPE_HEAD,
    "layer": lib.LLAMA_H2O_SCOPE_LAYER,
    "cache": lib.LLAMA_H2O_SCOPE_CACHE,
}


class _Raised(threading.local):
    """The error that a policy raised in this thread: no exception can pass through llama.cpp."""

    error: BaseException | None = None


_raised = _Raised()


def take_error() -> BaseException | None:
    """Return the error that a policy raised in this thread since the last call; None for none."""
    error, _raised.error = _raised.error, None
    return error


@dataclass(frozen=True)
class _Scorer:
    """A policy and the recent window of its cache."""

    policy: Policy
    n_recent: int


# Handles of the scorers, by the address of the context: no Python object lives as long as that.
_handles: dict[int, Any] = {}


def scorer_of(policy: Policy, n_recent: int, context: Any) -> Any:
    """Return a struct llama_h2o_scorer * for a context; NULL for a native policy.

    The policy is kept alive until another context has the same address.
    """
    address = int(ffi.cast("uintptr_t", context))
    _handles.pop(address, None)
    if type(policy) in NATIVE_POLICIES:
        return ffi.NULL
    handle = _handles[address] = ffi.new_handle(_Scorer(policy, n_recent))
    values = {
        "score": _score,
        "data": handle,
        "needs": sum(getattr(lib, f"LLAMA_H2O_NEEDS_{need.upper()}") for need in policy.needs),
        "n_queries": policy.n_queries,
        "n_near": policy.n_near,
        "scope": _SCOPES[policy.scope],
        "half_life": policy.half_life or 0.0,
    }
    return ffi.new("struct llama_h2o_scorer *", values)


def _keep_error(_kind: type[BaseException], error: BaseException, _trace: TracebackType) -> None:
    _raised.error = error


# A signal handler may raise before the first instruction, where no `try` can catch it.
@ffi.callback(  # type: ignore[untyped-decorator]
    "bool(void *, const struct llama_h2o_head_rows *, double *)", onerror=_keep_error
)
def _score(data: Any, native: Any, scores: Any) -> bool:
    scorer: _Scorer = ffi.from_handle(data)
    n = native.n_rows
    positions = _array(native.pos, np.int32, n)
    order = np.argsort(positions)
    rows = _head_rows(native, positions, order, scorer)
    _array(scores, np.float64, n)[order] = checked_scores(scorer.policy, rows)
    return True


def _head_rows(
    native: Any, positions: npt.NDArray[np.int32], order: npt.NDArray[np.intp], scorer: _Scorer
) -> HeadRows:
    """Return copies of the rows in text order, which a policy may keep."""
    n, d = native.n_rows, native.n_embd_k
    standing = _array(native.standing, np.uint8, n)[order]
    of_rows: dict[str, Any] = {
        name: _array(getattr(native, name), np.float32, n)[order]
        for name in ("attention", "squares", "query_attention", "value_norms")
        if name in scorer.policy.needs
    }
    pairs = _neighbours(native)
    if "keys" in scorer.policy.needs:
        of_rows["keys"] = _array(native.keys, np.float32, n, d)[order][:, pairs]
    if "queries" in scorer.policy.needs:
        shape = native.n_queries, native.n_group, d
        of_rows["queries"] = _array(native.queries, np.float32, *shape)[..., pairs]
        of_rows["query_positions"] = _array(native.query_pos, np.int32, shape[0]).astype(np.int64)
    if native.rope_angles != ffi.NULL:
        angles = _array(native.rope_angles, np.float64, native.n_rope // 2)
        of_rows["rope_frequencies"] = np.pad(angles, (0, d // 2 - angles.size))
    return HeadRows(
        positions=positions[order].astype(np.int64),
        newest=native.newest,
        pinned=standing == lib.LLAMA_H2O_PINNED,
        competing=standing == lib.LLAMA_H2O_COMPETING,
        n_places=native.n_places,
        n_recent=scorer.n_recent,
        layer=native.il,
        head=native.head,
        scale=native.kq_scale,
        **of_rows,
    )


def _neighbours(native: Any) -> npt.NDArray[np.intp]:
    """Return an order of key elements in which pairs that RoPE rotates together are adjacent."""
    rotated = np.arange(native.n_rope)
    if native.rope_neox:
        rotated = rotated.reshape(2, -1).T.ravel()
    rotated += native.rope_first
    others = np.setdiff1d(np.arange(native.n_embd_k), rotated)
    return np.concatenate([rotated, others])


def _array(pointer: Any, dtype: Any, *shape: int) -> npt.NDArray[Any]:
    """Return a view of native memory."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(ffi.buffer(pointer, size), dtype).reshape(shape)
