"""Measure the perplexity of a text under each policy in the NumPy reference.

    OPENBLAS_NUM_THREADS=1 python -m research.benchmarks.reference_perplexity --text book.txt

This shows the gain of eviction per head. Every token of a stretch of the text is predicted from the
cache at that moment, with a compaction every 32 tokens, half of the rows heavy and half recent.
Reported is the perplexity from token 1024 of the stretch on, next to the figure of an earlier
simulation (written for another library, on the same stretch of the same text, "The Adventures of
Sherlock Holmes" of Project Gutenberg, and the demo model). A policy takes some minutes on one core.

Paragraphs of the text are unwrapped: words are separated by one space, paragraphs by a blank line.
No token is put before the text.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np

from pyh2o.models import find_model
from research.eval.metrics import FloatArray, log_softmax, perplexity, surprises
from research.eval.model import normalised, open_for_tokens, plain_tokens
from research.reference import EvictionParameters, LlamaWeights, ReferenceLlama, read_gguf

SLACK = 32
# Sums decay by a tenth every 32 tokens, as in the simulation.
HALF_LIFE = SLACK * math.log(0.5) / math.log(0.9)
FULL = "full"

# Perplexities of the simulation, by policy and rows.
SIMULATED: dict[str, dict[int, float]] = {
    FULL: {256: 22.74, 512: 22.74},
    "streaming": {256: 25.22, 512: 24.00},
    "streaming:sinks=0": {256: 48.7, 512: 43.0},
    "research/policies/one_choice.py:H2OCells": {256: 25.59, 512: 24.30},
    "research/policies/one_choice.py:H2OLayer": {256: 25.01, 512: 23.86},
    "h2o": {256: 24.86, 512: 23.77},
    "h2o-mean": {256: 24.20, 512: 23.64},
    f"h2o-decay:half_life={HALF_LIFE:.1f}": {256: 24.19, 512: 23.55},
    "snap:queries=1,pool=1": {256: 24.39},
    "snap:pool=1": {256: 24.21},
}


def losses(weights: LlamaWeights, tokens: list[int], policy: str, rows: int) -> FloatArray:
    """Return the negative log-likelihood of each token but the first, in nats; [n_tokens - 1]."""
    eviction = EvictionParameters(heavy=rows // 2, recent=rows - rows // 2, slack=SLACK)
    if policy == FULL:
        model = ReferenceLlama(weights)
    else:
        model = ReferenceLlama(weights, eviction, policy=policy)
    parts = []
    for start in range(0, len(tokens) - 1, SLACK):
        expected = tokens[start + 1 : start + 1 + SLACK]
        logits = model.eval(tokens[start : start + len(expected)])
        parts.append(surprises(log_softmax(logits.astype(np.float32)), expected))
    return np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: demo model")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text file")
    parser.add_argument("--start", type=int, default=3000, help="first token of the stretch")
    parser.add_argument("--tokens", type=int, default=4096, help="its length")
    parser.add_argument("--skip", type=int, default=1024, help="first tokens, not counted")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument(
        "--policy", nargs="+", default=list(SIMULATED), help="policies, or 'full' for no eviction"
    )
    arguments = parser.parse_args()

    model = find_model(arguments.model)
    with open_for_tokens(model) as llm:
        tokens = plain_tokens(llm, normalised(arguments.text.read_text(encoding="utf-8-sig")))
    tokens = tokens[arguments.start : arguments.start + arguments.tokens]
    weights = read_gguf(model)
    print(f"{len(tokens)} tokens, {arguments.rows} rows, slack {SLACK}")
    print(f"{'policy':32} {'perplexity':>10} {'simulated':>10} {'difference':>10} {'seconds':>8}")
    for policy in arguments.policy:
        began = time.perf_counter()
        nll = losses(weights, tokens, policy, arguments.rows)
        seconds = time.perf_counter() - began
        found = perplexity(nll[arguments.skip - 1 :])
        simulated = SIMULATED.get(policy, {}).get(arguments.rows)
        beside = f"{simulated:10.2f} {100 * (found / simulated - 1):9.2f}%" if simulated else ""
        print(f"{policy:32} {found:10.3f} {beside:21} {seconds:8.0f}", flush=True)


if __name__ == "__main__":
    main()
