"""Compare a greedy text on the GPU with the same on the CPU, token by token.

    python benchmarks/greedy_text.py model.gguf

Two right computations round differently. Where the texts part, the two best logits were nearly
equal, or one of the computations is wrong; the exit status says which.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from pyh2o import Llama

PROMPT = "Once upon a time, in a town by the sea, there lived a clockmaker who"
# Of the two best logits, whose standard deviation is about 4.
NEAR_TIE = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("-n", type=int, default=200, help="tokens")
    arguments = parser.parse_args()

    on_cpu, on_gpu = (
        Llama(
            str(arguments.model),
            hh=40,
            recent=40,
            slack=16,
            n_gpu_layers=layers,
            logits_all=True,
            verbose=False,
        )
        for layers in (0, -1)
    )
    tokens = on_cpu.tokenize(PROMPT.encode())
    for i in range(arguments.n):
        new = tokens if i == 0 else tokens[-1:]
        logits = []
        for llm in (on_cpu, on_gpu):
            llm.eval(new)
            logits.append(llm.scores[llm.n_tokens - 1].copy())
        first, second = (int(scores.argmax()) for scores in logits)
        if first != second:
            margin = float(np.diff(np.sort(logits[0])[-2:])[0])
            print(f"{i} tokens are equal; the next was decided by {margin:.3f}")
            return 0 if margin < NEAR_TIE else 1
        tokens.append(first)
    print(f"{arguments.n} tokens are equal, over {on_gpu.kv.compactions} compactions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
