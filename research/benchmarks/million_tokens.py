"""A million tokens with an archive in a file: counters, offsets beyond 4 GiB, speed and memory.

    python -m research.benchmarks.million_tokens --tokens 1000000

The model is a tiny random one, so that this takes minutes. Random tokens are read through a small
cache; every 100,000 of them a line is printed: the speed of reading and of single tokens, with the
search for evicted rows, which grows with the archive, and resident memory. At the end, rows from
all over the file are looked at: those of a token are the same in the first layer's V wherever it
stands.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pyh2o import Llama
from pyh2o.system.memory import resident_bytes

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
from tiny_gguf import write_tiny_gguf

STRETCH = 100_000
N_SINGLE = 100
# 64 of the rows are found, so that as many stay in the cache as without an archive.
HEAVY, RECENT, RECALL = 192, 128, 64
N_LAYER, N_HEAD, HEAD_SIZE, N_VOCAB, N_TRAINED = 5, 4, 32, 384, 2048

# Of the file, in bytes; its rows are f32 (native/src/recall/h2o-archive-layout.h).
PAGE_TOKENS, HEADER, ROW = 128, 4096, HEAD_SIZE * 4
PART = N_LAYER * N_HEAD * PAGE_TOKENS * ROW
PAGE = HEADER + 2 * PART
LOOKED_AT = 20_000


def first_values(file: Path, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """[n, HEAD_SIZE] V of the first layer and head at these positions of the text."""
    archive = np.memmap(file, dtype=np.uint8, mode="r")
    page, row = np.divmod(positions, PAGE_TOKENS)
    starts = HEADER + page * PAGE + HEADER + PART + row * ROW
    rows = archive[starts[:, None] + np.arange(ROW)]
    return np.ascontiguousarray(rows).view(np.float32)


def check_file(file: Path, tokens: npt.NDArray[np.int64], n_archived: int) -> str:
    """Compare rows from all over the file with those of the same tokens at its beginning.

    Raises:
        AssertionError: they differ, or the file has another size.
    """
    n_pages = n_archived // PAGE_TOKENS
    assert file.stat().st_size == HEADER + n_pages * PAGE, file.stat().st_size
    n_first = 64 * PAGE_TOKENS
    first = {token: place for place, token in reversed([*enumerate(tokens[:n_first].tolist())])}
    rng = np.random.default_rng(1)
    places = np.sort(rng.integers(0, n_pages * PAGE_TOKENS, LOOKED_AT))
    places = np.append(places, n_pages * PAGE_TOKENS - 1)
    expected = first_values(file, np.array([first[token] for token in tokens[places].tolist()]))
    difference = float(np.abs(first_values(file, places) - expected).max())
    assert difference < 1e-4, difference
    last = HEADER + int(places[-1]) // PAGE_TOKENS * PAGE
    return f"{places.size:,} rows up to byte {last:,} are right to {difference:.1e}"


def speed(llm: Llama, pieces: Sequence[list[int]]) -> float:
    """Tokens per second of pieces that are read one after the other."""
    began = time.perf_counter()
    for piece in pieces:
        llm.eval(piece)
    return sum(map(len, pieces)) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    arguments = parser.parse_args()
    tokens = np.random.default_rng(0).integers(3, N_VOCAB, arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        path, file = Path(folder) / "tiny.gguf", Path(folder) / "rows.archive"
        write_tiny_gguf(
            path,
            seed=1,
            n_layer=N_LAYER,
            n_head=N_HEAD,
            n_head_kv=N_HEAD,
            head_size=HEAD_SIZE,
            n_ctx_train=N_TRAINED,
        )
        llm = Llama(
            str(path),
            n_ctx=N_TRAINED,
            hh=HEAVY,
            recent=RECENT,
            recall=RECALL,
            recall_type="f32",
            recall_archive=str(file),
            verbose=False,
        )
        print("tokens, tokens/s read, tokens/s one by one, resident MiB, archive MiB")
        for start in range(0, tokens.size, STRETCH):
            stretch = tokens[start : start + STRETCH].tolist()
            read = speed(llm, [stretch[:-N_SINGLE]])
            single = speed(llm, [[token] for token in stretch[-N_SINGLE:]])
            print(
                f"{llm.n_tokens:,}, {read:,.0f}, {single:,.0f}, "
                f"{resident_bytes() / 2**20:.0f}, {llm.kv.bytes_archive / 2**20:,.0f}",
                flush=True,
            )
        kv, spans = llm.kv, llm.recalled()
        assert llm.n_tokens == tokens.size, llm.n_tokens
        assert kv.archived + kv.limits.recent <= tokens.size, kv.archived
        assert kv.archived >= tokens.size - kv.limits.recent - kv.limits.slack, kv.archived
        assert (kv.unarchived, llm.archive_trouble) == (0, ""), kv
        assert kv.n_looked > 0, kv
        assert 0 < kv.found_share < 1, kv
        assert spans
        assert all(0 <= span.start < span.end <= kv.archived for span in spans), spans
        print(
            f"{kv.archived:,} tokens archived, {kv.rebases:,} re-bases, {kv.compactions:,} "
            f"compactions; {kv.found_share:.1%} of attention was found; passages from "
            f"{spans[0].start:,} to {spans[-1].end:,}"
        )
        llm.close()
        print(check_file(file, tokens, kv.archived))


if __name__ == "__main__":
    main()
