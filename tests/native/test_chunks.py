"""Llama 4, whose layers attend within chunks, in a text of two attention chunks.

Chunk borders are positions of the text. They never move because this model has no re-base.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import tiny_windowed
from masked import MaskedLlama
from oracle import CLEAR_MARGIN
from pyh2o.errors import ContextLimitError
from reference_rows import ReferenceRows, last_logits, read_chunks
from research.reference.eviction import EvictionParameters
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, random_tokens, tiny_llama, tiny_parent

# llama.cpp's size, which a model file cannot change.
CHUNK = 8192
BATCH = 240
# The chunked layers have 33 blocks of 256 cells, so rows of the first chunk are overwritten.
N_TEXT = 37 * BATCH
SIZES = {"n_layer": 4, "n_head": 1, "n_head_kv": 1, "head_size": 16, "n_ff": 32}
COVERING = {"hh": N_TEXT, "recent": 600, "slack": BATCH}
SMALL = {"hh": 120, "recent": 120, "slack": BATCH}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the smallest possible model, because the test reads long texts."""
    path = tmp_path_factory.mktemp("chunks") / "llama4.gguf"
    return write_tiny_gguf(path, seed=3, arch_variant="llama4", **SIZES, n_ctx_train=2 * CHUNK)


evicting = partial(tiny_llama, n_batch=BATCH, **EXACT_ROWS)


read = partial(read_chunks, size=BATCH)


def assert_alike(logits: np.ndarray, expected: np.ndarray, *, atol: float) -> None:
    """Compare [n, n_vocab] up to rounding, which can route a token to another expert."""
    assert np.mean(np.abs(logits - expected).max(axis=1) < atol) > 0.8


@pytest.fixture(scope="module")
def full(path: Path) -> tuple[list[int], np.ndarray]:
    """Return a text and the logits after each batch of it in llama.cpp's full cache."""
    tokens = random_tokens(np.random.default_rng(4), N_TEXT)
    cells = {"n_ctx": N_TEXT, "n_batch": BATCH, "n_ubatch": BATCH, "swa_full": False}
    with closing(tiny_parent(path, **EXACT_ROWS, **cells)) as parent:
        return tokens, read(parent, tokens)


@pytest.mark.parametrize("attention", ["ops", "auto"])
def test_a_budget_for_two_chunks_changes_nothing(
    path: Path, full: tuple[list[int], np.ndarray], attention: str
) -> None:
    tokens, expected = full
    with evicting(path, **COVERING, attention=attention) as llm:
        logits = read(llm, tokens)
        assert llm.kv.compactions == 0
    if attention == "ops":
        np.testing.assert_array_equal(logits, expected)
    else:
        assert_alike(logits, expected, atol=1e-2)  # sums in f16, as in llama.cpp's own


def test_exact_prefill_reads_two_chunks(
    path: Path, full: tuple[list[int], np.ndarray], rng: np.random.Generator
) -> None:
    tokens, expected = full
    with evicting(path, **SMALL, attention="ops", prefill="exact") as llm:
        for _ in llm.generate(tokens, temp=0.0):
            break
        np.testing.assert_allclose(last_logits(llm), expected[-1], atol=1e-4)
        read(llm, random_tokens(rng, 2 * BATCH))
        assert llm.kv.used <= llm.kv.capacity


def test_evicted_rows_equal_masked_rows_in_the_second_chunk(
    path: Path, rng: np.random.Generator
) -> None:
    """Rows of the layer that attends to the whole text; its temperature differs there."""
    with (
        evicting(path, **SMALL, attention="ops") as llm,
        MaskedLlama(path, n_ctx=N_TEXT, n_batch=BATCH) as masked,
    ):
        reference = ReferenceRows(
            llm, EvictionParameters(heavy=120, recent=120, slack=BATCH), CLEAR_MARGIN
        )
        logits, expected = [], []
        for _ in range(0, N_TEXT, BATCH):
            tokens = random_tokens(rng, BATCH)
            reference.make_room(BATCH)
            llm.eval(tokens)
            reference.check_rows(llm)
            masked.visible = reference.visible()
            masked.eval(tokens)
            reference.collect(masked.probabilities)
            logits.append(last_logits(llm))
            expected.append(last_logits(masked))
        assert_alike(np.array(logits), np.array(expected), atol=1e-4)
        assert llm.kv.compactions > 30
        first_chunk = [masked.probabilities[layer][0, -1, :CHUNK].sum() for layer in range(4)]
        np.testing.assert_allclose(first_chunk, [0, 0, 0, first_chunk[3]])


def test_a_tail_across_the_border_is_removed_while_the_first_chunk_is_cached(
    path: Path, rng: np.random.Generator
) -> None:
    tokens = random_tokens(rng, N_TEXT)
    back = CHUNK - 50
    with evicting(path, **COVERING, attention="ops") as llm:
        read(llm, tokens[:back])
        expected = read(llm, tokens[back : CHUNK + 50], size=10)
        assert llm.text.remove_tail(back)
        assert_alike(read(llm, tokens[back : CHUNK + 50], size=10), expected, atol=1e-4)

        read(llm, tokens[CHUNK + 50 :])
        assert not llm.text.remove_tail(CHUNK - 1)
        assert llm.n_tokens == N_TEXT
        assert llm.text.remove_tail(CHUNK)
        assert_alike(read(llm, tokens[CHUNK : CHUNK + 50], size=10), expected[5:], atol=1e-4)


def test_a_state_resumes_in_the_second_chunk(path: Path, rng: np.random.Generator) -> None:
    tokens, more = random_tokens(rng, N_TEXT), random_tokens(rng, 60)
    with evicting(path, **SMALL, attention="ops") as llm:
        read(llm, tokens)
        state = llm.save_state()
        expected = read(llm, more, size=10)
    with evicting(path, **SMALL, attention="ops") as llm:
        llm.load_state(state)
        assert_alike(read(llm, more, size=10), expected, atol=1e-4)


@pytest.mark.parametrize("n_expert", [4, 128])
def test_temperature_by_position_ends_the_text_at_the_cell_limit(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, n_expert: int
) -> None:
    """So chunks stay those of the text. With 128 experts nothing else prevents a re-base."""
    monkeypatch.setattr(tiny_windowed, "N_EXPERT", n_expert)
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=3, arch_variant="llama4", **SIZES, n_ctx_train=48
    )
    budget = {"hh": 12, "recent": 9, "slack": 7}
    with evicting(path, **budget) as llm:
        assert llm.text.position_limit == 48
        llm.eval(random_tokens(rng, 48))
        with pytest.raises(ContextLimitError, match="the 48 positions this model can use"):
            llm.eval([3])
        assert llm.kv.compactions > 0
        assert llm.kv.rebases == 0
