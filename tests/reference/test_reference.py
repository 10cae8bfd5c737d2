"""The NumPy reference of the whole model against simpler implementations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import RopeScalingType

from research.reference import LlamaWeights, ReferenceLlama, read_gguf
from tiny_gguf import ALL_VARIANTS, write_tiny_gguf

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]

# The tiny models' logits have standard deviation 1; float32 rounding changes them by 1e-5.
ROUNDING = 1e-4


@pytest.fixture
def tiny(tmp_path: Path, seed: int) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", seed=seed)


def random_tokens(rng: np.random.Generator, n_tokens: int) -> IntArray:
    return rng.integers(3, 384, n_tokens)


def rows(model: ReferenceLlama) -> list[tuple[IntArray, FloatArray]]:
    """Return positions and scores of every (layer, KV head)."""
    hyper = model.weights.hyperparameters
    return [
        (model.positions(layer, head), model.scores(layer, head))
        for layer in range(hyper.n_layer)
        for head in range(hyper.n_head_kv)
    ]


def full_attention_logits(weights: LlamaWeights, tokens: IntArray) -> FloatArray:
    """Run a Llama without a cache in float64, written from the papers without the reference's code.

    Pairs of elements are complex numbers, which RoPE rotates; every KV head is repeated.
    """
    hyper = weights.hyperparameters
    n_tokens, size = len(tokens), hyper.head_size
    turns = np.exp(
        1j * np.outer(np.arange(n_tokens), hyper.rope_base ** (-np.arange(0, size, 2) / size))
    )

    def norm(x: FloatArray, weight: FloatArray) -> FloatArray:
        scaled: FloatArray = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + hyper.rms_epsilon)
        return scaled * weight

    def heads(x: FloatArray, turned: bool) -> FloatArray:
        split = x.reshape(n_tokens, -1, size)
        if turned:
            complex_pairs = (split[..., 0::2] + 1j * split[..., 1::2]) * turns[:, None]
            split = np.stack([complex_pairs.real, complex_pairs.imag], axis=-1)
        repeats = hyper.n_head * size // x.shape[1]
        return np.repeat(split.reshape(n_tokens, -1, size), repeats, axis=1)

    x = weights.embedding[tokens].astype(np.float64)
    for layer in weights.layers:
        h = norm(x, layer.attention_norm)
        query, key = heads(h @ layer.query.T, True), heads(h @ layer.key.T, True)
        logits = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(size)
        logits[:, np.triu(np.ones((n_tokens, n_tokens), dtype=bool), 1)] = -np.inf
        attention = np.exp(logits)
        attention /= attention.sum(axis=2, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", attention, heads(h @ layer.value.T, False))
        x = x + mixed.reshape(n_tokens, -1) @ layer.attention_output.T
        h = norm(x, layer.ffn_norm)
        gate = h @ layer.gate.T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer.up.T)) @ layer.down.T
    result: FloatArray = norm(x, weights.output_norm) @ weights.output.T
    return result


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"n_head_kv": 4},
        {"n_head_kv": 1},
        {"n_head": 6, "n_head_kv": 3, "head_size": 16, "n_layer": 2},
        {"tied_output": True},
    ],
)
def test_a_budget_above_the_text_gives_plain_attention(
    tmp_path: Path, seed: int, rng: np.random.Generator, shape: dict[str, Any]
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=seed, **shape)
    tokens = random_tokens(rng, 150)
    expected = full_attention_logits(read_gguf(path, dtype=np.float64), tokens)

    model = ReferenceLlama.from_gguf(path, heavy=100, recent=49, pinned=1, slack=32)
    logits = model.eval(tokens)

    assert model.n_compactions == 0
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, atol=ROUNDING)
    exact = ReferenceLlama.from_gguf(path, dtype=np.float64, cache_dtype=np.float64)
    np.testing.assert_allclose(exact.eval(tokens), expected, atol=1e-9)


def test_chunks_do_not_matter_without_eviction(tiny: Path, rng: np.random.Generator) -> None:
    tokens = random_tokens(rng, 80)
    whole = ReferenceLlama.from_gguf(tiny, heavy=40, recent=20, slack=60)
    expected = whole.eval(tokens)
    for ubatch in (1, 7, 60):
        model = ReferenceLlama.from_gguf(tiny, heavy=40, recent=20, slack=60)
        half = int(rng.integers(1, 80))
        logits = np.concatenate(
            [model.eval(tokens[:half], ubatch=ubatch), model.eval(tokens[half:], ubatch=ubatch)]
        )

        assert model.n_compactions == 0
        np.testing.assert_allclose(logits, expected, atol=ROUNDING)
        for (positions, scores), (_, expected_scores) in zip(rows(model), rows(whole), strict=True):
            assert positions.tolist() == list(range(80))
            np.testing.assert_allclose(scores, expected_scores, atol=ROUNDING)


def test_a_batch_is_split_at_the_slack(tiny: Path, rng: np.random.Generator) -> None:
    tokens = random_tokens(rng, 100)
    once = ReferenceLlama.from_gguf(tiny, heavy=12, recent=8, slack=5)
    split = ReferenceLlama.from_gguf(tiny, heavy=12, recent=8, slack=5)

    logits = once.eval(tokens, ubatch=64)

    expected = np.concatenate([split.eval(tokens[i : i + 5]) for i in range(0, 100, 5)])
    np.testing.assert_array_equal(logits, expected)
    assert once.n_compactions == split.n_compactions == (100 - 25) // 5


def test_eviction_changes_the_logits(tiny: Path, rng: np.random.Generator) -> None:
    """The tiny model depends on its history; otherwise no test would notice a missing row."""
    tokens = random_tokens(rng, 150)
    full = ReferenceLlama.from_gguf(tiny).eval(tokens)
    evicting = ReferenceLlama.from_gguf(tiny, heavy=16, recent=16).eval(tokens)

    np.testing.assert_allclose(evicting[:33], full[:33], atol=ROUNDING)
    assert (np.abs(evicting - full)[40:].max(axis=1) > 100 * ROUNDING).all()


# ---- removing the tail of the text ----


@pytest.mark.parametrize("keep_all", [False, True])
def test_a_tail_can_be_removed_and_read_again(
    tiny: Path, rng: np.random.Generator, keep_all: bool
) -> None:
    tokens = random_tokens(rng, 60)
    model = ReferenceLlama.from_gguf(tiny, heavy=10, recent=10, slack=20, keep_all=keep_all)
    logits = model.eval(tokens, ubatch=1)
    assert model.n_compactions == 1
    before = rows(model)

    model.remove(45)

    assert (model.n_tokens, model.n_rows) == (45, 25)
    for (old_positions, old_scores), (positions, scores) in zip(before, rows(model), strict=True):
        assert positions.tolist() == old_positions[old_positions < 45].tolist()
        np.testing.assert_array_equal(scores, old_scores[old_positions < 45])
    again = model.eval(tokens[45:], ubatch=1)
    assert model.n_compactions == 1
    np.testing.assert_allclose(again, logits[45:], atol=ROUNDING)


def test_removing_more_than_the_recent_rows_is_refused(
    tiny: Path, rng: np.random.Generator
) -> None:
    model = ReferenceLlama.from_gguf(tiny, heavy=10, recent=10, slack=20)
    model.eval(random_tokens(rng, 60), ubatch=1)
    before = rows(model)

    # The newest position at the compaction was 39, so its recent rows were 30 .. 39. One stays.
    with pytest.raises(ValueError, match="first position that can be removed is 31"):
        model.remove(30)
    for (old, _), (new, _) in zip(before, rows(model), strict=True):
        assert old.tolist() == new.tolist()
    model.remove(31)

    assert (model.n_tokens, model.n_rows) == (31, 11)
    assert all((positions < 31).all() for positions, _ in rows(model))
    # The text continues; the next compaction has all recent rows again.
    model.eval(random_tokens(rng, 39), ubatch=1)
    assert model.n_compactions == 2
    assert all(np.isin(np.arange(60, 70), positions).all() for positions, _ in rows(model))


def test_the_whole_text_can_be_removed_before_the_first_compaction(
    tiny: Path, rng: np.random.Generator
) -> None:
    tokens = random_tokens(rng, 30)
    model = ReferenceLlama.from_gguf(tiny, heavy=20, recent=20)
    logits = model.eval(tokens, ubatch=1)

    with pytest.raises(ValueError, match="-1"):
        model.remove(-1)
    model.remove(100)
    assert model.n_tokens == 30
    model.remove(0)

    assert (model.n_tokens, model.n_rows) == (0, 0)
    np.testing.assert_array_equal(model.eval(tokens, ubatch=1), logits)


# ---- refusals ----


OTHER_VARIANTS = sorted(name for name, (arch, _) in ALL_VARIANTS.items() if arch != "llama")


@pytest.mark.parametrize("variant", OTHER_VARIANTS)
def test_unsupported_models_are_refused(tmp_path: Path, seed: int, variant: str) -> None:
    path = write_tiny_gguf(tmp_path / "other.gguf", seed=seed, arch_variant=variant)

    with pytest.raises(ValueError, match=ALL_VARIANTS[variant][0]):
        read_gguf(path)


def add_bias(model: Any) -> None:
    model.vector("blk.0.attn_q.bias", model.normal(model.n_embd))


def add_yarn(model: Any) -> None:
    model.writer.add_rope_scaling_type(RopeScalingType.YARN)


@pytest.mark.parametrize(("add", "message"), [(add_bias, "attn_q.bias"), (add_yarn, "yarn")])
def test_unsupported_features_are_refused(
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    add: Callable[[Any], None],
    message: str,
) -> None:
    _, add_llama = ALL_VARIANTS["llama"]

    def add_more(model: Any) -> None:
        add_llama(model)
        add(model)

    monkeypatch.setitem(ALL_VARIANTS, "llama", ("llama", add_more))
    path = write_tiny_gguf(tmp_path / "more.gguf", seed=seed)

    with pytest.raises(ValueError, match=message):
        read_gguf(path)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.eval([384]),
        lambda model: model.eval([-1]),
        lambda model: model.eval([[1, 2]]),
        lambda model: model.eval([1], ubatch=0),
    ],
)
def test_invalid_calls_change_nothing(tiny: Path, call: Callable[[Any], Any]) -> None:
    model = ReferenceLlama.from_gguf(tiny)

    with pytest.raises(ValueError, match=r"tokens must|ubatch"):
        call(model)

    assert model.n_tokens == 0
    assert model.eval([]).shape == (0, 384)
