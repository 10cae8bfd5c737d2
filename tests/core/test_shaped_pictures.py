"""Pictures with rows and columns (M-RoPE): results equal mtmd's, in a cache of fixed size."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from masked import MaskedLlama
from pyh2o import Llama
from pyh2o.cache.settings import EvictionSettings
from pyh2o.core.model import Model
from pyh2o.core.parameters import Parameters
from pyh2o.core.projector import is_of_picture
from pyh2o.core.text import Text
from tiny_llama import EXACT_ROWS, ONE_THREAD, assert_same_cache, stored_as
from tiny_pictures import (
    ALL,
    FEW,
    TAIL,
    WINDOW,
    eval_by_mtmd,
    first_of_picture,
    logits_after,
    logits_of_mtmd,
    mark_of,
    tiny_seer,
    tokens_of,
    write_shaped,
)
from tiny_projector import png

# Of 12 x 5, 3 x 7 and 9 x 1 embeddings.
WIDE, TALL, FLAT = png(1, 192, 80), png(2, 48, 112), png(3, 144, 16)
N_WIDE, N_TALL, N_FLAT = 60, 21, 9
CLOSE = {"rtol": 0, "atol": 2e-3}

Models = tuple[Path, Path]


@pytest.fixture(scope="module", params=["qwen2vl", "qwen3vl"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(arch: str, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_shaped(tmp_path_factory.mktemp("seer"), arch)


@pytest.mark.parametrize("evict", [True, False])
def test_a_text_is_truncated_before_and_within_a_picture(evict: bool, models: Models) -> None:
    with tiny_seer(models, evict=evict, attention="ops", **ALL, **EXACT_ROWS) as llm:
        one = tokens_of(llm, "see {} here and {} there", WIDE, FLAT)
        other = tokens_of(llm, "see {} here", TALL)
        begin = first_of_picture(one)
        expected = [logits_after(llm, tokens) for tokens in (one, other)]
        for n_kept, tokens, logits in (
            (begin, other, expected[1]),
            (begin, one, expected[0]),
            (begin + 31, one, expected[0]),  # within the first
            (len(one) - 12, one, expected[0]),  # and within the last
        ):
            llm.n_tokens = n_kept
            llm.eval(tokens[n_kept:])
            np.testing.assert_allclose(llm.text.logits[-1], logits, **CLOSE)


def test_text_after_a_part_of_a_picture_has_the_next_position(models: Models) -> None:
    """The first row of a picture has its own position; text continues after its columns."""
    with tiny_seer(models, attention="ops", **ALL, **EXACT_ROWS) as llm:
        tokens = tokens_of(llm, "see {}", WIDE)
        begin, text = first_of_picture(tokens), tokens_of(llm, "the hare runs")
        llm.eval(tokens[: begin + 12])
        llm.eval(text)
        cut = llm.text.logits[-1].copy()
        llm.reset()
        llm.eval(tokens[: begin + 30])
        llm.n_tokens = begin + 12
        llm.eval(text)
        np.testing.assert_allclose(llm.text.logits[-1], cut, **CLOSE)


def test_pictures_of_two_shapes_are_distinguished(models: Models) -> None:
    """Even if both are of one colour."""
    with tiny_seer(models, **FEW) as llm:
        wide, tall = (tokens_of(llm, "{}", png(1, *size)) for size in ((64, 32), (32, 64)))
        assert len(wide) == len(tall)
        projector = llm.text.model.projector
        assert projector is not None
        places = [projector.embeddings([t for t in o if is_of_picture(t)])[1] for o in (wide, tall)]
        assert places[0].tolist() == [[i, 4, 2] for i in range(8)]
        assert places[1].tolist() == [[i, 2, 4] for i in range(8)]


def test_dropping_rows_equals_masking_them(models: Models) -> None:
    """Invariant 5."""
    prompt, pictures = "a {} b {} c" + TAIL, [WIDE, TALL]
    with (
        tiny_seer(models, attention="ops", **{**FEW, "slack": 300}, **EXACT_ROWS) as llm,
        closing(MaskedLlama(models[0], n_ctx=WINDOW, flash_attn=False)) as full,
    ):
        tokens = tokens_of(llm, prompt, *pictures)
        llm.eval(tokens)
        assert llm.kv.compactions == 0
        last = [llm.tokenize(letter, add_bos=False)[-1] for letter in (b"x", b"y")]
        n_rest = llm.kv.capacity - llm.kv.used
        rest = (last * n_rest)[:n_rest]
        llm.eval(rest)
        llm.eval(last)
        assert llm.kv.compactions == 1
        kept = [llm.kv_rows(layer)[0] for layer in range(3)]
        _, n = eval_by_mtmd(full, models[1], prompt.replace("{}", "<__media__>"), pictures)
        low_level(full, rest, n)
        full.visible = {layer: list(rows) for layer, rows in enumerate(kept)}
        expected = low_level(full, last, n + len(rest))
        np.testing.assert_allclose(llm.text.logits[-1], expected, **CLOSE)


def low_level(llm: Llama, tokens: list[int], start: int) -> np.ndarray:
    """Decode tokens at given positions and return the last one's logits."""
    import llama_cpp

    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, i == len(tokens) - 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    llama_cpp.llama_batch_free(batch)
    found = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.ctypeslib.as_array(found, (llm.n_vocab(),)).copy()


def test_restored_rows_of_pictures_are_unchanged(models: Models) -> None:
    """If all other rows are retrieved, logits equal the full cache."""
    prompt, pictures = "a {} b {} c {}" + TAIL + "{}", [WIDE, TALL, FLAT, FLAT]
    expected, _ = logits_of_mtmd(models, prompt, pictures)
    settings = {**FEW, **EXACT_ROWS, "hh": 600, "recall": 500, "recall_type": "f32"}
    with tiny_seer(models, **settings, attention="portable") as llm:
        tokens = tokens_of(llm, prompt, *pictures)
        begin = first_of_picture(tokens)
        llm.eval(tokens[:-30])
        held = llm.kv_rows(0)[0]
        llm.pin_spans([(begin, begin + N_WIDE)])
        pinned = llm.kv_rows(0)[0]
        assert not np.array_equal(held, pinned)
        llm.eval(tokens[-30:])
        np.testing.assert_allclose(llm.text.logits[-1], expected, **CLOSE)


def test_dropped_pages_release_pictures(models: Models, tmp_path: Path) -> None:
    """An archive in memory frees their rows, one in a file does not; nothing else differs."""
    settings = {**FEW, "hh": 40, "recall": 16}
    archive = tmp_path / "archive"
    with (
        tiny_seer(models, **settings) as one,
        tiny_seer(models, recall_archive=archive, **settings) as other,
    ):
        tokens = tokens_of(one, "a {} b {} c" + 3 * TAIL + "{}" + TAIL, WIDE, TALL, FLAT)
        assert len(tokens) > 450
        mark_of(other, WIDE), mark_of(other, TALL), mark_of(other, FLAT)
        for llm in (one, other):
            llm.eval(tokens[:420])
            llm.text.drop_spans([(20, 400)])
        assert one.kv.bytes_archive < 0.6 * other.kv.bytes_archive
        for llm in (one, other):
            llm.eval([*tokens[420:], *range(30, 90)])
        assert_same_cache(one, other)
        np.testing.assert_array_equal(one.text.logits, other.text.logits)


@pytest.mark.parametrize("recall", [0, 16, None])
def test_a_saved_text_resumes(recall: int | None, models: Models) -> None:
    """Also in a full cache."""
    settings: dict[str, Any] = {"n_ctx": WINDOW, "evict": False}
    if recall is not None:
        settings = {**FEW, "recall": recall, "hh": FEW["hh"] + recall}
    with tiny_seer(models, **settings) as one, tiny_seer(models, **settings) as other:
        tokens = tokens_of(one, "see {} here {}" + TAIL, WIDE, TALL)
        for n in (first_of_picture(tokens) + 20, len(tokens)):
            one.reset()
            one.eval(tokens[:n])
            other.load_kv_state(one.kv_state(), tokens[:n])
            mark_of(other, WIDE), mark_of(other, TALL)
            for llm in (one, other):
                llm.eval([*tokens[n:], 7, 8])
            assert_same_cache(one, other)
            np.testing.assert_array_equal(one.text.logits, other.text.logits)


def test_an_exact_prefill_keeps_positions_of_pictures(models: Models) -> None:
    """In the larger cache and in the cache after it."""
    prompt, pictures = "a {} b {} c" + TAIL, [WIDE, TALL]
    expected, _ = logits_of_mtmd(models, prompt, pictures)
    settings = {**FEW, **EXACT_ROWS, "prefill": "exact"}
    with tiny_seer(models, **settings) as one, tiny_seer(models, **settings) as other:
        tokens = tokens_of(one, prompt, *pictures)
        np.testing.assert_allclose(logits_after(one, tokens), expected, **CLOSE)
        other.load_kv_state(one.kv_state(), tokens)
        for llm in (one, other):
            llm.eval([7])
        np.testing.assert_array_equal(one.text.logits, other.text.logits)


@pytest.mark.parametrize("evict", [True, False])
def test_each_text_has_its_own_pictures(evict: bool, models: Models) -> None:
    prompts = [("a {} b" + TAIL, WIDE), ("{} c" + TAIL, TALL)]
    with tiny_seer(models, attention="ops", **ALL, **EXACT_ROWS) as llm:
        texts = [tokens_of(llm, prompt, picture) for prompt, picture in prompts]
        expected = [logits_after(llm, tokens) for tokens in texts]
    settings = EvictionSettings(hh=512, recent=512, policy="h2o", recall=0, attention="ops")
    parameters = Parameters(**ONE_THREAD, **EXACT_ROWS)
    path, projector = map(str, models)
    model = Model(
        path,
        settings,
        evict=evict,
        n_ctx=WINDOW,
        n_texts=2,
        parameters=parameters,
        mmproj=projector,
    )
    with closing(model):
        assert model.projector is not None
        for picture in (WIDE, TALL):
            model.projector.mark(picture)
        both = [Text(model, seq_id) for seq_id in range(2)]
        for n in range(0, max(map(len, texts)), 40):
            for text, tokens in zip(both, texts, strict=True):
                if tokens[n : n + 40]:
                    text.eval(tokens[n : n + 40])
        for text, logits in zip(both, expected, strict=True):
            np.testing.assert_allclose(text.logits[-1], logits, **CLOSE)


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
@pytest.mark.parametrize("recall", [0, 512])
def test_a_rebase_keeps_pictures_unchanged(
    kv_type: str, recall: int, arch: str, tmp_path: Path
) -> None:
    """Attention depends on distances only, so moving all rows together changes nothing."""
    logits = []
    for n_pos in (256, 4096):
        each = write_shaped(tmp_path, arch, n_ctx_train=n_pos)
        rows = {"hh": 100 + recall, "recent": 100, "slack": 40, "recall": recall}
        with tiny_seer(
            each, attention="portable", n_ctx=WINDOW, **rows, **stored_as(kv_type)
        ) as llm:
            filler = tokens_of(llm, "x" * 220)
            llm.eval(filler)
            llm.text.drop_spans([(0, len(filler) - 1)])
            llm.eval(tokens_of(llm, "see {} here {}" + TAIL, WIDE, TALL))
            logits.append(llm.text.logits[-1].copy())
            assert (llm.kv.rebases > 0) == (n_pos == 256)
    atol = {"f32": 2e-3, "q8_0": 0.15}[kv_type]
    np.testing.assert_allclose(*logits, rtol=0, atol=atol)


def test_a_text_of_many_pictures_continues(arch: str, tmp_path: Path) -> None:
    """Its rows are packed in text order; a state with other rows is refused."""
    models = write_shaped(tmp_path, arch, n_ctx_train=128)
    settings = {**FEW, "recall": 16, "hh": FEW["hh"] + 16}
    with tiny_seer(models, **settings) as one, tiny_seer(models, **settings) as other:
        for number in range(12):
            size = (16 * (8 - number % 7), 16 * (8 - 5 * number % 7))
            one.eval(tokens_of(one, f"{number}: {{}}, " + number % 2 * TAIL, png(number, *size)))
            tokens = one.text.record[: one.n_tokens].tolist()
            other.load_kv_state(one.kv_state(), tokens)
            other.eval([7, 8])
        assert one.kv.rebases > 3
        one.eval([7, 8])
        assert_same_cache(one, other)
        np.testing.assert_array_equal(one.text.logits, other.text.logits)
