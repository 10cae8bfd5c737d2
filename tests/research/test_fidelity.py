"""Losses of a text against those of the reference, and the part of a gap that is closed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from measured import CACHES, random_text, results
from oracle import chose_clearly
from research.eval.caches import Compute
from research.eval.fidelity import Fidelity, FidelitySettings
from research.eval.measurement import CacheSettings
from research.eval.metrics import log_softmax, surprises
from research.eval.model import NamedText, text_tokens
from research.eval.results import ResultFile
from research.reference import ReferenceLlama
from tiny_llama import tiny_llama


def fidelity_settings(path: Path, text: str, **changes: Any) -> FidelitySettings:
    settings = FidelitySettings(
        model=path,
        compute=Compute(threads=1),
        texts=(NamedText("a.txt", text),),
        tokens=(400,),
        stretch=150,
        caches=CACHES,
    )
    return replace(settings, **changes)


def measured(
    settings: FidelitySettings, file: ResultFile | None = None
) -> tuple[list[dict[str, Any]], ResultFile]:
    """The figures of all caches, and the file."""
    file = file or results()
    fidelity = Fidelity(settings, file)
    fidelity.run()
    return [fidelity._summary(job) for job in fidelity.wanted()], file


def unit_of(file: ResultFile, cache: str) -> dict[str, Any]:
    return next(unit for unit in file.units.values() if unit["cache"].startswith(cache))


def test_budget_as_large_as_the_text_loses_nothing(path: Path, rng: np.random.Generator) -> None:
    caches = CacheSettings(("h2o",), (1.0,), recalls=(0,))
    (full, same), file = measured(fidelity_settings(path, random_text(rng, 900), caches=caches))
    assert same["kl_mean"] == pytest.approx(0, abs=1e-6)
    assert same["same_top"] == full["same_top"] == 1.0
    assert same["nll_to_full"] == pytest.approx(0, abs=1e-6)
    assert same["first"] == 100
    assert {unit["compactions"] for unit in file.units.values()} == {0}
    assert {unit["attention"] for unit in file.units.values()} == {None}


def test_losses_are_those_of_the_reference(path: Path, rng: np.random.Generator) -> None:
    clear = False
    while not clear:
        text = random_text(rng, 900)
        with tiny_llama(path, n_ctx=256) as llm:
            tokens = text_tokens(llm, NamedText("a.txt", text), 0, 400)
        reference = ReferenceLlama.from_gguf(
            path, heavy=50, recent=50, slack=156, cache_dtype=np.float16
        )
        logits = reference.eval(tokens, ubatch=1)
        clear = chose_clearly(reference)
    caches = CacheSettings(("h2o",), (100,), recalls=(0,))
    (_, figures), file = measured(fidelity_settings(path, text, caches=caches))
    expected = surprises(log_softmax(logits[:-1].astype(np.float32)), tokens[1:])[1:]
    unit = unit_of(file, "h2o")
    assert unit["compactions"] == reference.n_compactions > 0
    np.testing.assert_allclose(unit["nll"], expected, atol=5e-3)
    assert figures["perplexity"] == pytest.approx(math.exp(expected[99:].mean()), rel=1e-3)
    assert figures["stretches"] == pytest.approx(
        [math.exp(expected[a - 1 : b - 1].mean()) for a, b in ((100, 150), (150, 300), (300, 400))],
        rel=2e-3,
    )
