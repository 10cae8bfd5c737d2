"""Measuring what a cache loses, on tiny random models: caches, results, and all measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from needed import needed
from oracle import chose_clearly
from pyh2o import Sampling
from pyh2o.errors import ContextLimitError, SettingsError
from pyh2o.measuring import measurement as measurement_module
from pyh2o.measuring import model as model_module
from pyh2o.measuring.caches import FULL_CACHE, Compute, MeasuredCache, open_llama
from pyh2o.measuring.measurement import CacheSettings, default_recent_share, policy_named
from pyh2o.measuring.model import NamedText, normalised, text_tokens
from pyh2o.measuring.quality import full_predictions
from pyh2o.measuring.quality.fidelity import Fidelity, FidelitySettings
from pyh2o.measuring.quality.fidelity_figures import (
    FidelitySummary,
    fidelity_picture,
    fidelity_tables,
)
from pyh2o.measuring.quality.full_predictions import FullPredictions
from pyh2o.measuring.quality.instructions import Instructions, InstructionSettings
from pyh2o.measuring.quality.metrics import log_softmax, mean_and_error, surprises
from pyh2o.measuring.quality.prompts import Prompter
from pyh2o.measuring.quality.reading import answer_surprises, predictions, taken_back
from pyh2o.measuring.quality.recall import Recall, RecallSettings
from pyh2o.measuring.quality.samples import Sample
from pyh2o.measuring.quality.stories import Stories, StorySettings, story_surprises
from pyh2o.measuring.results import ResultFile
from pyh2o.reference import ReferenceLlama
from pyh2o.sessions.conversation import Conversation
from quiet_progress import Quiet
from tiny_chat import CHATML, write_chat_gguf
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

TRAINED = 1024
CACHES = CacheSettings(("h2o", "streaming"), (0.25, 100), recent_share=0.5)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_gguf(folder / "tiny.gguf", seed=3, n_ctx_train=TRAINED)


@pytest.fixture(scope="module")
def chat_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_chat_gguf(folder / "chat.gguf", CHATML, seed=4, n_ctx_train=4096)


def random_text(rng: np.random.Generator, n: int) -> str:
    return "".join(rng.choice([*ascii_lowercase, " "], size=n).tolist())


def results(path: Path | None = None, kind: str = "x", *, with_arrays: bool = False) -> ResultFile:
    return ResultFile(path, kind, {"--seed": 1}, {"cpu": "a"}, with_arrays=with_arrays)


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key != "seconds"}
    return [without_times(one) for one in value] if isinstance(value, list) else value


# -------------------------------------------------------------------------------------------------
# Caches
# -------------------------------------------------------------------------------------------------


def test_caches() -> None:
    caches = CACHES.for_text(600)
    assert [(one.name, one.rows, one.heavy, one.recent) for one in caches] == [
        ("full", 0, 0, 0),
        ("h2o, 25 %", 150, 75, 75),
        ("streaming, 25 %", 150, 75, 75),
        ("h2o, 100 rows", 100, 50, 50),
        ("streaming, 100 rows", 100, 50, 50),
    ]
    assert [one.is_full for one in caches] == [True] + 4 * [False]
    assert [one.is_streaming for one in caches] == [False, False, True, False, True]


def test_parts_of_a_budget() -> None:
    settings = CacheSettings(
        ("snap:queries=8", "full"), (100,), 0.3, pinned=10, positions=("original", "dense")
    )
    _, original, dense = settings.for_text(600)
    assert (original.pinned, original.heavy, original.recent) == (10, 63, 27)
    assert original.rows == 100
    assert original.name == "snap:queries=8, 100 rows"
    assert dense == replace(original, name=f"{original.name}, dense", positions="dense")
    all_recent = replace(settings, recent_share=1.0, positions=("original",))
    assert [one.heavy for one in all_recent.for_text(600)] == [0, 0]


def test_share_and_policies_are_those_of_the_settings() -> None:
    assert default_recent_share() == 0.5
    assert policy_named("snap:queries=32") == "snap"
    assert policy_named("full") == "full"
    with pytest.raises(SettingsError, match="there is no policy 'h3o'"):
        policy_named("h3o")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ()}, "at least one --policy"),
        ({"recent_share": 0.0}, "--recent-share 0: give more than 0"),
        ({"recent_share": 1.5}, "--recent-share 1.5"),
        ({"budgets": (1.5,)}, "--budget 1.5 is more than the whole text"),
    ],
)
def test_refused_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        replace(CACHES, **change)


def test_budget_without_a_free_row_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"--budget 0.01 is 6 rows of 600 .* besides 6 that"):
        replace(CACHES, budgets=(0.01,), pinned=6).for_text(600)


def test_opened_caches_keep_what_they_say(path: Path) -> None:
    cache = MeasuredCache(
        "a", policy="streaming", rows=90, heavy=40, recent=40, pinned=10, positions="dense"
    )
    with open_llama(path, cache, window=600, compute=Compute(threads=1)) as llm:
        kv = llm.kv
        assert (kv.heavy, kv.recent, kv.pinned, kv.window) == (40, 40, 10, 600)
        assert (kv.policy, kv.positions) == ("streaming", "dense")


@pytest.mark.parametrize("tokens", [2, 600, TRAINED])
def test_full_cache_evicts_nothing(path: Path, tokens: int) -> None:
    with open_llama(path, FULL_CACHE, window=tokens, compute=Compute(threads=1)) as llm:
        llm.eval([5] * tokens)
        assert llm.kv.compactions == 0
        assert llm.kv.used == tokens


# -------------------------------------------------------------------------------------------------
# Reading
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slack", [1, 7, 200])
def test_predictions_are_those_of_single_tokens(
    path: Path, rng: np.random.Generator, slack: int
) -> None:
    """Also where they are read in chunks: what is evicted is the same."""
    tokens = rng.integers(3, 384, 300).tolist()
    settings = {"n_ctx": 512, "hh": 40, "recent": 40, "slack": slack}
    with (
        tiny_llama(path, **settings) as llm,
        tiny_llama(path, **settings, logits_all=True) as single,
    ):
        chunks = list(predictions(llm, tokens))
        for token in tokens:
            single.eval([token])
        assert llm.kv.compactions == single.kv.compactions > 0
        assert (llm.n_tokens, llm.input_ids[:300].tolist()) == (300, tokens)
        expected = log_softmax(single.scores[:300])
    assert [start for start, _ in chunks][:2] == [0, min(128, 80 + slack)]
    np.testing.assert_allclose(np.concatenate([part for _, part in chunks]), expected, atol=2e-2)


def test_text_goes_on_after_predictions(path: Path) -> None:
    tokens = list(range(10, 40))
    with tiny_llama(path, n_ctx=512) as llm, tiny_llama(path, n_ctx=512) as other:
        list(predictions(llm, tokens[:20]))
        list(predictions(llm, tokens[20:]))
        other.eval(tokens)
        for one in (llm, other):
            one.eval([7])
        logits = [np.array(one._ctx.get_logits_ith(-1)[:384]) for one in (llm, other)]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-3)


@pytest.mark.parametrize("evict", [True, False])
def test_what_is_taken_back_leaves_no_trace(path: Path, evict: bool) -> None:
    settings: dict[str, Any] = {"n_ctx": 600, "hh": 40, "recent": 40, "evict": evict}
    with tiny_llama(path, **settings) as llm:

        def held() -> Any:
            kv = llm.kv
            rows = [llm.kv_rows(layer) for layer in range(3)] if evict else []
            return [(kv.used, kv.pinned, kv.compactions, llm.n_tokens), *rows]

        llm.pin(3)
        llm.eval([5 + i % 200 for i in range(500)])
        before = held()
        losses = answer_surprises(llm, 9, [20, 21, 22])
        assert_same(held(), before)
        if evict:
            with taken_back(llm):
                llm.eval([7] * 300)  # with compactions
                assert llm.kv.compactions > before[0][2]
            assert_same(held(), before)
        again = answer_surprises(llm, 9, [20, 21, 22])
        np.testing.assert_array_equal(losses, again)
        parts = [part for _, part in predictions(llm, [9, 20, 21])]
        np.testing.assert_array_equal(surprises(np.concatenate(parts), [20, 21, 22]), losses)


def assert_same(one: list[Any], other: list[Any]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_texts_that_need_more_positions_than_there_are(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "a.gguf", seed=1, n_ctx_train=512, arch_variant="learned_positions"
    )
    with tiny_llama(path, hh=20, recent=20) as llm, pytest.raises(ContextLimitError, match="512"):
        list(predictions(llm, [5] * 600))


def test_normalised_texts(path: Path) -> None:
    text = normalised("\n\nOne line\nof  text. \n \n\tAnother\r\none.\n\n\n")
    assert text == "One line of text.\n\nAnother one."
    with tiny_llama(path, n_ctx=256) as llm:
        whole = llm.tokenize(text.encode(), add_bos=False)
        assert text_tokens(llm, NamedText("a", text), 3, 5) == [llm.token_bos(), *whole[3:8]]
        with pytest.raises(SettingsError, match=rf"a has {len(whole)} tokens, fewer than --start"):
            text_tokens(llm, NamedText("a", text), 3, len(whole) - 2)


# -------------------------------------------------------------------------------------------------
# Fidelity
# -------------------------------------------------------------------------------------------------


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
    caches = CacheSettings(("h2o",), (1.0,), 0.5)
    summaries, file, _ = measured(fidelity_settings(path, random_text(rng, 900), caches=caches))
    full, same = summaries
    assert same.kl_mean == pytest.approx(0, abs=1e-6)
    assert same.kl_99 == pytest.approx(0, abs=1e-5)
    assert same.same_top == full.same_top == 1.0
    assert same.nll_to_full == pytest.approx(0, abs=1e-6)
    assert same.first == 100
    assert [unit["compactions"] for unit in file.units.values()] == [0, 0]


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
    caches = CacheSettings(("h2o",), (100,), 0.5)
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
    ],
)
def test_refused_fidelity(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        fidelity_settings(Path("a.gguf"), "text", **change)


# -------------------------------------------------------------------------------------------------
# Results
# -------------------------------------------------------------------------------------------------


def test_results_are_on_the_disk_at_once(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    file = results(target, with_arrays=True)
    assert not target.exists()
    file.add("one", {"value": 1.5}, {"nll": np.arange(3)})
    again = results(target, with_arrays=True)
    assert again.units == {"one": {"value": 1.5}}
    np.testing.assert_array_equal(again.arrays("one")["nll"], [0, 1, 2])
    assert again.has("one", "nll")
    assert not again.has("one", "kl")
    assert not json.loads(target.read_text())["complete"]
    again.finish({"tokens": 3}, [{"mean": 1}], ("a note",), complete=True)
    data = json.loads(target.read_text())
    assert data["complete"]
    assert (data["summary"], data["notes"]) == ([{"mean": 1}], ["a note"])
    assert data["units"] == {"one": {"value": 1.5}}


def damage(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_text("mine"), "exists and is no file of pyh2o eval"),
        (lambda path: path.write_text("[1]"), "exists and is no file of pyh2o eval"),
        (damage(lambda data: data.update(format="x")), "exists and is no file of pyh2o eval"),
        (damage(lambda data: data.update(version=2)), "has format version 2"),
        (damage(lambda data: data.update(kind="y")), "is of `pyh2o eval y`"),
        (damage(lambda data: data["basis"].update({"--seed": 2})), "with --seed 2, and .* has 1"),
        (damage(lambda data: data["basis"].update(a="b")), "with a b, and this run has null"),
        (damage(lambda data: data.pop("units")), "is damaged"),
        (lambda path: path.with_suffix(".npz").write_bytes(b"PK\x03\x04"), "a.npz is damaged"),
    ],
)
def test_files_that_do_not_fit(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    target = tmp_path / "a.json"
    results(target, with_arrays=True).add("one", {}, {"nll": np.arange(3)})
    change(target)
    content = target.read_bytes()
    with pytest.raises(SettingsError, match=message):
        results(target, with_arrays=True)
    assert target.read_bytes() == content


def test_arrays_of_something_else_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_text("mine")
    with pytest.raises(SettingsError, match=r"a\.npz exists and .*a\.json does not"):
        results(tmp_path / "a.json", with_arrays=True)
    results(tmp_path / "a.json")


# -------------------------------------------------------------------------------------------------
# Recall
# -------------------------------------------------------------------------------------------------


def recall_settings(path: Path, **changes: Any) -> RecallSettings:
    settings = RecallSettings(
        model=path,
        compute=Compute(threads=1),
        tasks=("niah_multikey_2", "fwe"),
        tokens=(900,),
        samples=2,
        questions=("after", "before"),
        prose=None,
        seed=0,
        caches=CacheSettings(("h2o",), (150,), 0.5),
    )
    return replace(settings, **changes)


@pytest.mark.parametrize("is_chat", [True, False])
def test_prompt_is_cut_where_the_question_begins(
    path: Path, chat_path: Path, is_chat: bool
) -> None:
    sample = Sample("Some text. A fact.", "\nWhat is it?", " It is", ("one", "two"))
    with tiny_llama(chat_path if is_chat else path, n_ctx=512) as llm:
        prompter = Prompter(llm)
        prompt = prompter.prompt(sample)
        assert prompter.is_chat == is_chat

        def text(tokens: list[int]) -> str:
            return llm.detokenize(tokens, special=True).decode()

        assert text(prompt.context).endswith("Some text. A fact.\n")
        rest = text(prompt.rest)
        if is_chat:
            words = "What is it?<|im_end|> <|im_start|> assistant It is"
            assert " ".join(rest.split()) == words
            assert text(prompt.context).startswith("<s>") or "<|im_start|>" in text(prompt.context)
        else:
            assert rest.strip().replace("  ", " ") == "What is it? It is"
            assert prompt.context[0] == llm.token_bos()
        assert text(prompt.answer).strip() == "one, two"
        other = prompter.prompt(replace(sample, question="\nWho?"))
        assert other.context == prompt.context


def test_recall(path: Path, tmp_path: Path) -> None:
    progress = Quiet()
    target = tmp_path / "a.json"
    recall = Recall(recall_settings(path), results(target), progress)
    recall.run()
    assert progress.planned == progress.done == 2 * 2 * 3 * 900
    assert recall.notes == ("the model has no chat template: it goes on with the plain text",)
    summaries = recall.summaries()
    caches = [("full", ""), ("h2o, 150 rows", "after"), ("h2o, 150 rows", "before")]
    assert [(one.task, one.cache, one.question) for one in summaries] == [
        (task, *cache) for task in ("niah_multikey_2", "fwe", "all") for cache in caches
    ]
    units = json.loads(target.read_text())["units"]
    assert len(units) == 12
    for unit in units.values():
        assert 900 * 0.7 < unit["prompt_tokens"] <= 900 - 50
        assert unit["answer"]
        found = [one.lower() in unit["answer"].lower() for one in unit["references"]]
        assert unit["score"] == sum(found) / len(found)
    by_cache = {(one.cache, one.question): one for one in summaries if one.task == "all"}
    full = [unit["nll"] for unit in units.values() if unit["cache"] == "full"]
    for (cache, question), one in by_cache.items():
        own = [u["nll"] for u in units.values() if (u["cache"], u["question"]) == (cache, question)]
        assert one.samples == len(own) == 4
        assert one.nll == pytest.approx(np.mean(own))
        if cache != "full":
            difference = np.array(own) - full
            assert one.nll_to_full == pytest.approx(difference.mean())
            assert one.nll_to_full_error == pytest.approx(difference.std(ddof=1) / 2)
    # eviction changes what is expected, and not the same way in both settings
    assert len({one.nll for one in by_cache.values()}) == 3


def test_recall_of_a_budget_that_covers_the_text_is_the_full_cache_s(path: Path) -> None:
    caches = CacheSettings(("h2o",), (900,), 0.5)
    recall = Recall(recall_settings(path, caches=caches, samples=1), results(), Quiet())
    recall.run()
    full, *others = [one for one in recall.summaries() if one.task == "fwe"]
    for one in others:
        assert one.nll == pytest.approx(full.nll, abs=1e-3)
        assert one.nll_to_full == pytest.approx(0, abs=1e-3)


def test_right_answer_is_the_likelier_the_better_it_fits(path: Path) -> None:
    """What is measured is the likelihood of the answer itself: greedy tokens have the highest."""
    with tiny_llama(path, n_ctx=512) as llm:
        llm.eval(list(range(10, 60)))
        best = int(np.argmax(llm._ctx.get_logits_ith(-1)[:384]))
        llm.remove_tail(49)
        losses = [answer_surprises(llm, 59, [token])[0] for token in range(384)]
    assert int(np.argmin(losses)) == best
    assert np.exp(-np.array(losses, dtype=np.float64)).sum() == pytest.approx(1, abs=1e-4)


def test_recall_is_resumed_and_the_same_in_every_run(path: Path, tmp_path: Path) -> None:
    settings = recall_settings(path, tasks=("fwe",), samples=2)
    whole = results(tmp_path / "a.json")
    Recall(settings, whole, Quiet()).run()
    Recall(replace(settings, samples=1), results(tmp_path / "b.json"), Quiet()).run()
    progress = Quiet()
    rest = results(tmp_path / "b.json")
    Recall(settings, rest, progress).run()
    assert progress.planned == 3 * 900
    assert without_times(rest.units) == without_times(whole.units)
    other = results()
    Recall(replace(settings, seed=1), other, Quiet()).run()
    assert without_times(other.units) != without_times(whole.units)


def test_unit_with_other_figures_is_refused(path: Path) -> None:
    settings = recall_settings(path, tasks=("fwe",), samples=1, questions=("after",))
    recall = Recall(settings, file := results(), Quiet())
    recall.run()
    del file.units["fwe/900/any/full/0"]["score"]
    with pytest.raises(SettingsError, match=r"damaged .fwe/900/any/full/0 has other figures"):
        recall.summaries()


def test_made_up_prose_is_said(path: Path) -> None:
    settings = recall_settings(path, tasks=("niah_single_2",), samples=1)
    assert "the prose is made up" in Recall(settings, results(), Quiet()).notes[0]
    own = replace(settings, prose=NamedText("a.txt", "It was late. " * 9))
    assert "prose" not in " ".join(Recall(own, results(), Quiet()).notes)


def test_refused_recall(path: Path) -> None:
    with pytest.raises(SettingsError, match="--tokens 2000 is more than the 1024"):
        Recall(recall_settings(path, tokens=(2000,)), results(), Quiet())
    with pytest.raises(SettingsError, match="there is no task 'x'"):
        Recall(recall_settings(path, tasks=("x",)), results(), Quiet())


# -------------------------------------------------------------------------------------------------
# Instructions
# -------------------------------------------------------------------------------------------------


def instruction_settings(path: Path, **changes: Any) -> InstructionSettings:
    settings = InstructionSettings(
        model=path,
        compute=Compute(threads=1),
        turns=2,
        samples=2,
        pins=("system", "none"),
        seed=0,
        caches=CacheSettings(("h2o",), (1100,), 0.2),
    )
    return replace(settings, **changes)


def test_instructions(chat_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, int]] = []
    say = Conversation.say

    def known(self: Conversation, message: str, **settings: Any) -> Any:
        said.append((len(self.turns), self.llm.kv.pinned))
        return say(self, message, **settings)

    monkeypatch.setattr(Conversation, "say", known)
    progress = Quiet()
    target = tmp_path / "a.json"
    instructions = Instructions(instruction_settings(chat_path), results(target), progress)
    instructions.run()
    assert progress.planned == progress.done == 3 * 2 * (2 + 2)
    units = list(json.loads(target.read_text())["units"].values())
    summaries = instructions.summaries()
    assert [(one.cache, one.pin, one.samples) for one in summaries] == [
        ("full", "", 2),
        ("h2o, 1100 rows", "system", 2),
        ("h2o, 1100 rows", "none", 2),
    ]
    # two messages and the request, in each of six dialogues; only one pinning has pinned rows
    assert [turn for turn, _ in said] == [0, 1, 2] * 6
    pinned = [n for _, n in said]
    assert all(n > 100 for n in pinned[:12])
    assert pinned[12:] == [0] * 6
    for unit, one in zip(units[::2], summaries, strict=True):
        assert unit["directives"].index("defence") == 0
        assert [len(turn) for turn in unit["followed"]] == [5, 5]
        assert len(unit["answers"]) == 3
        assert set(unit["margins"]) == set(unit["directives"])
        assert 0 <= one.followed <= 1
        assert one.followed == pytest.approx(np.mean(one.by_turn))
        assert (one.leaked_defence_first, one.leaked) == (unit["leaked"], pytest.approx(one.leaked))
    full, *others = summaries
    assert full.margin_to_full is None
    for one in others:
        assert one.margin_to_full == pytest.approx(one.margin - full.margin, abs=1e-6)


def test_instructions_are_the_same_in_every_run(chat_path: Path) -> None:
    settings = instruction_settings(chat_path, samples=1, turns=1)
    files = [results(), results()]
    for file in files:
        Instructions(settings, file, Quiet()).run()
    assert without_times(files[0].units) == without_times(files[1].units)


def test_refused_instructions(path: Path, chat_path: Path) -> None:
    small = CacheSettings(("h2o",), (100,), 0.5)
    with pytest.raises(SettingsError, match=r"system prompt takes .* h2o, 100 rows has 50 rows"):
        Instructions(instruction_settings(chat_path, caches=small), results(), Quiet())
    with pytest.raises(SettingsError, match=r"--turns 99 may come to \d+ tokens, more than the"):
        Instructions(instruction_settings(chat_path, turns=99), results(), Quiet())


# -------------------------------------------------------------------------------------------------
# Stories
# -------------------------------------------------------------------------------------------------


def story_settings(path: Path, **changes: Any) -> StorySettings:
    settings = StorySettings(
        model=path,
        compute=Compute(threads=1),
        prompt="once upon a time",
        tokens=60,
        samples=2,
        sampling=Sampling(seed=3),
        caches=CacheSettings(("h2o",), (30,), 0.5),
    )
    return replace(settings, **changes)


def test_stories(path: Path, tmp_path: Path) -> None:
    progress = Quiet()
    target = tmp_path / "a.json"
    stories = Stories(story_settings(path), results(target), progress)
    stories.run()
    assert progress.planned == progress.done == 2 * 60 * 4
    units = json.loads(target.read_text())["units"]
    assert list(units) == ["full/0", "full/1", "h2o, 30 rows/0", "h2o, 30 rows/1"]
    assert {unit["tokens"] for unit in units.values()} == {60}
    # nothing has to be evicted from so little text, so the caches write the same
    assert units["full/1"]["text"] == units["h2o, 30 rows/1"]["text"] != units["full/0"]["text"]
    full, other = stories.summaries()
    assert full.perplexity == pytest.approx(other.perplexity)
    losses = [units["full/0"]["nll"], units["full/1"]["nll"]]
    assert full.perplexity == pytest.approx(math.exp(np.mean(losses)))
    assert full.self_bleu is not None


def test_stories_are_the_same_in_every_run(path: Path) -> None:
    files = [results(), results()]
    for file in files:
        Stories(story_settings(path, samples=1), file, Quiet()).run()
    assert without_times(files[0].units) == without_times(files[1].units)
    other = results()
    settings = story_settings(path, samples=1, sampling=Sampling(seed=4))
    Stories(settings, other, Quiet()).run()
    assert without_times(other.units) != without_times(files[0].units)


@pytest.mark.parametrize(("n", "window"), [(90, 100), (150, 64), (131, 65), (40, 40)])
@pytest.mark.parametrize("n_prompt", [1, 30])
def test_stories_are_scored_in_overlapping_windows(
    path: Path, rng: np.random.Generator, n: int, window: int, n_prompt: int
) -> None:
    tokens = rng.integers(3, 384, n).tolist()
    with open_llama(path, FULL_CACHE, window=window, compute=Compute(threads=1)) as llm:
        losses = story_surprises(llm, tokens, n_prompt, window)
    assert len(losses) == n - n_prompt
    with tiny_llama(path, n_ctx=512, evict=False, logits_all=True) as llm:
        for position in (n_prompt, window - 1, window, n - 1):
            if not n_prompt <= position < n:
                continue
            # the window that scores it, and not one before
            steps = max(0, math.ceil((position + 1 - window) / (window // 2)))
            start = 0 if steps == 0 else steps * (window - window // 2)
            if window % 2 and steps > 1:
                continue
            llm.reset()
            llm.eval(tokens[start:position])
            expected = surprises(
                log_softmax(llm.scores[position - start - 1][None]), [tokens[position]]
            )
            assert losses[position - n_prompt] == pytest.approx(expected[0], abs=2e-2)


def test_stories_beyond_the_trained_context(path: Path) -> None:
    settings = story_settings(path, tokens=TRAINED, samples=1)
    stories = Stories(settings, results(), Quiet())
    assert "the full cache cannot write them" in stories.notes[0]
    stories.run()
    assert [one.cache for one in stories.summaries()] == ["h2o, 30 rows"]


# -------------------------------------------------------------------------------------------------
# Tables and pictures
# -------------------------------------------------------------------------------------------------

SUMMARY = FidelitySummary(
    text="a.txt",
    tokens=4096,
    cache="h2o, 20 %",
    policy="h2o",
    budget="20 %",
    positions="original",
    rows=819,
    capacity=1024,
    first=1024,
    perplexity=22.345,
    nll=3.1067,
    nll_to_full=0.0123,
    nll_to_full_error=0.0045,
    nll_to_streaming=-0.02,
    nll_to_streaming_error=None,
    gap_closed=0.615,
    kl_mean=0.0321,
    kl_median=0.0123,
    kl_90=0.1,
    kl_99=0.5,
    same_top=0.9123,
    stretches=(None, 21.5),
)


def test_fidelity_tables() -> None:
    full = replace(
        SUMMARY,
        cache="full",
        rows=0,
        capacity=0,
        nll_to_full=None,
        nll_to_full_error=None,
        gap_closed=None,
    )
    first, second = fidelity_tables([full, SUMMARY], 2048)
    assert first.title == "a.txt, 4,096 tokens, over those from 1,024 on"
    assert first.rows[0][:4] == ("full", "", "22.34", "")
    assert first.rows[1] == (
        *("h2o, 20 %", "819 (1024)", "22.34", "+0.0123 ± 0.0045", "-0.0200", "62%"),
        *("0.0321", "0.0123", "0.1000", "0.5000", "91.2%"),
    )
    assert len(first.headings) == len(first.rows[1])
    assert second.headings == ("cache", "2,048", "4,096")
    assert second.rows[1] == ("h2o, 20 %", "", "21.50")


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_fidelity_picture(kind: str, start: bytes) -> None:
    needed("matplotlib")
    other = replace(SUMMARY, cache="h2o, 10 %", rows=409)
    data = fidelity_picture([SUMMARY, other], 2048, kind)
    assert data.startswith(start)
    if kind == "svg":
        assert all(f"<!-- {name} -->".encode() in data for name in ("h2o", "h2o, 10 %"))


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
