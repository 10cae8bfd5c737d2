"""Resident memory and speed while one long text is generated: both must stay flat.

    python benchmarks/flat_memory.py --tokens 7000

The cache holds 10 % heavy and 10 % recent rows of a window of 8192. A line is printed every 500
tokens, and at the end the growth of resident memory between 2,000 tokens and the last line.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from pyh2o import Llama
from pyh2o.models import demo_model_path


def resident_bytes() -> int:
    """Resident memory of this process (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: demo model")
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--every", type=int, default=500)
    arguments = parser.parse_args()

    model = arguments.model or demo_model_path()
    llm = Llama(str(model), n_ctx=8192, hh=0.1, recent=0.1, seed=7, verbose=False)
    prompt = llm.tokenize(b"Once upon a time, in a town by the sea,")
    resident: dict[int, int] = {}
    start = time.perf_counter()
    print("tokens, tokens/s, resident MiB, cells in use, evicted")
    for n, _ in enumerate(llm.generate(prompt, temp=0.8, repeat_penalty=1.1), start=1):
        if n % arguments.every == 0:
            seconds = time.perf_counter() - start
            resident[n] = resident_bytes()
            kv = llm.kv
            print(
                f"{n}, {arguments.every / seconds:.1f}, {resident[n] / 2**20:.2f}, {kv.used}, "
                f"{kv.tokens_evicted}",
                flush=True,
            )
            start = time.perf_counter()
        if n == arguments.tokens:
            break
    growth = max(size for n, size in resident.items() if n >= 2000) - resident[2000]
    print(f"growth of resident memory after 2,000 tokens: {growth / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
