"""Pictures whose tokens attend to later ones (Gemma 3), in a cache of fixed size."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from pyh2o.cache.native import attach
from pyh2o.cache.settings import EvictionSettings
from pyh2o.core.model import Model
from pyh2o.core.parameters import Parameters
from pyh2o.core.prefixes import keep_prefix, prefix_kept
from pyh2o.core.text import Text
from pyh2o.core.weights import address
from pyh2o.errors import PictureError, StateError
from tiny_llama import EXACT_ROWS, ONE_THREAD, assert_same_cache, tiny_parent
from tiny_pictures import (
    ALL,
    FEW,
    TAIL,
    WINDOW,
    first_of_picture,
    logits_after,
    mark_of,
    tiny_seer,
    tokens_of,
    write_models,
)
from tiny_projector import N_PATCHES, png

# Windows use flash attention in f16.
CLOSE = {"rtol": 0, "atol": 0.01}

Models = tuple[Path, Path]


@pytest.fixture(scope="module", params=["sliding_window", "llama"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("seer")
    return write_models(folder, kind="gemma3", arch_variant=request.param, n_layer=4)


def test_reading_in_two_calls_equals_reading_in_one(models: Models) -> None:
    settings = {**FEW, "attention": "ops", **EXACT_ROWS}
    with tiny_seer(models, **settings) as one, tiny_seer(models, **settings) as other:
        tokens = tokens_of(one, TAIL + "a {}{} b" + TAIL, png(1), png(2))
        mark_of(other, png(1)), mark_of(other, png(2))
        begin = first_of_picture(tokens)
        one.eval(tokens)
        for first, last in ((0, begin), (begin, begin + N_PATCHES), (begin + N_PATCHES, None)):
            other.eval(tokens[first:last])
        assert one.kv.compactions > 2
        assert_same_cache(one, other)
        np.testing.assert_array_equal(one.text.logits[-1], other.text.logits[-1])


def test_a_saved_text_resumes(models: Models) -> None:
    with tiny_seer(models, **FEW) as one, tiny_seer(models, **FEW) as other:
        tokens = tokens_of(one, "see {} here" + TAIL, png(1))
        one.eval(tokens)
        other.load_kv_state(one.kv_state(), tokens)
        for llm in (one, other):
            llm.eval([7, 8])
        np.testing.assert_allclose(one.text.logits[-1], other.text.logits[-1], **CLOSE)


@pytest.mark.parametrize("evict", [True, False])
def test_a_picture_is_removed_as_a_whole(evict: bool, models: Models) -> None:
    with tiny_seer(models, evict=evict, **ALL) as llm:
        tokens = tokens_of(llm, "see {} here", png(1))
        begin = first_of_picture(tokens)
        for part in (tokens[: begin + 5], tokens[begin + 5 :]):
            llm.reset()
            with pytest.raises(StateError, match="evaluate whole pictures"):
                llm.eval(part)
        expected = logits_after(llm, tokens)
        assert not llm.text.can_remove_tail(begin + 5)
        assert not llm.text.remove_tail(begin + 5)
        assert llm.text.can_remove_tail(begin + N_PATCHES)
        llm.n_tokens = begin + 5
        with pytest.raises(StateError, match="evaluate whole pictures"):
            llm.eval(tokens[begin + 5 :])
        llm.n_tokens = begin
        llm.eval(tokens[begin:])
        np.testing.assert_allclose(llm.text.logits[-1], expected, **CLOSE)


def test_a_prefix_ends_before_a_different_picture(models: Models) -> None:
    """Even if the first embeddings of both are equal."""
    with tiny_seer(models, evict=False, n_ctx=WINDOW) as llm:
        tokens = tokens_of(llm, "see {} here", png(1))
        begin = first_of_picture(tokens)
        other = [*tokens[: begin + 5], *tokens_of(llm, "{}", png(2))[6:]]
        llm.eval(tokens)
        assert prefix_kept(llm.text, other) == begin
        assert keep_prefix(llm.text, other) == other[begin:]


def test_pauses_come_before_a_picture(models: Models) -> None:
    with tiny_seer(models, attention="ops", **ALL) as llm:
        tokens = tokens_of(llm, "see {} here", png(1))
        begin, seen = first_of_picture(tokens), []
        llm.text.pauses[begin + 5] = lambda: seen.append(llm.n_tokens)
        llm.eval(tokens)
        assert seen == [begin]


def test_a_picture_is_read_at_once_alongside_other_texts(models: Models) -> None:
    """The engine splits a prompt into chunks, but never a picture."""
    with tiny_seer(models, **ALL, **EXACT_ROWS) as llm:
        tokens = tokens_of(llm, "see {} here", png(1))
        expected = logits_after(llm, tokens)
    settings = EvictionSettings(hh=512, recent=512, policy="h2o", recall=0, attention="ops")
    parameters = Parameters(**ONE_THREAD, **EXACT_ROWS)
    path, projector = map(str, models)
    model = Model(
        path,
        settings,
        n_ctx=WINDOW,
        n_texts=2,
        reading=4,
        parameters=parameters,
        mmproj=projector,
    )
    with closing(model):
        assert model.projector is not None
        model.projector.mark(png(1))
        writing, reading = (Text(model, seq_id) for seq_id in range(2))
        ended = threading.Event()

        def write() -> None:
            while not ended.is_set():
                writing.eval([7])

        thread = threading.Thread(target=write)
        thread.start()
        try:
            reading.eval(tokens)
        finally:
            ended.set()
            thread.join()
        np.testing.assert_allclose(reading.logits[-1], expected, **CLOSE)


def test_a_picture_larger_than_the_cache_is_refused(models: Models) -> None:
    with (
        tiny_seer(models, **{**FEW, "slack": 15}) as llm,
        pytest.raises(PictureError, match="must be one batch, but the limit is 15: raise slack"),
    ):
        mark_of(llm, png(1))


def test_tokens_that_attend_to_each_other_are_not_split(models: Models) -> None:
    """Even if the batches of a context are larger than the slack."""
    with closing(tiny_parent(models[0], n_ctx=WINDOW, **EXACT_ROWS)) as llm:
        settings = EvictionSettings(hh=24, recent=24, slack=16, recall=0, attention="ops")
        attach(address(llm.ctx), settings.resolve(WINDOW, WINDOW))
        llama_cpp.llama_set_causal_attn(llm.ctx, False)
        for n, is_read in ((17, False), (16, True)):
            tokens = (llama_cpp.llama_token * n)(*[7] * n)
            status = llama_cpp.llama_decode(llm.ctx, llama_cpp.llama_batch_get_one(tokens, n))
            assert (status == 0) == is_read
