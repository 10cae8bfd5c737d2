"""Compare the logits along a greedy text on the GPU with the CPU's.

    python scripts/gpu_logits.py model.gguf

Two right computations round differently, and with quantised weights, where activations are
rounded to 8 bits, little becomes much. How much is measured here as well: the difference between
our kernel and ggml's ops on the CPU. The exit status is 1 if the GPU's logits are in the mean
more than twice as far from the CPU's, or if its first other choice was decided by more than the
largest difference.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pyh2o import Llama
from pyh2o.cache.settings import Attention
from pyh2o.library.devices import why_no_gpu

PROMPT = "Once upon a time, in a town by the sea, there lived a clockmaker who"
ALLOWED = 2.0  # times the mean difference on the CPU

Logits = npt.NDArray[np.float32]  # [n_tokens, n_vocab]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("-n", type=int, default=200, help="tokens")
    arguments = parser.parse_args()
    if why_no_gpu():
        sys.exit("error: there is no GPU; `pyh2o generate --gpu-layers -1` says why")

    model, n = arguments.model, arguments.n
    on_cpu = logits_along(open_model(model, gpu_layers=0, attention="auto"), n)
    text = on_cpu.argmax(axis=1).tolist()
    with_ops = logits_along(open_model(model, gpu_layers=0, attention="ops"), n, text)
    on_gpu = logits_along(open_model(model, gpu_layers=-1, attention="auto"), n, text)

    usual, usual_most = difference(with_ops, on_cpu)
    ours, ours_most = difference(on_gpu, on_cpu)
    print(f"logits, CPU's ops and kernel: differ by {usual:.3f}, at most {usual_most:.3f}")
    print(f"logits, GPU and CPU: differ by {ours:.3f}, at most {ours_most:.3f}")
    parted = np.flatnonzero(on_gpu.argmax(axis=1) != on_cpu.argmax(axis=1))
    if len(parted) == 0:
        print(f"{n} tokens are equal")
        return 0 if ours <= ALLOWED * usual else 1
    best = np.sort(on_cpu[parted[0]])
    margin = float(best[-1] - best[-2])
    print(
        f"{parted[0]} tokens are equal, the next was decided by {margin:.3f}; "
        f"{len(parted)} of {n} choices differ"
    )
    return 0 if ours <= ALLOWED * usual and margin <= usual_most else 1


def open_model(model: Path, *, gpu_layers: int, attention: Attention) -> Llama:
    return Llama(
        str(model),
        hh=40,
        recent=40,
        slack=16,
        recall=0,
        n_gpu_layers=gpu_layers,
        attention=attention,
        logits_all=True,
        verbose=False,
    )


def logits_along(llm: Llama, n: int, text: list[int] | None = None) -> Logits:
    """The logits before each of n tokens behind the prompt: of a text, or the likeliest ones."""
    rows = []
    with llm:
        llm.eval(llm.tokenize(PROMPT.encode()))
        for i in range(n):
            rows.append(llm.scores[llm.n_tokens - 1].copy())
            llm.eval([int(rows[-1].argmax()) if text is None else text[i]])
    return np.stack(rows)


def difference(first: Logits, second: Logits) -> tuple[float, float]:
    """Mean and largest difference of two logits."""
    differences = np.abs(first - second)
    return float(differences.mean()), float(differences.max())


if __name__ == "__main__":
    sys.exit(main())
