"""Perplexity of long texts read through a small cache, beyond the context the model was trained on.

    python benchmarks/streaming_perplexity.py --text book.txt --tokens 24000 --rows 1024

Every token of the text is predicted from what the cache holds at that moment, as when the text
streams through a conversation. The caches, all with as many rows per layer and KV head:

    original        H2O, half heavy and half recent; positions of the text until the trained
                    context is used up, and a re-base then
    dense           the same, with a re-base at every compaction
    sinks + window  the first 4 and the most recent tokens
    full            llama.cpp's full cache for the whole text, whatever the model was trained on

Reported is the perplexity of each stretch of the text and of all of it after the first `rows`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyh2o.llama import KV_TYPES, Llama, llama_cpp
from pyh2o.models import demo_model_path
from pyh2o.threads import physical_cores

SINKS = 4
# As many tokens are decoded at once, where the slack allows it.
CHUNK = 128


def caches(rows: int) -> dict[str, dict[str, Any]]:
    h2o = {"hh": rows // 2, "recent": rows - rows // 2}
    return {
        "original": {**h2o, "positions": "original"},
        "dense": {**h2o, "positions": "dense"},
        "sinks + window": {"hh": 0, "recent": rows - SINKS, "pinned": SINKS},
        "full": {"evict": False},
    }


def surprises(llm: Llama, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Negative log-likelihood of each token but the first, in nats. [n_tokens - 1]"""
    n_vocab = llm.n_vocab()
    batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)
    parts = []
    for start in range(0, len(tokens) - 1, CHUNK):
        chunk = tokens[start : min(start + CHUNK, len(tokens) - 1)]
        batch.n_tokens = len(chunk)
        for i, token in enumerate(chunk):
            batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if llama_cpp.llama_decode(llm.ctx, batch) != 0:
            raise RuntimeError(f"llama.cpp cannot decode at position {start}")
        logits = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(llm.ctx), (len(chunk), n_vocab)
        ).astype(np.float64)
        top = logits.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
        expected = tokens[start + 1 : start + 1 + len(chunk)]
        parts.append(log_sum - logits[np.arange(len(chunk)), expected])
    llama_cpp.llama_batch_free(batch)
    return np.concatenate(parts)


def perplexity(nll: npt.NDArray[np.float64]) -> float:
    return math.exp(nll.mean()) if nll.size else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: demo model")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="UTF-8 text files")
    parser.add_argument("--tokens", type=int, default=24000)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--stretch", type=int, default=8192, help="tokens of one column")
    parser.add_argument("--cache", nargs="+", default=None, help="only these caches")
    parser.add_argument("--kv-type", choices=KV_TYPES, default="f16")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--json", type=Path, default=None, help="append results to this file")
    arguments = parser.parse_args()

    for text in arguments.text:
        for name, settings in caches(arguments.rows).items():
            if arguments.cache and name not in arguments.cache:
                continue
            llm = Llama(
                str(arguments.model or demo_model_path()),
                n_ctx=arguments.tokens,
                n_threads=arguments.threads,
                n_threads_batch=arguments.threads,
                type_k=KV_TYPES[arguments.kv_type],
                type_v=KV_TYPES[arguments.kv_type],
                flash_attn=name == "full",
                verbose=False,
                **settings,
            )
            words = " ".join(text.read_text(encoding="utf-8").split())
            tokens = llm.tokenize(words.encode())[: arguments.tokens]
            start = time.perf_counter()
            nll = surprises(llm, tokens)
            seconds = time.perf_counter() - start
            stretches = [
                perplexity(nll[max(first, arguments.rows) : first + arguments.stretch])
                for first in range(0, len(nll), arguments.stretch)
            ]
            result = {
                "text": text.name,
                "cache": name,
                "rows": arguments.rows if llm.evicting else len(tokens),
                "tokens": len(tokens),
                "perplexity": perplexity(nll[arguments.rows :]),
                "stretches": stretches,
                "rebases": llm.kv.rebases,
                "rebase_seconds": llm.kv.rebase_seconds,
                "seconds": seconds,
            }
            llm.close()
            columns = " ".join(f"{value:8.2f}" for value in stretches)
            print(
                f"{text.name:16} {name:16} {result['perplexity']:8.2f} | {columns} | "
                f"{result['rebases']} re-bases, {seconds:.0f} s",
                flush=True,
            )
            if arguments.json:
                with arguments.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    sys.exit(main())
