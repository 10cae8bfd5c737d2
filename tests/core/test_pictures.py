"""Pictures of every kind of projector: results equal mtmd's, in a cache of fixed size."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyh2o.core.projector import is_of_picture
from tiny_llama import EXACT_ROWS
from tiny_pictures import (
    ALL,
    FEW,
    TAIL,
    WINDOW,
    logits_after,
    logits_of_mtmd,
    tiny_seer,
    tokens_of,
    write_models,
    write_shaped,
)
from tiny_projector import N_PATCHES, N_SOUNDS, png, wav, write_tiny_projector

# Of 12 x 5, 3 x 7 and 9 x 1 embeddings in models with rows and columns.
SHAPED = [png(1, 192, 80), png(2, 48, 112), png(3, 144, 16)]
SQUARE = [png(number, 20 + 17 * number) for number in range(3)]


@dataclass(frozen=True)
class Kind:
    """How to write a model, and how its pictures count."""

    pictures: list[bytes]
    atol: float  # of our attention; windows use flash attention in f16
    sizes: dict[str, Any] = field(default_factory=dict)
    n_tokens: tuple[int, ...] = (N_PATCHES,) * 3
    n_positions: tuple[int, ...] = (N_PATCHES,) * 3

    def write(self, folder: Path) -> tuple[Path, Path]:
        return (write_shaped if "arch" in self.sizes else write_models)(folder, **self.sizes)


AHEAD: dict[str, Any] = {"kind": "gemma3", "n_layer": 4}
OF_SHAPES = {"n_tokens": (60, 21, 9), "n_positions": (12, 7, 9)}
KINDS = {
    "one after another": Kind(SQUARE, 2e-3),
    "attending to later ones": Kind(SQUARE, 0.01, {**AHEAD, "arch_variant": "llama"}),
    "in a window": Kind(SQUARE, 0.01, {**AHEAD, "arch_variant": "sliding_window"}),
    "rows and columns": Kind(SHAPED, 2e-3, {"arch": "qwen2vl"}, **OF_SHAPES),
    "interleaved sections": Kind(SHAPED, 2e-3, {"arch": "qwen3vl"}, **OF_SHAPES),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def models(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return kind.write(tmp_path_factory.mktemp("seer"))


@pytest.mark.parametrize("attention", ["ops", "auto", None])
@pytest.mark.parametrize(
    ("prompt", "of"),
    [("look: {} here", [0]), ("{} and {} at once", [1, 2]), ("one {}{} two", [0, 1])],
)
def test_logits_equal_mtmds(
    kind: Kind, models: tuple[Path, Path], prompt: str, of: list[int], attention: str | None
) -> None:
    """Bit for bit with ggml's ops and in a full cache."""
    pictures = [kind.pictures[number] for number in of]
    expected, n = logits_of_mtmd(models, prompt, pictures)
    settings = {**ALL, "attention": attention} if attention else {"n_ctx": WINDOW, "evict": False}
    with tiny_seer(models, **settings, **EXACT_ROWS) as llm:
        tokens = tokens_of(llm, prompt, *pictures)
        found = logits_after(llm, tokens)
    n_of_pictures = sum(kind.n_tokens[number] for number in of)
    assert sum(map(is_of_picture, tokens)) == n_of_pictures
    assert n == len(tokens) - n_of_pictures + sum(kind.n_positions[number] for number in of)
    atol = kind.atol if attention == "auto" else 0
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("attention", ["portable", "ops"])
def test_retrieving_all_rows_of_pictures_equals_the_full_cache(
    kind: Kind, models: tuple[Path, Path], attention: str
) -> None:
    """Invariant 10."""
    prompt = "a {} b {} c {}" + TAIL
    expected, _ = logits_of_mtmd(models, prompt, kind.pictures)
    exact = {**EXACT_ROWS, "attention": attention, "recall_type": "f32"}
    for recall in (0, 500):
        rows = {"hh": FEW["hh"] + recall, "recall": recall}
        with tiny_seer(models, **{**FEW, **exact, **rows}) as llm:
            found = logits_after(llm, tokens_of(llm, prompt, *kind.pictures))
            assert llm.kv.rows_evicted > 0
            assert llm.kv.used <= llm.kv.capacity
        if recall:
            np.testing.assert_allclose(found, expected, rtol=0, atol=max(kind.atol, 4e-3))
        else:
            assert np.abs(found - expected).max() > 0.05


@pytest.mark.parametrize("n_batch", [7, 1])
def test_a_picture_read_in_chunks_is_the_same(
    kind: Kind, models: tuple[Path, Path], n_batch: int
) -> None:
    if kind.sizes.get("kind") == "gemma3":
        pytest.skip("its tokens attend to later ones, so they are one batch")
    expected, _ = logits_of_mtmd(models, "see {} here", kind.pictures[:1])
    with tiny_seer(models, n_batch=n_batch, attention="ops", **ALL, **EXACT_ROWS) as llm:
        found = logits_after(llm, tokens_of(llm, "see {} here", kind.pictures[0]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=kind.atol)


def test_sound_equals_mtmds(kind: Kind, models: tuple[Path, Path], tmp_path: Path) -> None:
    n_embd = 256 if kind.sizes.get("arch") == "qwen3vl" else 128
    ears = write_tiny_projector(tmp_path / "ears.gguf", kind="ultravox", n_embd=n_embd)
    hearing = models[0], ears
    expected, n = logits_of_mtmd(hearing, "hear {} here", [wav(1)])
    with tiny_seer(hearing, attention="ops", **ALL, **EXACT_ROWS) as llm:
        tokens = tokens_of(llm, "hear {} here", wav(1))
        assert (n, sum(map(is_of_picture, tokens))) == (len(tokens), N_SOUNDS)
        np.testing.assert_array_equal(logits_after(llm, tokens), expected)
        assert tokens_of(llm, "hear {} here", wav(2)) != tokens
