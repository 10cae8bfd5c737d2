"""Re-base: rows of texts beyond the trained context get new positions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from oracle import assert_same_steps, clear_steps
from pyh2o import Llama
from pyh2o.errors import ContextLimitError, SettingsError
from research.reference import ReferenceLlama
from some_policies import in_research
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, stored_as, tiny_llama, tiny_parent

N_LAYER, N_VOCAB = 2, 384
HEAVY, RECENT, SLACK = 12, 9, 7
N_POS = 48
# So few positions that every compaction packs the rows.
CAPACITY = HEAVY + RECENT + SLACK

# Also the window: if it exceeds 1,024 tokens, LongRoPE uses its other factors.
ROTATIONS = [
    ("llama", 256),
    ("frequency_factors", 256),
    ("yarn", 256),
    ("longrope", 256),
    ("longrope", 1025),
    ("neox", 256),
    ("partial", 256),
    ("every_fourth_unrotated", 256),
]

RANDOM = in_research("random_rows:RandomRows")
MODEL: dict[str, Any] = {"seed": 3, "n_layer": N_LAYER, "n_ctx_train": N_POS}


evicting_llama = partial(
    tiny_llama, hh=HEAVY, recent=RECENT, slack=SLACK, logits_all=True, **EXACT_ROWS
)
reference_of = partial(
    ReferenceLlama.from_gguf, heavy=HEAVY, recent=RECENT, slack=SLACK, n_pos=N_POS
)


@pytest.mark.parametrize("n_pos", [N_POS, CAPACITY], ids=["half", "packed"])
@pytest.mark.parametrize("ubatch", [1, 5])
def test_every_step_equals_the_reference(
    tmp_path: Path, rng: np.random.Generator, ubatch: int, n_pos: int
) -> None:
    """Rows move back by half of the positions, or are packed if they need more than that."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", **{**MODEL, "n_ctx_train": n_pos})
    reference = reference_of(path, n_pos=n_pos)
    steps, reference = clear_steps(reference, rng, [ubatch] * (400 // ubatch))
    llm = evicting_llama(path, n_ctx=64)
    assert_same_steps(llm, steps, logits=5e-4, scores=1e-3)
    assert llm.kv.compactions == reference.n_compactions > 30
    assert llm.kv.rebases == reference.n_rebases > 10
    assert (llm.kv.rebases == llm.kv.compactions) == (n_pos == CAPACITY)


def low_level_logits(llm: Llama, tokens: npt.NDArray[np.int64], first: int) -> npt.NDArray[Any]:
    """Return logits [n_token, n_vocab] of tokens decoded one by one from a position on."""
    batch = llama_cpp.llama_batch_init(1, 0, 1)
    batch.n_tokens, batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 1, 0, True
    logits = []
    for position, token in enumerate(tokens.tolist(), first):
        batch.token[0], batch.pos[0] = token, position
        assert llama_cpp.llama_decode(llm.ctx, batch) == 0
        row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, 0), (llm.n_vocab(),))
        logits.append(row.copy())
    llama_cpp.llama_batch_free(batch)
    return np.array(logits)


@pytest.mark.parametrize(("arch_variant", "window"), ROTATIONS)
@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
def test_a_rebase_rotates_keys_as_the_model_does(
    tmp_path: Path, rng: np.random.Generator, arch_variant: str, window: int, kv_type: str
) -> None:
    """Attention depends on distances only, so moving all rows together changes nothing."""
    # heads of 64 elements, because llama.cpp mixes those of a quantised cache
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=5, n_layer=4, head_size=64, arch_variant=arch_variant
    )
    tokens = rng.integers(0, N_VOCAB, 60)
    types = stored_as(kv_type)
    full = tiny_parent(path, n_ctx=window, flash_attn=kv_type == "q8_0", **types)
    expected = low_level_logits(full, tokens, 0)

    llm = tiny_llama(path, hh=100, recent=100, n_ctx=window, **types)
    assert llm.kv.limits.n_pos == (1024 if (arch_variant, window) == ("longrope", 256) else 4096)
    logits = low_level_logits(llm, tokens, llm.kv.limits.n_pos - 30)

    assert llm.kv.rebases == 1
    assert llm.kv.compactions == 0
    error = np.abs(logits - expected)
    before, after = error[:30], error[30:]
    # Even before the re-base rows are rounded at angles 4,000 positions apart.
    assert before.max() < {"f32": 0.02, "f16": 0.04, "q8_0": 0.3}[kv_type]
    assert after.max() < {"f32": 0.02, "f16": 0.04, "q8_0": 0.5}[kv_type]
    assert after.mean() < {"f32": 0.005, "f16": 0.01, "q8_0": 0.1}[kv_type]


@pytest.mark.parametrize("arch_variant", ["learned_positions", "normed_after_rope"])
def test_keys_that_cannot_be_rotated_end_the_text_at_the_cell_limit(
    tmp_path: Path, rng: np.random.Generator, arch_variant: str
) -> None:
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=3, n_ctx_train=N_POS, arch_variant=arch_variant
    )
    llm = evicting_llama(path, logits_all=False)
    assert llm.text.position_limit == N_POS
    llm.eval(rng.integers(0, N_VOCAB, N_POS).tolist())
    assert llm.kv.compactions > 0
    with pytest.raises(ContextLimitError, match=f"the {N_POS} positions this model can use"):
        llm.eval([1])
    assert llm.kv.rebases == 0


def test_a_tail_can_be_removed_after_a_rebase(path: Path, rng: np.random.Generator) -> None:
    steps, reference = clear_steps(reference_of(path), rng, [6, 6, 6, 6, 6, -3] * 20)
    llm = evicting_llama(path)
    assert_same_steps(llm, steps, logits=5e-4, scores=1e-3)
    assert llm.kv.rebases == reference.n_rebases > 5


def test_a_batch_longer_than_half_of_the_positions_is_decoded(
    path: Path, rng: np.random.Generator
) -> None:
    """A model with a short trained context soon has so much slack."""
    slack = N_POS - 8
    reference = reference_of(path, heavy=4, recent=4, slack=slack)
    steps, reference = clear_steps(reference, rng, [slack] * 8)
    llm = evicting_llama(path, hh=4, recent=4, slack=slack)
    assert_same_steps(llm, steps, logits=5e-4, scores=1e-3)
    assert llm.kv.rebases == reference.n_rebases > 5
    other = evicting_llama(path, hh=4, recent=4, slack=slack)
    other.load_kv_state(llm.kv_state(), llm.input_ids[: llm.n_tokens].tolist())


def test_a_new_text_starts_at_position_zero(path: Path, rng: np.random.Generator) -> None:
    tokens = rng.integers(0, N_VOCAB, 20).tolist()
    fresh = evicting_llama(path)
    fresh.eval(tokens)
    llm = evicting_llama(path)
    llm.eval(rng.integers(0, N_VOCAB, 200).tolist())
    assert llm.kv.rebases > 0
    llm.reset()
    llm.eval(tokens)
    np.testing.assert_array_equal(llm.scores[:20], fresh.scores[:20])


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_rounding_of_rebases_does_not_accumulate(
    tmp_path: Path, rng: np.random.Generator, kv_type: str
) -> None:
    """A row is rotated again only when its rank among the rows changes.

    That happens a few times in its life, so a long text is no worse than a short one. The policy
    keeps random rows, so rounding cannot choose others.
    """
    path = write_tiny_gguf(tmp_path / "tiny.gguf", **{**MODEL, "n_ctx_train": CAPACITY})
    tokens = rng.integers(0, N_VOCAB, 3000)
    exact = evicting_llama(path, n_ctx=64, policy=RANDOM)
    rounded = evicting_llama(path, n_ctx=64, policy=RANDOM, **stored_as(kv_type))
    errors = []
    for chunk in np.split(tokens, 300):
        for llm in (exact, rounded):
            llm.eval(chunk.tolist())
        last = slice(exact.n_tokens - len(chunk), exact.n_tokens)
        errors.append(np.abs(rounded.scores[last] - exact.scores[last]).mean())
    for layer in range(N_LAYER):
        np.testing.assert_array_equal(rounded.kv_rows(layer)[0], exact.kv_rows(layer)[0])
    assert exact.kv.rebases > 400
    early, late = np.array_split(np.array(errors), 2)
    assert late.mean() < 2 * early.mean()


def error_of_rounding(path: Path, n_tokens: int, **settings: Any) -> float:
    """Return the mean logit error at the end of a text with q4_0 rows, which often change rank."""
    tokens = np.random.default_rng(1).integers(0, N_VOCAB, n_tokens)
    settings = {"hh": 180, "recent": 16, "slack": 4, "policy": RANDOM, **settings}
    exact = evicting_llama(path, n_ctx=256, **settings)
    rounded = evicting_llama(path, n_ctx=256, **settings | stored_as("q4_0"))
    for llm in (exact, rounded):
        llm.eval(tokens.tolist())
    for layer in range(N_LAYER):
        np.testing.assert_array_equal(rounded.kv_rows(layer)[0], exact.kv_rows(layer)[0])
    assert exact.kv.rebases > 200
    late = slice(n_tokens - 300, n_tokens)
    return float(np.abs(rounded.scores[late] - exact.scores[late]).mean())


def test_archived_keys_are_rounded_once_however_often_they_are_rotated(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=N_LAYER, n_ctx_train=200)
    forgetting = error_of_rounding(path, 1500, recall=0)
    archived = error_of_rounding(path, 1500, recall=1, recall_type="f32")
    assert archived < 0.6 * forgetting


def test_too_few_positions_for_the_rows_are_refused(path: Path) -> None:
    with pytest.raises(SettingsError, match=f"more positions than the {N_POS}"):
        tiny_llama(path, hh=30, recent=30, n_ctx=400)
    llm = tiny_llama(path, hh=0.5, recent=0.5, slack=8)
    assert llm.kv.capacity == N_POS
    assert llm.kv.recent == N_POS // 2


def test_the_record_of_the_text_grows(path: Path, rng: np.random.Generator) -> None:
    llm = evicting_llama(path, logits_all=False)
    tokens = rng.integers(0, N_VOCAB, 6000)
    llm.eval(tokens[:5000].tolist())
    llm.eval(tokens[5000:].tolist())
    np.testing.assert_array_equal(llm.input_ids[: llm.n_tokens], tokens)
