"""The memory that a text takes, computed from what the layers of its model keep.

`describe_model` lets llama.cpp make the contexts instead, which takes the model's file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..cache.native import Layer
from ..cache.settings import Budget, whole_blocks
from ..library.backends import traits_of
from ..system.integers import LARGEST_INT32
from .parameters import KV_TYPES, Parameters

# Of native/src/recall: tokens of a page, bytes before its rows, and what its size is a multiple of.
_PAGE, _HEADER, _ALIGNMENT = 128, 4096, 4096
# Heads for each one that searches, and the fewest pages that a device has codes for.
_HEADS_A_ONE, _LEAST_PAGES = 4, 64
# Bytes of a page on a device: of its address, of the sums of its rows and of its passages.
_SUMS = 8 * (1 + _PAGE + _PAGE // 32)


@dataclass(frozen=True)
class TextBytes:
    """Bytes that a text takes.

    Attributes:
        full: the full cache in f16; layers with a window keep only that, as in llama-server.
        full_q8_0: the same in q8_0; None if the size of a head is not whole blocks.
        evicting: the cache of fixed size: rows, scores, and rows of layers with a window.
        codes: what archived rows are found by, next to that cache.
        archive: evicted rows, in main memory.
    """

    full: int
    full_q8_0: int | None
    evicting: int
    codes: int
    archive: int

    @property
    def gpu(self) -> int:
        """What the cache of fixed size takes on a GPU."""
        return self.evicting + self.codes

    def record(self) -> dict[str, int | None]:
        """All of it, fit for JSON."""
        return {f"{name}_bytes": size for name, size in asdict(self).items()}


def text_bytes(
    layers: Sequence[Layer], budget: Budget, *, kv_type: str = "f16", recurrent: int = 0
) -> TextBytes:
    """Compute what a text takes that is as long as the window.

    Queries that a policy remembers (`snap`) are left out: 16 MiB for a model of 8B.

    Args:
        layers: of the model.
        budget: for the window.
        kv_type: of the rows in the cache of fixed size.
        recurrent: bytes of the states of recurrent layers, which both caches have.
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
    """Bytes of K and V; a window has cells, at most so many, for itself and for a batch."""
    total = 0
    for layer in layers:
        window = None if layer.window is None else min(whole_blocks(layer.window + n_batch), most)
        total += (window or n_cells) * _row(layer, kv_type)
    return total


def _row(layer: Layer, kv_type: str) -> int:
    """Bytes of a token's K and V of all heads."""
    traits = traits_of(KV_TYPES[kv_type])
    n_values = layer.kv_heads * (layer.head_size_k + layer.head_size_v)
    return n_values // int(traits.block) * int(traits.size)


def _codes(layers: Sequence[Layer], n_tokens: int) -> int:
    """Bytes of the codes of keys of the heads that search, of a bit for each row of all heads."""
    if n_tokens == 0:
        return 0
    n_pages = -(-n_tokens // _PAGE)
    codes = sum(layer.kv_heads * _codes_of_page(layer.head_size_k) for layer in layers)
    hidden = _PAGE // 8 * sum(layer.kv_heads for layer in layers)
    # memory grows by a quarter at a time
    most_pages = max(_LEAST_PAGES, n_pages + n_pages // 4)
    return most_pages * (codes // _HEADS_A_ONE + hidden + _SUMS)


def _codes_of_page(head_size: int) -> int:
    """Bytes for one head: signs, a scale for each key, and the mean key (h2o-search.h)."""
    size = (head_size + 3) // 4 * (_PAGE // 2) + 2 * _PAGE + 2 * head_size
    return -(-size // 64) * 64


def _archive(layers: Sequence[Layer], n_tokens: int, kv_type: str) -> int:
    """Bytes of the pages of these tokens."""
    size = _HEADER + _PAGE * sum(_row(layer, kv_type) for layer in layers)
    return -(-n_tokens // _PAGE) * -(-size // _ALIGNMENT) * _ALIGNMENT
