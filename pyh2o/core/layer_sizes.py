"""How large each layer of a model is, weights and cache, without loading it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..cache.kv_cache import Layer
from ..models.gguf_file import GgufFile, files_of
from .description import CacheBytes

_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")


def weights_of_layers(path: str | os.PathLike[str]) -> list[int]:
    """Bytes of the weights of each layer, and behind them of the output.

    What looks tokens up stays in main memory; a model without an output of its own has a copy.

    Raises:
        ModelError: a file of the model cannot be read.
    """
    layers: dict[int, int] = {}
    output = embedding = 0
    has_output = False
    for name, size in _tensors(Path(path)):
        if found := _BLOCK.search(name):
            layers[int(found[1])] = layers.get(int(found[1]), 0) + size
        elif name.startswith("output"):
            output += size
            has_output = has_output or name == "output.weight"
        elif name == "token_embd.weight":
            embedding = size
    if not has_output:
        output += embedding
    return [*(layers.get(i, 0) for i in range(max(layers, default=-1) + 1)), output]


def caches_of_layers(
    layers: Sequence[Layer], cache: CacheBytes, n_layer: int, *, n_texts: int = 1
) -> list[int]:
    """Bytes of the cache of each layer: its part of what all layers of its kind take.

    Args:
        layers: what each keeps.
        cache: of a text.
        n_layer: layers of the model.
        n_texts: that have a cache each.
    """
    sizes = [0.0] * n_layer
    windows = [each for each in layers if each.rows_of == each.number and not each.grows]
    for total, having in (
        (cache.growing + cache.scores, [each for each in layers if each.grows]),
        (cache.window, windows),
        (cache.recurrent, [each for each in layers if each.recurrent]),
    ):
        for layer in having:
            sizes[layer.number] += total / len(having)
    return [round(size * n_texts) for size in sizes]


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    """Names and bytes of the tensors in all files of a model."""
    for each in files_of(path):
        with GgufFile(each) as file:
            for tensor in file.tensors():
                yield tensor.name, tensor.size
