"""Estimate the memory of a text from the shapes of a model's layers.

`describe_model` gets exact sizes from llama.cpp, but needs the model's file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..cache.native import Layer
from ..cache.settings import Budget, whole_blocks
from ..library.backends import traits_of
from ..system.integers import LARGEST_INT32
from .parameters import KV_TYPES, Parameters

# From native/src/recall: tokens of a page, bytes of its header, and alignment of its size.
_PAGE, _HEADER, _ALIGNMENT = 128, 4096, 4096
# One of four heads searches; a device allocates codes for at least 64 pages.
_HEADS_A_ONE, _MIN_PAGES = 4, 64
# Bytes per page on a device: its address, and sums for rows and passages.
_SUMS = 8 * (1 + _PAGE + _PAGE // 32)


@dataclass(frozen=True)
class TextBytes:
    """Memory of a text, in bytes.

    Attributes:
        full: full cache in f16; sliding-window layers keep only their window, as in llama-server.
        full_q8_0: the same in q8_0; None if head sizes are not a multiple of its blocks.
        evicting: cache of fixed size: rows, scores, and rows of sliding windows.
        codes: codes of archived rows for the search, on the same device.
        archive: evicted rows, in main memory.
    """

    full: int
    full_q8_0: int | None
    evicting: int
    codes: int
    archive: int

    @property
    def gpu(self) -> int:
        """GPU memory of the cache of fixed size."""
        return self.evicting + self.codes

    def record(self) -> dict[str, int | None]:
        return {f"{name}_bytes": size for name, size in asdict(self).items()}


def text_bytes(
    layers: Sequence[Layer], budget: Budget, *, kv_type: str = "f16", recurrent: int = 0
) -> TextBytes:
    """Estimate the memory of a text that fills the window.

    Queries stored for `snap` are not included; they take 16 MiB with an 8B model.

    Args:
        kv_type: type of the rows in the cache of fixed size.
        recurrent: bytes of recurrent states, which are part of both caches.
    """
    own = [layer for layer in layers if layer.rows_of == layer.number]
    growing = [layer for layer in own if layer.window is None]
    n_sums = sum(need in ("attention", "squares") for need in budget.policy.needs)
    scores = 4 * n_sums * sum(layer.kv_heads for layer in growing) * budget.cells
    cells, batch = whole_blocks(budget.window), Parameters.n_ubatch
    block = traits_of(KV_TYPES["q8_0"]).block
    is_whole = all(n % block == 0 for each in own for n in (each.head_size_k, each.head_size_v))
    archived = max(0, budget.window - budget.recent) if budget.recall else 0
    return TextBytes(
        full=_rows(own, "f16", cells, batch, most=cells) + recurrent,
        full_q8_0=_rows(own, "q8_0", cells, batch, most=cells) + recurrent if is_whole else None,
        evicting=_rows(own, kv_type, budget.cells, min(batch, budget.slack)) + scores + recurrent,
        codes=_codes(growing, archived),
        archive=_archive(growing, archived, budget.settings.recall_type),
    )


def _rows(
    layers: Sequence[Layer], kv_type: str, n_cells: int, n_batch: int, most: int = LARGEST_INT32
) -> int:
    """Return the bytes of K and V; sliding windows have up to `most` cells for window and batch."""
    total = 0
    for layer in layers:
        window = None if layer.window is None else min(whole_blocks(layer.window + n_batch), most)
        total += (window or n_cells) * _row(layer, kv_type)
    return total


def _row(layer: Layer, kv_type: str) -> int:
    """Return the bytes of a token's K and V, for all heads of a layer."""
    traits = traits_of(KV_TYPES[kv_type])
    n_values = layer.kv_heads * (layer.head_size_k + layer.head_size_v)
    return n_values // int(traits.block) * int(traits.size)


def _codes(layers: Sequence[Layer], n_tokens: int) -> int:
    """Return the bytes of the codes of searching heads, and of a bit per row of all heads."""
    if n_tokens == 0:
        return 0
    n_pages = -(-n_tokens // _PAGE)
    codes = sum(layer.kv_heads * _codes_of_page(layer.head_size_k) for layer in layers)
    hidden = _PAGE // 8 * sum(layer.kv_heads for layer in layers)
    # memory grows by a quarter at a time
    most_pages = max(_MIN_PAGES, n_pages + n_pages // 4)
    return most_pages * (codes // _HEADS_A_ONE + hidden + _SUMS)


def _codes_of_page(head_size: int) -> int:
    """Return the bytes for one head: signs, a scale per key, and the mean key (h2o-search.h)."""
    size = (head_size + 3) // 4 * (_PAGE // 2) + 2 * _PAGE + 2 * head_size
    return -(-size // 64) * 64


def _archive(layers: Sequence[Layer], n_tokens: int, kv_type: str) -> int:
    size = _HEADER + _PAGE * sum(_row(layer, kv_type) for layer in layers)
    return -(-n_tokens // _PAGE) * -(-size // _ALIGNMENT) * _ALIGNMENT
