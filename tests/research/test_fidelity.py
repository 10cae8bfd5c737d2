"""Fidelity on tiny random models: losses, what is missing, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from measured import CACHES, TRAINED, Quiet, random_text, results, without_times
from oracle import chose_clearly
from pyh2o.errors import SettingsError
from research.eval import full_predictions
from research.eval import measurement as measurement_module
from research.eval import model as model_module
from research.eval.caches import Compute, MeasuredCache, open_llama
from research.eval.fidelity import Fidelity, FidelitySettings
from research.eval.fidelity_figures import (
    FidelitySummary,
)
from research.eval.full_predictions import FullPredictions
from research.eval.measurement import CacheSettings
from research.eval.metrics import log_softmax, mean_and_error, surprises
from research.eval.model import NamedText, text_tokens
from research.eval.results import ResultFile
from research.reference import ReferenceLlama
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama


def fidelity_settings(path: Path, text: str, **changes: Any) -> FidelitySettings:
    settings = FidelitySettings(
        model=path,
        compute=Compute(threads=1),
        texts=(NamedText("a.txt", text),),
        tokens=(400,),
        start=0,
        first=None,
        stretch=150,
        caches=CACHES,
    )
    return replace(settings, **changes)


def measured(
    settings: FidelitySettings, file: ResultFile | None = None
) -> tuple[list[FidelitySummary], ResultFile, Quiet]:
    file = file or results(with_arrays=True)
    progress = Quiet()
    fidelity = Fidelity(settings, file, progress)
    fidelity.run()
    assert progress.done == progress.planned
    return fidelity.summaries(), file, progress


def test_budget_as_large_as_the_text_loses_nothing(path: Path, rng: np.random.Generator) -> None:
    caches = CacheSettings(("h2o",), (1.0,), 0.5, recalls=(0,))
    summaries, file, _ = measured(fidelity_settings(path, random_text(rng, 900), caches=caches))
    full, same = summaries
    assert same.kl_mean == pytest.approx(0, abs=1e-6)
    assert same.kl_99 == pytest.approx(0, abs=1e-5)
    assert same.same_top == full.same_top == 1.0
    assert same.nll_to_full == pytest.approx(0, abs=1e-6)
    assert same.first == 100
    assert [unit["compactions"] for unit in file.units.values()] == [0, 0]
    assert [unit["attention"] for unit in file.units.values()] == [None, None]


def test_all_that_was_evicted_may_be_found(path: Path, rng: np.random.Generator) -> None:
    """What is left of the difference is the type of the rows in the archive."""
    caches = CacheSettings(("h2o",), (600,), 0.5, recalls=(0, 400))
    text = random_text(rng, 2000)
    summaries, file, _ = measured(fidelity_settings(path, text, tokens=(600,), caches=caches))
    _, same, found = summaries
    assert same.kl_mean == pytest.approx(0, abs=1e-6)
    assert (same.attention, found.recall) == (None, 400)
    assert found.attention is not None
    assert 0 < found.attention < 1
    assert list(file.units.values())[2]["compactions"] > 0
    assert found.kl_mean is not None
    assert found.kl_mean < 1e-3


@pytest.mark.parametrize("recall", [0, 20])
def test_tokens_may_be_read_one_by_one(path: Path, rng: np.random.Generator, recall: int) -> None:
    """As an answer is written, in which each looks for evicted rows by itself."""
    text = random_text(rng, 900)
    caches = CacheSettings(("h2o",), (80,), 0.5, recalls=(recall,))
    settings = fidelity_settings(path, text, caches=caches, at_once=1)
    _, file, _ = measured(settings)
    (name,) = [name for name in file.units if "h2o" in name]
    with tiny_llama(path, n_ctx=400, hh=40, recent=40, recall=recall, logits_all=True) as llm:
        tokens = text_tokens(llm, settings.texts[0], 0, 400)
        for token in tokens[:-1]:
            llm.eval([token])
        expected = surprises(log_softmax(llm.scores[: len(tokens) - 1]), tokens[1:])[1:]
    np.testing.assert_allclose(file.arrays(name)["nll"], expected, atol=5e-3)
    assert settings.options()["at-once"] == 1


def test_all_lengths_are_read_with_the_same_rotations(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """LongRoPE has other factors for a window of the shorter text alone."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=1, n_ctx_train=1024, arch_variant="longrope"
    )
    caches = CacheSettings(("h2o",), (1.0,), 0.5, recalls=(0,))
    text = random_text(rng, 1200)
    summaries, _, _ = measured(fidelity_settings(path, text, tokens=(200, 500), caches=caches))
    assert [one.kl_mean for one in summaries] == pytest.approx([0] * 4, abs=1e-6)


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
    caches = CacheSettings(("h2o",), (100,), 0.5, recalls=(0,))
    settings = fidelity_settings(path, text, caches=caches)
    (_, summary), file, _ = measured(settings)
    expected = surprises(log_softmax(logits[:-1].astype(np.float32)), tokens[1:])[1:]
    (name,) = [name for name in file.units if "h2o" in name]
    assert file.units[name]["compactions"] == reference.n_compactions > 0
    np.testing.assert_allclose(file.arrays(name)["nll"], expected, atol=5e-3)
    assert summary.perplexity == pytest.approx(math.exp(expected[99:].mean()), rel=1e-3)
    assert summary.stretches == pytest.approx(
        [math.exp(expected[a - 1 : b - 1].mean()) for a, b in ((100, 150), (150, 300), (300, 400))],
        rel=2e-3,
    )


def test_all_caches_of_several_lengths(path: Path, rng: np.random.Generator) -> None:
    settings = fidelity_settings(path, random_text(rng, 2000), tokens=(300, 600), first=50)
    summaries, file, progress = measured(settings)
    names = ["full", "h2o, 25 %", "streaming, 25 %", "h2o, 100 rows", "streaming, 100 rows"]
    assert [(one.tokens, one.cache) for one in summaries] == [
        (tokens, name) for tokens in (300, 600) for name in names
    ]
    # the predictions of the longer text serve the shorter one, too
    assert len(progress.notes) == 1
    assert progress.notes[0].startswith("a.txt: the full cache's predictions take 0 MiB in ")
    long = {one.cache: one for one in summaries if one.tokens == 600}
    arrays = {
        cache.name: file.arrays(f"a.txt {settings.texts[0].digest[:12]}/600/{cache.name}")
        for cache in CACHES.for_text(600)
    }
    for name, one in long.items():
        own = {key: array[49:] for key, array in arrays[name].items()}
        full, streaming = arrays["full"]["nll"][49:], arrays["streaming, 100 rows"]["nll"][49:]
        assert [len(array) for array in arrays[name].values()] == [599] * 3
        assert one.nll == pytest.approx(own["nll"].mean())
        assert one.kl_mean == pytest.approx(own["kl"].mean())
        assert one.kl_90 == pytest.approx(np.quantile(own["kl"], 0.9))
        assert one.same_top == own["same_top"].mean()
        if name == "full":
            assert (one.nll_to_full, one.nll_to_streaming, one.gap_closed) == (None, None, None)
            continue
        assert one.kl_mean > 0
        assert one.nll_to_full == pytest.approx((own["nll"] - full).mean())
        if name == "h2o, 100 rows":
            assert one.nll_to_streaming == pytest.approx((own["nll"] - streaming).mean())
            gap, error = mean_and_error(streaming.astype(float) - full, 32)
            lost, most = (
                np.exp(nll.mean(dtype=float)) - np.exp(full.mean(dtype=float))
                for nll in (own["nll"], streaming)
            )
            expected = 1 - lost / most if gap > 2 * error else None
            assert one.gap_closed == pytest.approx(expected, abs=1e-3)
        elif name == "streaming, 100 rows":
            assert one.nll_to_streaming is None


def test_text_beyond_the_trained_context_has_a_perplexity_only(
    path: Path, rng: np.random.Generator
) -> None:
    settings = fidelity_settings(
        path,
        random_text(rng, 2600),
        tokens=(TRAINED + 100,),
        caches=replace(CACHES, budgets=(100,), positions=("original", "dense")),
    )
    fidelity = Fidelity(settings, results(with_arrays=True), Quiet())
    assert "longer than the context the model was trained on" in fidelity.notes[0]
    fidelity.run()
    summaries = fidelity.summaries()
    assert [one.cache for one in summaries] == [
        "h2o, 100 rows",
        "h2o, 100 rows, dense",
        "streaming, 100 rows",
        "streaming, 100 rows, dense",
    ]
    assert all(one.kl_mean is one.same_top is one.nll_to_full is None for one in summaries)
    assert all(one.perplexity > 1 for one in summaries)
    assert summaries[1].nll_to_streaming is not None
    by_name = replace(settings, caches=replace(settings.caches, policies=("full",)))
    (full,), file, _ = measured(by_name)
    assert (full.cache, full.kl_mean) == ("full", None)
    assert full.perplexity > 1
    assert [unit["rebases"] for unit in file.units.values()] == [0]


def test_run_with_the_same_file_measures_what_is_missing(
    path: Path, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def known(model: Path, cache: MeasuredCache, **settings: Any) -> Any:
        opened.append(cache.name)
        return open_llama(model, cache, **settings)

    for module in (measurement_module, model_module):
        monkeypatch.setattr(module, "open_llama", known)
    settings = fidelity_settings(path, random_text(rng, 900))
    few = replace(settings, caches=replace(CACHES, policies=("h2o",), budgets=(100,)))
    target = tmp_path / "a.json"

    def again(settings: FidelitySettings) -> list[FidelitySummary]:
        opened.clear()
        summaries, _, _ = measured(settings, results(target, with_arrays=True))
        return summaries

    first = again(few)
    assert opened == ["full", "full", "h2o, 100 rows"]  # the first one for its tokenizer
    assert again(few) == first
    assert opened == ["full"]
    more = again(settings)
    assert opened == ["full", "full", "h2o, 25 %", "streaming, 25 %", "streaming, 100 rows"]
    assert len(more) == 5
    # the arrays are needed as well
    (tmp_path / "a.npz").unlink()
    assert again(few) == first
    assert opened == ["full", "full", "h2o, 100 rows"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "a.npz"]


def test_same_numbers_in_every_run(path: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    settings = fidelity_settings(path, random_text(rng, 900))
    files = []
    for name in ("a", "b"):
        target = tmp_path / f"{name}.json"
        summaries, file, _ = measured(settings, results(target, with_arrays=True))
        file.finish({}, [vars(one) for one in summaries], (), complete=True)
        files.append(without_times(json.loads(target.read_text())))
    assert files[0] == files[1]


def test_too_little_disk_space(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = full_predictions.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(full_predictions.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(SettingsError, match=r"predictions take 8 MiB and .* has 0 free"):
        FullPredictions(tmp_path, 10_000, 400)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": (NamedText("a", "x"), NamedText("a", "y"))}, "the same name"),
        ({"tokens": (1,)}, "--tokens 1 with --from 0 leaves no token"),
        ({"first": 400}, "--tokens 400 with --from 400 leaves no token"),
        ({"stretch": 0}, "a --stretch of 1 or more"),
        ({"at_once": 0}, "--at-once 0: give 1 or more tokens"),
    ],
)
def test_refused_fidelity(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        fidelity_settings(Path("a.gguf"), "text", **change)


def test_gap_is_closed_in_part_or_not_clear(path: Path, tmp_path: Path) -> None:
    """By losses that are written into the file of results."""
    settings = fidelity_settings(path, "some text " * 100, caches=replace(CACHES, budgets=(100,)))
    target = tmp_path / "a.json"
    _, file, _ = measured(settings, results(target, with_arrays=True))
    full, h2o, streaming = file.units
    level = np.full(399, 2.0, dtype=np.float32)
    noise = np.where(np.arange(399) // 32 % 2, 1.0, -1.0).astype(np.float32)

    def closed(loss: npt.NDArray[np.float32]) -> float | None:
        for name, nll in ((full, level), (h2o, level + np.log(1.25)), (streaming, level + loss)):
            arrays = {**file.arrays(name), "nll": nll}
            file.add(name, file.units[name], arrays)
        summaries, _, _ = measured(settings, file)
        return summaries[1].gap_closed

    assert closed(np.full_like(level, np.log(2))) == pytest.approx(0.75)
    assert closed(np.full_like(level, np.log(1.125))) == pytest.approx(-1.0)
    assert closed(np.zeros_like(level)) is None
    assert closed(noise + 0.1) is None
