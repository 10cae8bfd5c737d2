"""Perplexity of a text under each policy, in the NumPy reference: what per-head eviction is worth.

    OPENBLAS_NUM_THREADS=1 python benchmarks/eviction_granularity.py --text book.txt

Every token of a stretch of the text is predicted from what the cache holds at that moment, with a
compaction every 32 tokens, half of the rows heavy and half recent. Reported is the perplexity from
token 1024 of the stretch on, beside the figure of an earlier simulation (written for another
library, on the same stretch of the same text, "The Adventures of Sherlock Holmes" of Project
Gutenberg, and the demo model). A policy takes some minutes on one core.

Paragraphs of the text are unwrapped: their words with one space between, a blank line between
paragraphs. No token is put before it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pyh2o.llama import Llama
from pyh2o.models import demo_model_path
from pyh2o.reference import EvictionParameters, LlamaWeights, ReferenceLlama, read_gguf

SLACK = 32
# Forgetting a tenth every 32 tokens, as the simulation did.
HALF_LIFE = SLACK * math.log(0.5) / math.log(0.9)
FULL = "full"

# Perplexities of the simulation, by policy and rows.
SIMULATED: dict[str, dict[int, float]] = {
    FULL: {256: 22.74, 512: 22.74},
    "streaming": {256: 25.22, 512: 24.00},
    "streaming:sinks=0": {256: 48.7, 512: 43.0},
    "h2o-cells": {256: 25.59, 512: 24.30},
    "h2o-layer": {256: 25.01, 512: 23.86},
    "h2o": {256: 24.86, 512: 23.77},
    "h2o-mean": {256: 24.20, 512: 23.64},
    f"h2o-decay:half_life={HALF_LIFE:.1f}": {256: 24.19, 512: 23.55},
    "tova": {256: 24.39},
    "snap:pool=1": {256: 24.21},
}


def unwrapped(path: Path) -> str:
    """The text with one line for each paragraph."""
    paragraphs = re.split(r"\n\s*\n", path.read_text(encoding="utf-8-sig"))
    joined = (" ".join(paragraph.split()) for paragraph in paragraphs)
    return "\n\n".join(paragraph for paragraph in joined if paragraph)


def tokens_of(model: Path, text: str) -> list[int]:
    with Llama(str(model), evict=False, n_ctx=256, verbose=False) as llm:
        tokens: list[int] = llm.tokenize(text.encode(), add_bos=False)
    return tokens


def surprises(
    weights: LlamaWeights, tokens: list[int], policy: str, rows: int
) -> npt.NDArray[np.float64]:
    """Negative log-likelihood of each token but the first, in nats. [n_tokens - 1]"""
    eviction = EvictionParameters(heavy=rows // 2, recent=rows - rows // 2, slack=SLACK)
    if policy == FULL:
        model = ReferenceLlama(weights)
    else:
        model = ReferenceLlama(weights, eviction, policy=policy)
    parts = []
    for start in range(0, len(tokens) - 1, SLACK):
        expected = tokens[start + 1 : start + 1 + SLACK]
        logits = model.eval(tokens[start : start + len(expected)]).astype(np.float64)
        top = logits.max(axis=1)
        log_sum = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
        parts.append(log_sum - logits[np.arange(len(expected)), expected])
    return np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: demo model")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text file")
    parser.add_argument("--start", type=int, default=3000, help="first token of the stretch")
    parser.add_argument("--tokens", type=int, default=4096, help="its length")
    parser.add_argument("--skip", type=int, default=1024, help="tokens that are not counted")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument(
        "--policy", nargs="+", default=list(SIMULATED), help="policies, or 'full' for no eviction"
    )
    parser.add_argument("--json", type=Path, default=None, help="append results to this file")
    arguments = parser.parse_args()

    model = arguments.model or demo_model_path()
    tokens = tokens_of(model, unwrapped(arguments.text))
    tokens = tokens[arguments.start : arguments.start + arguments.tokens]
    weights = read_gguf(model)
    print(f"{len(tokens)} tokens, {arguments.rows} rows, slack {SLACK}")
    print(f"{'policy':32} {'perplexity':>10} {'simulated':>10} {'difference':>10} {'seconds':>8}")
    for policy in arguments.policy:
        began = time.perf_counter()
        nll = surprises(weights, tokens, policy, arguments.rows)
        seconds = time.perf_counter() - began
        perplexity = math.exp(nll[arguments.skip - 1 :].mean())
        simulated = SIMULATED.get(policy, {}).get(arguments.rows)
        beside = (
            f"{simulated:10.2f} {100 * (perplexity / simulated - 1):9.2f}%" if simulated else ""
        )
        print(f"{policy:32} {perplexity:10.3f} {beside:21} {seconds:8.0f}", flush=True)
        if arguments.json:
            with arguments.json.open("a", encoding="utf-8") as file:
                result = {
                    "policy": policy,
                    "rows": arguments.rows,
                    "perplexity": perplexity,
                    "seconds": seconds,
                }
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    sys.exit(main())
