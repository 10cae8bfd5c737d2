"""A model's description as text that fits 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pyh2o.cache.kv_cache import Layer
from pyh2o.llama.description import CacheBytes, ModelDescription, PositionKind

from .terminal.entries import LABEL, entry
from .terminal.terminal import harmless

NUMBER = 18
GROWING = "growing with the text"

POSITIONS: dict[PositionKind, str] = {
    "rotary": "rotary",
    "several per token": "rotary, several per token (M-RoPE)",
    "learned": "learned",
    "none": "none",
}


def description_text(path: Path, model: ModelDescription) -> str:
    """What is known of a model: lines for a person."""
    return "".join(
        [
            f"{harmless(str(path))}\n",
            *entry("eviction", [_eviction(model)]),
            *entry("architecture", [_architecture(model)]),
            *entry("layers", _layers(model.layers) or ["what they keep is not known"]),
            *entry("positions", [_positions(model)]),
            *_memory(model),
        ]
    )


def _eviction(model: ModelDescription) -> str:
    if model.budget is None:
        return f"no: {model.refused}. --no-evict runs it with the full cache."
    budget = model.budget
    pinned = f"{budget.settings.pinned:,} pinned + " if budget.settings.pinned else ""
    found = f", and each token finds {budget.recall:,} more" if budget.recall else ""
    return (
        f"yes: each KV head keeps {budget.rows:,} rows ({pinned}{budget.heavy:,} heavy + "
        f"{budget.recent:,} recent){found}"
    )


def _architecture(model: ModelDescription) -> str:
    parts = [harmless(model.architecture), _counted(model.n_layer, "layer")]
    rows = [layer for layer in model.layers if layer.kv_heads]
    if rows:
        heads = _range(layer.kv_heads for layer in rows)
        plural = "" if heads == "1" else "s"
        keys = _range(layer.head_size_k for layer in rows)
        values = _range(layer.head_size_v for layer in rows)
        of = keys if keys == values else f"{keys} (K) and {values} (V)"
        parts.append(f"{heads} KV head{plural} of {of}")
    return ", ".join(parts)


def _layers(layers: Sequence[Layer]) -> list[str]:
    """A sentence for each kind of layer."""
    groups: dict[str, list[int]] = {}
    for layer in layers:
        for kind in _kinds(layer):
            groups.setdefault(kind, []).append(layer.number)
    order = sorted(groups, key=lambda kind: (kind != GROWING, groups[kind][0]))
    return [f"{len(groups[kind])} {kind}: {ranges(groups[kind])}" for kind in order]


def _kinds(layer: Layer) -> list[str]:
    kinds = []
    if layer.rows_of is not None and layer.rows_of != layer.number:
        kinds.append(f"using the rows of layer {layer.rows_of}")
    elif layer.grows:
        kinds.append(GROWING)
    elif layer.window is not None:
        what = "chunk" if layer.chunked else "window"
        kinds.append(f"seeing a {what} of {layer.window:,} tokens")
    if layer.recurrent:
        kinds.append("keeping a recurrent state")
    return kinds or ["keeping nothing"]


def _positions(model: ModelDescription) -> str:
    text = f"{POSITIONS[model.positions]}; trained on {model.trained_context:,} tokens"
    if model.goes_on is None:
        return text
    if model.budget is not None and model.budget.n_pos < model.trained_context:
        text += f", of which this window uses {model.budget.n_pos:,} (LongRoPE)"
    return text + (", a text goes on beyond them" if model.goes_on else ", where a text ends")


def _memory(model: ModelDescription) -> list[str]:
    """A table: the parts of both caches."""
    if model.full is None:
        return []
    caches = [model.full] if model.evicting is None else [model.full, model.evicting]
    heading = f"MiB for a window of {model.window:,} tokens, rows of {model.kv_type}"
    names = ["full cache", "with eviction"][: len(caches)]
    lines = [
        *entry("memory", [heading]),
        _row("", names),
        _row("cells", [f"{cache.cells:,}" for cache in caches]),
    ]
    parts = ("growing", "window", "recurrent", "scores")
    for part in parts:
        sizes = [getattr(cache, part) for cache in caches]
        if any(sizes):
            lines.append(_row(part, [_mib(size) for size in sizes]))
    lines.append(_row("in all", [_mib(cache.total) for cache in caches]))
    if _keeps_behind_window(model.full, model.evicting):
        lines += entry("", ["The full cache keeps what is behind a window too (swa_full)."])
    return lines


def _row(label: str, cells: Sequence[str]) -> str:
    return f"{'':{2 + LABEL}}{label:10}" + "".join(f"{cell:>{NUMBER}}" for cell in cells) + "\n"


def _keeps_behind_window(full: CacheBytes, evicting: CacheBytes | None) -> bool:
    return evicting is not None and full.window > evicting.window


def _mib(size: int) -> str:
    if size == 0:
        return "-"
    return f"{size / 2**20:,.1f}" if size >= 2**20 / 20 else "< 0.1"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _range(numbers: Iterable[int]) -> str:
    different = sorted(set(numbers))
    return "-".join(map(str, [different[0], different[-1]][: len(different)]))


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, those that follow each other as one: "0-4, 7, 9-10"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
