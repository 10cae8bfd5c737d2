"""Writes the models of the fuzz targets: models.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from tiny_gguf import write_tiny_gguf

if __name__ == "__main__":
    # all layers alike, every other one with a window, every other one recurrent
    for name in ("llama", "gemma2", "lfm2"):
        path = Path(sys.argv[1]) / f"{name}.gguf"
        # another run may have the file of before in its memory, so that it is replaced as a whole
        unfinished = path.with_suffix(".unfinished")
        write_tiny_gguf(
            unfinished,
            arch_variant=name,
            seed=4,
            n_layer=2,
            n_head=2,
            n_head_kv=1,
            head_size=32,
            n_ff=32,
            n_vocab=288,
        )
        unfinished.replace(path)
