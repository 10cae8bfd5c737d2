"""Profile a GPU's kernels: a chunk of 512 tokens, 64 single tokens, one compaction.

    CUDA_INJECTION64_PATH=libcuda_trace.so GGML_CUDA_PDL=0 \\
        python -m research.benchmarks.cuda_profile model.gguf --history 8192,32768

scripts/gpu_check.py compiles the library cuda_trace.cpp. Without it only wall time is printed. The
cache has 20 % of the window with recall, or with --full it is llama.cpp's full cache.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pyh2o import Llama

from ..eval.arguments import numbers

# isort: split
import llama_cpp  # after pyh2o, so that it uses pyh2o's library

CHUNK, SINGLE = 512, 64


class Profile:
    """A text of random tokens, evaluated between marks of the tracing library."""

    def __init__(self, llm: Llama, n_tokens: int) -> None:
        """Load the library that the environment names, if any."""
        self._llm = llm
        self._tokens = np.random.default_rng(0).integers(300, llm.n_vocab(), n_tokens).tolist()
        library = os.environ.get("CUDA_INJECTION64_PATH")
        self._library: Any = ctypes.CDLL(library) if library else None

    def read(self, n: int, *, at_once: bool = True) -> float:
        """Evaluate the next `n` tokens as a prompt or one by one, and return the seconds."""
        first = self._llm.n_tokens
        started = time.perf_counter()
        for start in range(first, first + n, n if at_once else 1):
            self._llm.eval(self._tokens[start : start + (n if at_once else 1)])
        self._wait()
        return time.perf_counter() - started

    def show(self, what: str, n: int, *, at_once: bool = True) -> None:
        """Evaluate tokens, and print the time by kernel."""
        self._mark(None)
        compactions = self._llm.kv.compactions
        seconds = self.read(n, at_once=at_once)
        compactions = self._llm.kv.compactions - compactions
        title = f"### {what}: {1e3 * seconds:.2f} ms, {compactions} compactions"
        self._mark(title)

    def fill(self) -> None:
        """Read until the next token needs a compaction."""
        if free := self._llm.kv.cells - self._llm.kv.used:
            self.read(free)

    def _mark(self, title: str | None) -> None:
        if self._library:
            self._library.trace_mark(title and title.encode())
        elif title:
            print(title, flush=True)

    def _wait(self) -> None:
        llama_cpp.llama_synchronize(self._llm.ctx)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, default=8192, help="the window in tokens")
    parser.add_argument("--history", type=partial(numbers, int), default=(8192,), help="ascending")
    parser.add_argument("--full", action="store_true", help="llama.cpp's full cache")
    parser.add_argument("--gpu-layers", type=int, default=-1)
    args = parser.parse_args()

    n_tokens = args.history[-1] + 6 * CHUNK
    own = {"evict": False, "flash_attn": True, "n_ctx": n_tokens}
    if not args.full:
        own = {"hh": 0.1, "recent": 0.1, "n_ctx": args.ctx}
    with Llama(str(args.model), n_gpu_layers=args.gpu_layers, verbose=False, **own) as llm:
        profile = Profile(llm, n_tokens)
        profile.read(CHUNK)  # warm up
        profile.read(4, at_once=False)
        llm.reset()
        for history in args.history:
            after = f"{'full' if args.full else '20 %, recall'}, after {history:,} tokens"
            seconds = profile.read(history - llm.n_tokens)
            print(f"## {after}, which took {seconds:.1f} s", flush=True)
            profile.show(f"{after}: {CHUNK} tokens at once", CHUNK)
            profile.show(f"{after}: {SINGLE} tokens one by one", SINGLE, at_once=False)
            if not args.full:
                profile.fill()
                profile.show(f"{after}: a token with a compaction", 1)


if __name__ == "__main__":
    main()
