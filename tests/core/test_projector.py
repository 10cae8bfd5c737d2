"""Pictures in a text: results equal mtmd's, in a cache of fixed size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gguf import TokenType

from pyh2o import Llama
from pyh2o.core import projector
from pyh2o.core.prefixes import keep_prefix, prefix_kept
from pyh2o.core.projector import is_of_picture
from pyh2o.errors import ModelError, PictureError, StateError
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, assert_same_cache, tiny_llama
from tiny_pictures import (
    ALL,
    FEW,
    TAIL,
    logits_after,
    logits_of_mtmd,
    mark_of,
    tiny_seer,
    tokens_of,
    write_models,
)
from tiny_projector import N_PATCHES, png, wav, write_tiny_projector


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_models(tmp_path_factory.mktemp("seer"))


@pytest.fixture
def seer(models: tuple[Path, Path]) -> Iterator[Llama]:
    with tiny_seer(models, **FEW) as llm:
        yield llm


def test_tiles_of_a_picture_equal_mtmds(tmp_path: Path) -> None:
    """With text tokens between them."""
    marks = dict.fromkeys(["<fake_token_around_image>", "<global-img>", "\n\n"], TokenType.CONTROL)
    models = (
        write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, marks=marks),
        write_tiny_projector(tmp_path / "tiles.gguf", kind="idefics3"),
    )
    expected, n = logits_of_mtmd(models, "see {} here", [png(1, 60)])
    with tiny_seer(models, attention="ops", **ALL, **EXACT_ROWS) as llm:
        tokens = tokens_of(llm, "see {} here", png(1, 60))
        kinds = [is_of_picture(token) for token in tokens]
        assert (n, sum(kinds)) == (len(tokens), 5 * N_PATCHES // 4)
        assert sum(a != b for a, b in pairwise(kinds)) == 10
        np.testing.assert_array_equal(logits_after(llm, tokens), expected)


def test_files_that_are_not_sound_are_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    hearing = models[0], write_tiny_projector(tmp_path / "ears.gguf", kind="ultravox")
    a_day = bytearray(wav(1))
    a_day[24:28] = (1).to_bytes(4, "little")  # samples a second
    with tiny_seer(hearing, **FEW) as llm:
        for refused in (png(1), bytes(a_day), wav(1, n_samples=1)):
            with pytest.raises(PictureError, match="give WAV, MP3 or FLAC"):
                mark_of(llm, refused)


def test_a_prefix_ends_before_a_different_picture(seer: Llama) -> None:
    one, same, other = (tokens_of(seer, "see {} here", png(number)) for number in (1, 1, 2))
    assert same == one
    seer.eval(one)
    n_before = next(n for n, token in enumerate(one) if is_of_picture(token))
    assert prefix_kept(seer.text, [*same, 5]) == len(one)
    assert keep_prefix(seer.text, other) == other[n_before:]
    assert seer.n_tokens == n_before


def test_sampled_answers_about_a_picture_are_reused(seer: Llama) -> None:
    model = seer.text.model
    prompt = tokens_of(seer, "see {} here: ", png(1))
    sampled = [seer.tokenize(letter, add_bos=False)[-1] for letter in (b"a", b"b", b"a", b"b")]
    model.sampled_texts.record(prompt, sampled)
    again = tokens_of(seer, "see {} here: abab\nmore", png(1))
    other = tokens_of(seer, "see {} here: abab\nmore", png(2))
    recorded = [*prompt, *sampled]
    assert again[: len(recorded)] != recorded
    assert model.sampled_texts.as_sampled(model, again)[: len(recorded)] == recorded
    assert model.sampled_texts.as_sampled(model, other) == other


def test_a_mark_without_a_picture_is_text(seer: Llama) -> None:
    mark = f"<picture:{'0' * 64}>".encode()
    assert not any(map(is_of_picture, seer.tokenize(mark)))
    assert seer.detokenize(seer.tokenize(mark)) == mark


def test_tokens_of_pictures_have_no_text(seer: Llama) -> None:
    tokens = tokens_of(seer, "see {} here", png(1))
    assert seer.detokenize(tokens).split() == [b"see", b"here"]


def test_a_saved_text_resumes(models: tuple[Path, Path]) -> None:
    with tiny_seer(models, **FEW) as one, tiny_seer(models, **FEW) as other:
        tokens = tokens_of(one, "see {} here" + TAIL, png(1))
        one.eval(tokens)
        other.load_kv_state(one.kv_state(), tokens)
        for llm in (one, other):
            llm.eval([7, 8])
        assert_same_cache(one, other)
        np.testing.assert_array_equal(one.text.logits, other.text.logits)


def test_an_archive_distinguishes_pictures(models: tuple[Path, Path], tmp_path: Path) -> None:
    """A state does not accept pages overwritten by another picture."""
    settings = {**FEW, "recall": 8, "recall_archive": tmp_path / "archive"}
    with tiny_seer(models, **settings) as llm:
        one, other = (tokens_of(llm, "see {}" + 3 * TAIL, png(number)) for number in (1, 2))
        assert len(one) == len(other) > 300
        troubles = []
        for between in (one, other):
            llm.reset()
            llm.eval(one)
            state = llm.kv_state()
            llm.reset()
            llm.eval(between)
            llm.load_kv_state(state, one)
            troubles.append(llm.text.archive_trouble)
    assert troubles[0] == ""
    assert troubles[1] != ""


def test_a_picture_is_encoded_once(seer: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    mark_of(seer, png(1))
    monkeypatch.setattr(projector.Projector, "_encode", None)
    mark_of(seer, png(1))
    seer.eval(tokens_of(seer, "see {} here", png(1)))


def test_evicted_embeddings_are_computed_again(
    seer: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(seer, "see {} here", png(1))
    expected = logits_after(seer, tokens)
    n_bytes = 4 * 128 * N_PATCHES  # size of a picture's embeddings
    monkeypatch.setattr(projector, "MAX_BYTES", n_bytes)
    mark_of(seer, png(2))
    assert len(seer.text.model.projector._found) == N_PATCHES
    np.testing.assert_array_equal(logits_after(seer, tokens), expected)
    monkeypatch.setattr(projector, "MAX_BYTES", 1)
    mark_of(seer, png(3))
    seer.reset()
    with pytest.raises(StateError, match="send it again"):
        seer.eval(tokens)


def test_embeddings_have_unique_ids(seer: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projector, "_COUNT", 1)
    tokens = [token for token in tokens_of(seer, "{}", png(1)) if is_of_picture(token)]
    assert len(set(tokens)) == N_PATCHES
    assert tokens == [token for token in tokens_of(seer, "{}", png(1)) if is_of_picture(token)]


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "cannot be read"), (b"no picture", "PNG"), (png(1)[:60], "cannot be read")],
)
def test_invalid_pictures_are_refused(data: bytes, says: str, seer: Llama) -> None:
    with pytest.raises(PictureError, match=says):
        mark_of(seer, data)


def test_a_picture_of_gigabytes_is_refused(seer: Llama) -> None:
    bomb = bytearray(png(1))
    bomb[16:24] = (9000).to_bytes(4, "big") * 2
    with pytest.raises(PictureError, match="cannot be read"):
        mark_of(seer, bytes(bomb))


def test_sound_needs_an_audio_projector(seer: Llama) -> None:
    with pytest.raises(PictureError, match="give JPEG, PNG"):
        mark_of(seer, wav(1))


def test_files_other_than_projectors_are_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    narrow = write_tiny_projector(tmp_path / "narrow.gguf", n_embd=64)
    cases = {
        tmp_path / "missing.gguf": "no model file",
        models[0]: "not a projector",
        narrow: "mmproj",
    }
    for path, says in cases.items():
        with pytest.raises(ModelError, match=says):
            tiny_seer((models[0], path), **FEW)


def test_a_damaged_projector_is_detected(models: tuple[Path, Path], tmp_path: Path) -> None:
    """By its embeddings, before they are cached."""
    damaged = write_tiny_projector(tmp_path / "damaged.gguf", bias=np.nan)
    tiles = write_tiny_projector(tmp_path / "tiles.gguf", kind="idefics3")  # for another vocabulary
    for path in (damaged, tiles):
        with tiny_seer((models[0], path), **FEW) as llm, pytest.raises(PictureError, match="damag"):
            mark_of(llm, png(1))


def test_a_refused_file_does_not_affect_other_pictures(
    seer: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PictureError):
        mark_of(seer, b"no picture")
    tokens = tokens_of(seer, "see {} here", png(1))
    monkeypatch.setattr(seer.text.model.projector, "_found", {})
    monkeypatch.setattr(seer.text.model.projector, "_read", OrderedDict())
    seer.eval(tokens)


def test_pictures_without_a_projector_are_refused(models: tuple[Path, Path], seer: Llama) -> None:
    tokens = tokens_of(seer, "see {} here", png(1))
    with tiny_llama(models[0], **FEW) as llm, pytest.raises(StateError, match="--mmproj"):
        llm.eval(tokens)
