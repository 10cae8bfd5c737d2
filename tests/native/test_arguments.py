"""The native interface refuses invalid arguments and leaves no trace of them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from pyh2o import Llama
from pyh2o._native import ffi, lib
from pyh2o.errors import NativeError
from scarce_memory import limits_memory
from tiny_llama import tiny_llama, tiny_parent

HUGE = 2**32 - 1
MODEL: dict[str, Any] = {"seed": 2, "n_layer": 2}


@pytest.fixture
def stock(path: Path) -> llama_cpp.Llama:
    return tiny_parent(path, n_ctx=256, n_batch=64, n_ubatch=64)


def context_of(llm: Llama | llama_cpp.Llama) -> Any:
    address = ctypes.cast(llm.ctx, ctypes.c_void_p).value
    return ffi.cast("struct llama_context *", address)


def scorer(**values: Any) -> Any:
    """A policy outside the library that returns no scores."""
    given = {"score": NO_SCORES, **values}
    return ffi.new("struct llama_h2o_scorer *", given)


NO_SCORES = ffi.callback(
    "bool(void *, const struct llama_h2o_head_rows *, double *)", lambda *_: False
)


def attach(llm: llama_cpp.Llama, policy: bytes = b"h2o", **changed: Any) -> int:
    text = ffi.new("char[]", policy)
    values = {"heavy": 20, "recent": 12, "slack": 8, "pinned": 2, "n_pos": 0, **changed}
    params = ffi.new("struct llama_h2o_params *", {**values, "policy": text})[0]
    return int(lib.llama_h2o_attach(context_of(llm), params))


def is_attached(llm: llama_cpp.Llama) -> bool:
    stats = ffi.new("struct llama_h2o_stats *")
    assert lib.llama_h2o_get_stats(context_of(llm), 0, stats) == lib.LLAMA_H2O_OK
    return bool(stats.size_scores)


@pytest.mark.parametrize(
    ("params", "status"),
    [
        ({"recent": 0}, "PARAMS"),
        ({"slack": 0}, "PARAMS"),
        ({"heavy": HUGE}, "PARAMS"),
        ({"recent": HUGE}, "PARAMS"),
        ({"slack": HUGE}, "PARAMS"),
        ({"pinned": HUGE}, "PARAMS"),
        # their sum overflows 32 bits to 2
        ({"heavy": 2**31, "recent": 2**31 - 1, "pinned": 2, "slack": 1}, "PARAMS"),
        ({"n_pos": HUGE}, "PARAMS"),
        ({"n_pos": 2**31}, "PARAMS"),
        ({"attention": 7}, "PARAMS"),
        ({"attention": -1}, "PARAMS"),
        ({"archive_type": 4}, "PARAMS"),
        ({"archive_type": -1}, "PARAMS"),
        ({"slack": 256}, "CELLS"),
        ({"slack": 2**31 - 40}, "CELLS"),
        ({"n_pos": 20}, "N_POS"),
        ({"policy": b""}, "POLICY"),
        ({"policy": b"h2o-decay:half_life=nan"}, "POLICY"),
        ({"policy": b"streaming:sinks=4294967296"}, "POLICY"),
        ({"policy": b"snap:queries=4,pool=5"}, "POLICY"),
        ({"scorer": scorer(score=ffi.NULL)}, "POLICY"),
        ({"scorer": scorer(scope=-1)}, "POLICY"),
        ({"scorer": scorer(scope=3)}, "POLICY"),
        ({"scorer": scorer(half_life=float("nan"))}, "POLICY"),
        ({"scorer": scorer(half_life=-1.0)}, "POLICY"),
        ({"scorer": scorer(needs=lib.LLAMA_H2O_NEEDS_QUERIES)}, "POLICY"),
        ({"scorer": scorer(needs=lib.LLAMA_H2O_NEEDS_QUERY_ATTENTION)}, "POLICY"),
    ],
)
def test_params_out_of_range_are_refused(
    stock: llama_cpp.Llama, params: dict[str, Any], status: str
) -> None:
    assert attach(stock, **params) == getattr(lib, f"LLAMA_H2O_ERR_{status}")
    assert not is_attached(stock)
    stock.eval([1, 2, 3])


def test_a_missing_policy_is_refused(stock: llama_cpp.Llama) -> None:
    assert lib.llama_h2o_enlarge(context_of(stock), 10_000) == lib.LLAMA_H2O_ERR_NOT_ATTACHED
    params = ffi.new("struct llama_h2o_params *", {"heavy": 9, "recent": 9, "slack": 1})[0]
    assert lib.llama_h2o_attach(context_of(stock), params) == lib.LLAMA_H2O_ERR_ARGUMENT
    assert not is_attached(stock)


def test_a_scorer_that_fails_or_returns_nan_fails_the_batch(path: Path) -> None:
    """In any language; the text can continue."""
    gives: list[float] = []

    @ffi.callback("bool(void *, const struct llama_h2o_head_rows *, double *)")
    def score(_data: Any, rows: Any, scores: Any) -> bool:
        for i in range(rows.n_rows if gives else 0):
            scores[i] = gives[-1] if rows.pos[i] == 5 else rows.pos[i]
        return bool(gives)

    stock = tiny_parent(path, n_ctx=256, n_batch=8, n_ubatch=8)
    assert attach(stock, b"mine", scorer=scorer(score=score)) == lib.LLAMA_H2O_OK
    stock.eval(list(range(40)))
    for value in (None, np.nan, np.inf, -1e39):
        gives += [] if value is None else [value]
        with pytest.raises(RuntimeError, match="llama_decode returned -3"):
            stock.eval(list(range(40, 48)))
    gives.append(0.5)
    stock.eval(list(range(40, 48)))


def test_arguments_out_of_range_are_refused(stock: llama_cpp.Llama) -> None:
    assert attach(stock) == lib.LLAMA_H2O_OK
    assert attach(stock) == lib.LLAMA_H2O_ERR_ATTACHED
    context, wrong = context_of(stock), lib.LLAMA_H2O_ERR_ARGUMENT
    span, start = ffi.new("struct llama_h2o_span *", (3, 5)), ffi.new("int32_t *", 7)
    for seq_id in (-1, 1, 2**31 - 1, -(2**31)):
        assert lib.llama_h2o_pin(context, seq_id, 1) == wrong
        assert lib.llama_h2o_pin_spans(context, seq_id, span, 1) == wrong
        assert lib.llama_h2o_share_fairly(context, seq_id, start, 1) == wrong
        assert lib.llama_h2o_mark(context, seq_id) == wrong
        assert lib.llama_h2o_zero_rows(context, seq_id) == wrong
        assert lib.llama_h2o_marked(context, seq_id, 3) == wrong
        assert lib.llama_h2o_get_rows(context, seq_id, 0, 0, ffi.NULL, ffi.NULL) == wrong
        stats = ffi.new("struct llama_h2o_stats *")
        assert lib.llama_h2o_get_stats(context, seq_id, stats) == wrong
    for layer in (-1, 2, 2**31 - 1, -(2**31)):
        assert lib.llama_h2o_get_rows(context, 0, layer, 0, ffi.NULL, ffi.NULL) == wrong
    for n in (23, 2**31, HUGE):
        assert lib.llama_h2o_pin(context, 0, n) == lib.LLAMA_H2O_ERR_PIN
    # only the counts are checked: the arrays are shorter
    for n in (2**20 + 1, 2**31, HUGE):
        assert lib.llama_h2o_pin_spans(context, 0, span, n) == lib.LLAMA_H2O_ERR_SPANS
        assert lib.llama_h2o_share_fairly(context, 0, start, n) == lib.LLAMA_H2O_ERR_SPANS
    assert lib.llama_h2o_pin_spans(context, 0, ffi.NULL, 1) == wrong
    assert lib.llama_h2o_share_fairly(context, 0, ffi.NULL, 1) == wrong
    assert lib.llama_h2o_get_stats(context, 0, ffi.NULL) == wrong
    for n in (0, 256, 2**31 - 1, HUGE):
        assert lib.llama_h2o_enlarge(context, n) == wrong
    assert lib.llama_h2o_enlarge(context, 4096 + 1) == lib.LLAMA_H2O_ERR_N_POS
    assert lib.llama_h2o_shrink(context) == lib.LLAMA_H2O_ERR_NOT_ENLARGED
    assert lib.llama_h2o_enlarge(context, 300) == lib.LLAMA_H2O_OK
    assert lib.llama_h2o_enlarge(context, 1000) == lib.LLAMA_H2O_ERR_ENLARGED
    assert lib.llama_h2o_shrink(context) == lib.LLAMA_H2O_OK
    stock.eval(list(range(100)))


def test_spans_up_to_the_last_position_are_accepted(stock: llama_cpp.Llama) -> None:
    attach(stock)
    spans = ffi.new("struct llama_h2o_span[]", [(3, 5), (2**31 - 8, 2**31 - 1)])
    assert lib.llama_h2o_pin_spans(context_of(stock), 0, spans, 2) == lib.LLAMA_H2O_OK
    starts = ffi.new("int32_t[]", [2, 30, 2**31 - 1])
    assert lib.llama_h2o_share_fairly(context_of(stock), 0, starts, 3) == lib.LLAMA_H2O_OK
    stock.eval(list(range(120)))


def test_null_pointers_are_refused() -> None:
    wrong = lib.LLAMA_H2O_ERR_ARGUMENT
    params = {"heavy": 1, "recent": 1, "pinned": 0, "slack": 1}
    assert lib.llama_h2o_supports(ffi.NULL) == wrong
    assert lib.llama_h2o_attach(ffi.NULL, params) == wrong
    assert lib.llama_h2o_get_stats(ffi.NULL, 0, ffi.NULL) == wrong
    assert lib.llama_h2o_get_rows(ffi.NULL, 0, 0, 0, ffi.NULL, ffi.NULL) == wrong
    assert lib.llama_h2o_get_layer(ffi.NULL, 0, ffi.NULL) == wrong
    assert lib.llama_h2o_set_breaker(ffi.NULL, ffi.NULL) == wrong
    assert lib.llama_h2o_pin(ffi.NULL, 0, 1) == wrong
    assert lib.llama_h2o_pin_spans(ffi.NULL, 0, ffi.NULL, 0) == wrong
    assert lib.llama_h2o_share_fairly(ffi.NULL, 0, ffi.NULL, 0) == wrong
    assert lib.llama_h2o_mark(ffi.NULL, 0) == wrong
    assert lib.llama_h2o_marked(ffi.NULL, 0, 0) == wrong
    assert lib.llama_h2o_n_few(ffi.NULL) == wrong
    assert lib.llama_h2o_enlarge(ffi.NULL, 1) == wrong
    assert lib.llama_h2o_shrink(ffi.NULL) == wrong
    assert lib.llama_h2o_device_bytes(ffi.NULL) == wrong
    for i in (-1, -(2**31), 2**31 - 1):
        assert lib.llama_h2o_device_name(i) == ffi.NULL


def test_an_invalid_layer_is_named(path: Path) -> None:
    llm = tiny_llama(path, hh=8, recent=8)
    for layer in (2, 99, -1):
        with pytest.raises(NativeError, match=rf"layer {layer} is out of range .0 to 1") as error:
            llm.kv_rows(layer)
        assert error.value.code == lib.LLAMA_H2O_ERR_ARGUMENT
    with pytest.raises(NativeError, match="layer 99 is out of range"):
        llm.heavy_hitters(layer=99)


# Limits memory before eviction is attached, and restores it afterwards.
SCARCE = """
import resource, sys
sys.path[:0] = {paths!r}
import pyh2o
import test_arguments as tests
from tiny_llama import tiny_parent

llm = tiny_parent({path!r}, n_ctx=16384, n_batch={n_batch}, n_ubatch={n_batch}, flash_attn=True)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + {mib} * 2**20, limits[1]))
needs = tests.lib.LLAMA_H2O_NEEDS_QUERY_ATTENTION
scorer = tests.scorer(needs=needs, n_queries={n_queries}) if {n_queries} > 1 else tests.ffi.NULL
status = tests.attach(llm, scorer=scorer, recent={n_queries}, attention=1)
resource.setrlimit(resource.RLIMIT_AS, limits)
assert status in (tests.lib.LLAMA_H2O_ERR_MEMORY, tests.lib.LLAMA_H2O_ERR_INTERNAL), status
assert not tests.is_attached(llm)
llm.eval([1, 2, 3])
again = tests.attach(llm, b"h2o")
assert again == tests.lib.LLAMA_H2O_ERR_NOT_EMPTY, again
llm.reset()
tests.llama_cpp.llama_memory_clear(tests.llama_cpp.llama_get_memory(llm.ctx), False)
assert tests.attach(llm, b"h2o") == 0
llm.eval(list(range(200)))
print("done")
"""


@limits_memory
@pytest.mark.parametrize(
    ("n_queries", "n_batch", "mib"),
    [
        pytest.param(15000, 64, 8, id="what the policy collects"),
        pytest.param(1, 4096, 40, id="graph of the model"),
        pytest.param(4000, 32, 120, id="graph of the probe"),
        pytest.param(4000, 32, 600, id="buffers of the probe"),
    ],
)
def test_a_failed_allocation_leaves_nothing_attached(
    path: Path, n_queries: int, n_batch: int, mib: int
) -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]
    code = SCARCE.format(path=str(path), n_queries=n_queries, n_batch=n_batch, mib=mib, paths=paths)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.stdout == "done\n", result.stderr


def test_after_a_failed_attach_stock_results_are_computed(
    path: Path, stock: llama_cpp.Llama, rng: np.random.Generator
) -> None:
    tokens = rng.integers(0, 384, 60).tolist()
    assert attach(stock, n_pos=20) == lib.LLAMA_H2O_ERR_N_POS
    other = tiny_parent(path, n_ctx=256, n_batch=64, n_ubatch=64)
    for llm in (stock, other):
        llm.eval(tokens)
    logits = [
        np.ctypeslib.as_array(llama_cpp.llama_get_logits(llm.ctx), (384,)) for llm in (stock, other)
    ]
    np.testing.assert_array_equal(*logits)
