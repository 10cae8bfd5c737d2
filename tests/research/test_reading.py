"""Reading texts token by token, and taking back what was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broken_weights import model_with_infinite_token
from pyh2o.errors import ContextLimitError, DecodeError, SettingsError
from research.eval.metrics import log_softmax, surprises
from research.eval.model import NamedText, normalised, text_tokens
from research.eval.reading import (
    answer_surprises,
    found_share,
    predictions,
    spans_recalled,
    taken_back,
)
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama


@pytest.mark.parametrize("slack", [1, 7, 200])
def test_predictions_are_those_of_single_tokens(
    path: Path, rng: np.random.Generator, slack: int
) -> None:
    """Also where they are read in chunks: what is evicted is the same."""
    tokens = rng.integers(3, 384, 300).tolist()
    settings = {"n_ctx": 512, "hh": 40, "recent": 40, "slack": slack, "recall": 0}
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
    assert [start for start, _ in chunks][:2] == [0, min(128, slack)]
    np.testing.assert_allclose(np.concatenate([part for _, part in chunks]), expected, atol=2e-2)


def test_predictions_that_are_no_numbers(tmp_path: Path) -> None:
    model = model_with_infinite_token(tmp_path / "m.gguf", 101)
    with tiny_llama(model, n_ctx=512, hh=40, recent=40) as llm:
        assert [len(part) for _, part in predictions(llm, [7] * 20)] == [20]
        with pytest.raises(DecodeError, match="output of the model is infinite or NaN"):
            list(predictions(llm, [7, 101, 7]))


def test_tokens_look_for_evicted_rows_together_or_each_for_itself(
    path: Path, rng: np.random.Generator
) -> None:
    tokens = rng.integers(3, 384, 300).tolist()
    settings = {"n_ctx": 512, "hh": 40, "recent": 40, "recall": 24}
    with (
        tiny_llama(path, **settings) as llm,
        tiny_llama(path, **settings) as together,
        tiny_llama(path, **settings, logits_all=True) as single,
    ):
        apart = [part for _, part in predictions(llm, tokens, 1)]
        others = [part for _, part in predictions(together, tokens)]
        for token in tokens:
            single.eval([token])
        assert llm.kv.n_looked == single.kv.n_looked > 0
        assert llm.kv.compactions == together.kv.compactions == single.kv.compactions
        expected = log_softmax(single.scores[:300])
    assert [len(part) for part in apart] == [1] * 300
    assert max(map(len, others)) > 1
    np.testing.assert_allclose(np.concatenate(apart), expected, atol=2e-2)
    assert np.abs(np.concatenate(others) - expected).max() > 2e-2


def test_token_of_an_answer_finds_no_more_than_when_it_is_written(
    path: Path, rng: np.random.Generator
) -> None:
    tokens, answer = rng.integers(3, 384, 300).tolist(), rng.integers(3, 384, 12).tolist()
    settings = {"n_ctx": 512, "hh": 40, "recent": 40, "recall": 24}
    with tiny_llama(path, **settings) as llm, tiny_llama(path, **settings) as other:
        llm.eval(tokens)
        losses = answer_surprises(llm, 9, answer)
        other.eval(tokens)
        expected = []
        for fed, token in zip([9, *answer], answer, strict=False):
            other.eval([fed])
            logits = np.array(other._ctx.get_logits_ith(-1)[: other.n_vocab()], np.float32)
            expected.append(surprises(log_softmax(logits[None]), [token])[0])
    np.testing.assert_allclose(losses, expected, atol=1e-3)


def test_what_was_looked_at_since_a_prompt_began(path: Path, rng: np.random.Generator) -> None:
    tokens = rng.integers(3, 384, 600).tolist()
    with tiny_llama(path, n_ctx=512, hh=40, recent=40, recall=24) as llm:
        llm.eval(tokens)
        llm.text.read(tokens[100:140])
        n_archived, n_tokens, found = llm.kv.archived, llm.n_tokens, found_share(llm)
        spans = spans_recalled(llm)
        assert spans
        assert all(0 <= start < min(end, n_archived) <= end <= n_tokens for start, end in spans)
        assert found is not None
        assert 0 < found < 1
    with tiny_llama(path, n_ctx=512, hh=40, recent=40, recall=0) as llm:
        llm.text.read(tokens)
        assert (spans_recalled(llm), found_share(llm)) == ([], None)


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


@pytest.mark.parametrize(("evict", "recall"), [(True, 0), (True, 20), (False, 0)])
def test_what_is_taken_back_leaves_no_trace(path: Path, evict: bool, recall: int) -> None:
    settings: dict[str, Any] = {"n_ctx": 600, "hh": 40, "recent": 40, "evict": evict}
    settings["recall"] = recall
    with tiny_llama(path, **settings) as llm:

        def held() -> Any:
            kv = llm.kv
            rows = [llm.kv_rows(layer) for layer in range(3)] if evict else []
            return [(kv.used, kv.pinned, kv.compactions, kv.archived, llm.n_tokens), *rows]

        llm.text.cache.pin(3)
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
        parts = [part for _, part in predictions(llm, [9, 20, 21], 1 if recall else 128)]
        np.testing.assert_array_equal(surprises(np.concatenate(parts), [20, 21, 22]), losses)


def assert_same(one: list[Any], other: list[Any]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_texts_that_need_more_positions_than_there_are(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "a.gguf", seed=1, n_ctx_train=512, arch_variant="learned_positions"
    )
    settings = {"hh": 20, "recent": 20, "recall": 0}
    with tiny_llama(path, **settings) as llm, pytest.raises(ContextLimitError, match="512"):
        list(predictions(llm, [5] * 600))


def test_normalised_texts(path: Path) -> None:
    text = normalised("\n\nOne line\nof  text. \n \n\tAnother\r\none.\n\n\n")
    assert text == "One line of text.\n\nAnother one."
    with tiny_llama(path, n_ctx=256) as llm:
        whole = llm.tokenize(text.encode(), add_bos=False)
        assert text_tokens(llm, NamedText("a", text), 3, 5) == [llm.token_bos(), *whole[3:8]]
        with pytest.raises(SettingsError, match=rf"a has {len(whole)} tokens, fewer than --start"):
            text_tokens(llm, NamedText("a", text), 3, len(whole) - 2)
