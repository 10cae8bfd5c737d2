"""Writes the model of the fuzz targets: model.py FILE."""

from __future__ import annotations

import sys

from tiny_gguf import write_tiny_gguf

if __name__ == "__main__":
    write_tiny_gguf(
        sys.argv[1], seed=4, n_layer=2, n_head=2, n_head_kv=1, head_size=32, n_ff=32, n_vocab=288
    )
