"""Fidelity on tiny random models: losses, what is missing, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from measured import CACHES, TRAINED, random_text, results, without_times
from oracle import chose_clearly
from pyh2o.errors import SettingsError
from research.eval import measurement as measurement_module
from research.eval import model as model_module
from research.eval.caches import Compute, MeasuredCache, open_llama
from research.eval.fidelity import Fidelity, FidelitySettings
from research.eval.measurement import CacheSettings
from research.eval.metrics import log_softmax, surprises
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


def test_all_that_was_evicted_may_be_found(path: Path, rng: np.random.Generator) -> None:
    """What is left of the difference is the type of the rows in the archive."""
    caches = CacheSettings(("h2o",), (600,), recalls=(0, 400))
    settings = fidelity_settings(path, random_text(rng, 2000), tokens=(600,), caches=caches)
    (_, same, found), _ = measured(settings)
    assert same["kl_mean"] == pytest.approx(0, abs=1e-6)
    assert (same["attention"], found["recall"]) == (None, 400)
    assert 0 < found["attention"] < 1
    assert found["compactions"] > 0
    assert found["kl_mean"] < 1e-3


@pytest.mark.parametrize("recall", [0, 20])
def test_tokens_may_be_read_one_by_one(path: Path, rng: np.random.Generator, recall: int) -> None:
    """As an answer is written, in which each looks for evicted rows by itself."""
    caches = CacheSettings(("h2o",), (80,), recalls=(recall,))
    settings = fidelity_settings(path, random_text(rng, 900), caches=caches, at_once=1)
    _, file = measured(settings)
    with tiny_llama(path, n_ctx=400, hh=40, recent=40, recall=recall, logits_all=True) as llm:
        tokens = text_tokens(llm, settings.texts[0], 0, 400)
        for token in tokens[:-1]:
            llm.eval([token])
        expected = surprises(log_softmax(llm.scores[: len(tokens) - 1]), tokens[1:])[1:]
    np.testing.assert_allclose(unit_of(file, "h2o")["nll"], expected, atol=5e-3)


def test_all_lengths_are_read_with_the_same_rotations(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """LongRoPE has other factors for a window of the shorter text alone."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=1, n_ctx_train=1024, arch_variant="longrope"
    )
    caches = CacheSettings(("h2o",), (1.0,), recalls=(0,))
    text = random_text(rng, 1200)
    figures, _ = measured(fidelity_settings(path, text, tokens=(200, 500), caches=caches))
    assert [one["kl_mean"] for one in figures] == pytest.approx([0] * 4, abs=1e-6)


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


def test_all_caches_of_several_lengths(path: Path, rng: np.random.Generator) -> None:
    settings = fidelity_settings(path, random_text(rng, 2000), tokens=(300, 600), first=50)
    figures, file = measured(settings)
    names = ["full", "h2o, 25 %", "streaming, 25 %", "h2o, 100 rows", "streaming, 100 rows"]
    assert [(one["tokens"], one["cache"]) for one in figures] == [
        (tokens, name) for tokens in (300, 600) for name in names
    ]
    units = {unit["cache"]: unit for unit in file.units.values() if unit["tokens"] == 600}
    full, streaming = (np.array(units[name]["nll"][49:]) for name in (names[0], names[-1]))
    for one in figures[5:]:
        own = {key: np.array(units[one["cache"]][key][49:]) for key in ("nll", "kl", "same_top")}
        assert {len(values) for values in own.values()} == {550}
        assert one["nll"] == pytest.approx(own["nll"].mean())
        assert one["kl_mean"] == pytest.approx(own["kl"].mean())
        assert one["same_top"] == pytest.approx(own["same_top"].mean())
        if one["cache"] == "full":
            assert one["nll_to_full"] is one["nll_to_streaming"] is one["gap_closed"] is None
            continue
        assert one["kl_mean"] > 0
        assert one["nll_to_full"] == pytest.approx((own["nll"] - full).mean(), abs=1e-6)
        if one["cache"] == "h2o, 100 rows":
            to_streaming = (own["nll"] - streaming).mean()
            assert one["nll_to_streaming"] == pytest.approx(to_streaming, abs=1e-6)
        elif one["cache"] == "streaming, 100 rows":
            assert one["nll_to_streaming"] is None


def test_text_beyond_the_trained_context_has_a_perplexity_only(
    path: Path, rng: np.random.Generator
) -> None:
    settings = fidelity_settings(
        path,
        random_text(rng, 2600),
        tokens=(TRAINED + 100,),
        caches=replace(CACHES, budgets=(100,)),
    )
    assert (
        "longer than the context the model was trained on" in Fidelity(settings, results()).notes[0]
    )
    figures, _ = measured(settings)
    assert [one["cache"] for one in figures] == [
        "h2o, 100 rows",
        "streaming, 100 rows",
    ]
    assert all(one["kl_mean"] is one["same_top"] is one["nll_to_full"] is None for one in figures)
    assert all(one["perplexity"] > 1 for one in figures)
    assert figures[0]["nll_to_streaming"] is not None
    by_name = replace(settings, caches=replace(settings.caches, policies=("full",)))
    (full,), _ = measured(by_name)
    assert (full["cache"], full["kl_mean"], full["rebases"]) == ("full", None, 0)
    assert full["perplexity"] > 1


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

    def again(settings: FidelitySettings) -> list[dict[str, Any]]:
        opened.clear()
        return measured(settings, results(tmp_path / "a.json"))[0]

    first = again(few)
    assert opened == ["full", "full", "h2o, 100 rows"]  # the first one for its tokenizer
    assert again(few) == first
    assert opened == ["full"]
    assert len(again(settings)) == 5
    assert opened == ["full", "full", "h2o, 25 %", "streaming, 25 %", "streaming, 100 rows"]
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    _, anew = measured(settings)
    whole = results(tmp_path / "a.json").units
    assert {*whole} == {*anew.units}
    assert without_times(whole) == without_times(anew.units)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": (NamedText("a", "x"), NamedText("a", "y"))}, "the same name"),
        ({"tokens": (1,)}, "--tokens 1 with --from 0 leaves no token"),
        ({"first": 400}, "--tokens 400 with --from 400 leaves no token"),
    ],
)
def test_refused_fidelity(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        fidelity_settings(Path("a.gguf"), "text", **change)


def test_gap_is_closed_in_part_or_not_clear(path: Path) -> None:
    """By losses that are written into the file of results."""
    settings = fidelity_settings(path, "some text " * 100, caches=replace(CACHES, budgets=(100,)))
    _, file = measured(settings)
    level = np.full(399, 2.0)
    noise = np.where(np.arange(399) // 32 % 2, 1.0, -1.0)

    def closed(loss: npt.NDArray[np.float64]) -> Any:
        losses = {"full": level, "h2o": level + np.log(1.25), "streaming": level + loss}
        for cache, nll in losses.items():
            unit_of(file, cache)["nll"] = nll.tolist()
        return measured(settings, file)[0][1]["gap_closed"]

    assert closed(np.full_like(level, np.log(2))) == pytest.approx(0.75)
    assert closed(np.full_like(level, np.log(1.125))) == pytest.approx(-1.0, rel=1e-5)
    assert closed(np.zeros_like(level)) is None
    assert closed(noise + 0.1) is None
