"""Settings of a comparison, and its caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from pyh2o.bench.process import Cache
from pyh2o.cache.settings import DEFAULT_POLICY, whole_blocks
from pyh2o.core.parameters import KV_TYPES
from pyh2o.errors import SettingsError

from ..eval.caches import (
    STREAMING,
    Compute,
    MeasuredCache,
    Rows,
    budget_name,
    parts_of,
    recall_name,
)

# Attention sinks of StreamingLLM (Xiao et al. 2024, section 3.2): four tokens are enough.
SINKS = 4


@dataclass(frozen=True)
class Comparison:
    """Requested models and caches.

    Attributes:
        model: a GGUF file.
        window: tokens that every cache is made for; the base of fractions in `budgets`.
        compute: devices and threads.
        histories: tokens of text before a measurement, ascending.
        budgets: rows to keep: fractions of the window (float) or counts (int).
        kv_types: types of the rows of this runtime's caches.
        rounds: measurements of every cache at each history.
        n: tokens generated per measurement.
        policies: that select rows.
        recalls: retrieved rows of a budget, a fraction or a count each; 0 is a cache without an
            archive, None the settings' default.
        other: "openvino", or None.
        only_flash: whether the full cache with flash attention is the only one to compare with: a
            GPU has no memory for many caches at once.
    """

    model: Path
    window: int
    compute: Compute
    histories: tuple[int, ...]
    budgets: tuple[Rows, ...]
    kv_types: tuple[str, ...]
    rounds: int
    n: int
    policies: tuple[str, ...] = (DEFAULT_POLICY,)
    recalls: tuple[Rows | None, ...] = (None,)
    other: str | None = None
    only_flash: bool = False

    @property
    def generated(self) -> int:
        """Tokens that a cache generates at each history."""
        return self.rounds * self.n

    @property
    def text_tokens(self) -> int:
        """Tokens of text that are needed."""
        return self.histories[-1] + self.generated


def caches_to_compare(asked: Comparison) -> list[Cache]:
    """Return the caches of a comparison in the order of the tables.

    Every cache is made for the same window, however short the text is, because a user of that
    window must allocate it. Full caches with as much text as a budget has rows separate the gain of
    fewer rows from the cost of eviction. Caches of a budget have the same number of rows in all,
    however many of them are retrieved.

    Raises:
        SettingsError: a budget is invalid for this window.
    """
    evicting = [_evicting(*one, asked) for one in product(asked.budgets, asked.recalls)]
    budgets = list({one.budget: one for one in evicting}.values())
    cells = whole_blocks(max(asked.window, asked.text_tokens))
    caches = _full("full", cells, asked)
    if "q8_0" in asked.kv_types:
        flash = replace(caches[1], name="full, q8_0", is_full=False)
        caches.append(replace(flash, settings={**flash.settings, **_rows_of("q8_0")}))
    for one, policy, kv_type in product(evicting, asked.policies, asked.kv_types):
        name = one.name if asked.policies == (DEFAULT_POLICY,) else f"{policy}, {one.name}"
        name = name if kv_type == "f16" else f"{name}, {kv_type}"
        caches.append(_made(replace(one, name=name, policy=policy), kv_type, asked))
    if asked.only_flash:
        return caches[1:]
    caches += [_made(_sinks_and_window(one), "f16", asked) for one in budgets]
    for rows in dict.fromkeys(one.rows for one in budgets):
        if rows < asked.histories[-1]:
            own = _full(f"full at {rows} rows", whole_blocks(rows + asked.generated), asked)
            caches += [replace(one, text=rows, is_full=False) for one in own]
    if asked.other is not None:
        caches += _others(asked.other, budgets, cells, asked)
    return caches


def _full(name: str, cells: int, asked: Comparison) -> list[Cache]:
    """Return llama.cpp's full cache, without and with flash attention."""
    # Windows with only the needed cells are faster, unlike llama-cpp-python's default.
    settings = {**asked.compute.arguments(), "evict": False, "swa_full": False, "n_ctx": cells}
    return [
        Cache(name, {**settings, "flash_attn": False}, is_full=True),
        Cache(f"{name}, flash attention", {**settings, "flash_attn": True}, is_full=True),
    ]


def _rows_of(kv_type: str) -> dict[str, Any]:
    return {"type_k": KV_TYPES[kv_type], "type_v": KV_TYPES[kv_type]}


def _made(one: MeasuredCache, kv_type: str, asked: Comparison) -> Cache:
    compute = asked.compute.arguments()
    settings = {**compute, **one.eviction(), **_rows_of(kv_type), "n_ctx": asked.window}
    return Cache(one.name, settings)


def _evicting(budget: Rows, recall: Rows | None, asked: Comparison) -> MeasuredCache:
    """Half heavy, half recent, minus the retrieved rows."""
    if budget > (asked.window if isinstance(budget, int) else 1):
        raise SettingsError(
            f"--budget {budget} is more than the window of {asked.window} tokens: give a fraction "
            "up to 1.0 or fewer rows, or raise --ctx"
        )
    name = ", ".join(filter(None, (budget_name(budget), recall_name(recall))))
    parts = parts_of(budget, asked.window, recall=recall)
    return MeasuredCache(name, policy=DEFAULT_POLICY, budget=budget_name(budget), **parts)


def _sinks_and_window(one: MeasuredCache) -> MeasuredCache:
    """A few first tokens and the newest ones, with the rows of another cache."""
    if one.rows <= SINKS:
        raise SettingsError(
            f"a budget of {one.rows} rows has no room for {SINKS} sinks and a window: give a "
            "larger --budget"
        )
    # The heavy rows of this policy are the newest ones.
    heavy = (one.rows - SINKS) // 2
    return replace(
        one,
        name=f"sinks + window, {one.budget}",
        policy=STREAMING,
        heavy=heavy,
        recent=one.rows - SINKS - heavy,
        pinned=SINKS,
        recall=0,
    )


def _others(other: str, budgets: list[MeasuredCache], cells: int, asked: Comparison) -> list[Cache]:
    """Another program's full cache, and its own eviction with the same rows."""
    if asked.compute.gpu_layers != 0:
        raise SettingsError("OpenVINO is measured on the CPU only: leave out --gpu-layers")
    opener = "research.speed.openvino:open_openvino"
    settings = {"threads": asked.compute.threads, "cells": cells, "most_tokens": asked.text_tokens}
    full = Cache(other, settings, opener, at_once=True)
    return [full] + [
        Cache(f"{other}, {one.budget}", {**settings, "rows": one.rows}, opener, at_once=True)
        for one in budgets
    ]
