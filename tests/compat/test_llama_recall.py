"""`Llama` with recall: every token finds evicted rows, and what a text has looked at is known."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyh2o import Llama
from pyh2o.cache.settings import ARCHIVE_MIB, default_archive_mib
from pyh2o.core.arguments import load_model
from pyh2o.errors import SettingsError
from tiny_gguf import write_tiny_gguf
from tiny_llama import random_tokens, tiny_llama

N_VOCAB = 384
CACHE: dict[str, Any] = {"n_ctx": 256, "hh": 50, "recent": 52, "slack": 30, "recall": 32}


MODEL: dict[str, Any] = {"seed": 4, "n_ctx_train": 400}


def recalling_llama(path: Path, **settings: Any) -> Llama:
    return tiny_llama(path, **{**CACHE, **settings})


def some_answer(llm: Llama, prompt: list[int], n: int = 12) -> list[int]:
    return [token for _, token in zip(range(n), llm.generate(prompt, temp=0.0), strict=False)]


def test_heads_that_are_not_whole_blocks(tmp_path: Path, rng: np.random.Generator) -> None:
    """The usual type gives way to f16; another one that was asked for is refused."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=4, head_size=40)
    with recalling_llama(path) as llm:
        some_answer(llm, random_tokens(rng, 200))
        assert llm.kv.found_share > 0
        assert llm.kv.limits.settings.recall_type == "f16"
    with pytest.raises(SettingsError, match="--recall-type"):
        recalling_llama(path, recall_type="q4_0")


def test_heads_that_have_no_codes(tmp_path: Path, rng: np.random.Generator) -> None:
    """By default there is no archive then; one that was asked for is refused."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=4, head_size=18)
    with recalling_llama(path, recall=None, attention="ops") as llm:
        some_answer(llm, random_tokens(rng, 200))
        assert not llm.text.model.recalls
        assert llm.kv.limits.recall == llm.kv.archived == 0
    with pytest.raises(SettingsError, match="--recall 0"):
        recalling_llama(path, attention="ops")


def test_it_is_on_by_default(path: Path) -> None:
    llm = Llama(str(path), n_ctx=256, n_threads=1)
    assert llm.text.model.recalls
    assert (llm.kv.limits.rows, llm.kv.limits.recall) == (25 + 25 - 6, 6)
    settings = llm.kv.limits.settings
    assert settings.recall is None


def test_the_archive_may_take_a_quarter_of_the_free_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts of a model share it; a limit that was given stays."""
    monkeypatch.setattr("pyh2o.core.model.spare_bytes", lambda: 40 * 2**30)
    for asked, n_texts, expected in ((None, 1, 10240), (None, 4, 2560), (7, 4, 7)):
        model = load_model(str(path), n_ctx=256, n_texts=n_texts, recall_mib=asked)
        assert model.settings.recall_mib == expected
        model.close()


@pytest.mark.parametrize(
    ("free_gib", "n_texts", "mib"),
    [(40, 1, 10240), (3, 1, ARCHIVE_MIB), (16, 8, ARCHIVE_MIB), (1, 1, 512), (0, 1, 256)],
)
def test_less_memory_leaves_a_smaller_archive(free_gib: int, n_texts: int, mib: int) -> None:
    assert default_archive_mib(free_gib * 2**30, n_texts) == mib


def test_what_is_found_is_known_since_the_prompt(path: Path, rng: np.random.Generator) -> None:
    llm = recalling_llama(path)
    llm.text.read(random_tokens(rng, 200))
    first = llm.recalled()
    assert first
    for token in random_tokens(rng, 20):
        llm.eval([token])
    assert llm.kv.n_looked == 220
    both = llm.recalled()
    assert sum(span.weight for span in both) > sum(span.weight for span in first)
    llm.text.read(random_tokens(rng, 50))
    assert llm.kv.n_looked == 50
    some_answer(llm, random_tokens(rng, 40), n=5)
    assert llm.kv.n_looked == 44
    assert llm.recalled() == []  # all of it is in the cache


def test_passages_are_of_the_text(path: Path) -> None:
    llm = recalling_llama(path)
    text = "a needle that nobody found in all of this hay, which is yellow. "
    llm.text.read(llm.tokenize((text * 6).encode()))
    spans = llm.recalled()
    assert spans
    for span in spans:
        assert span.text in text * 6
        assert span.weight > 0
        tokens = llm.input_ids[span.start : span.end].tolist()
        assert span.text == llm.detokenize(tokens).decode().strip()
    for before, after in pairwise(spans):
        assert before.end <= after.start


def test_an_archive_may_be_larger_than_any_memory(path: Path, rng: np.random.Generator) -> None:
    tokens = random_tokens(rng, 200)
    archived = []
    for recall_mib in (None, 10**13, 10**20):
        llm = recalling_llama(path, recall_mib=recall_mib)
        llm.text.read(tokens)
        archived.append(llm.kv.archived)
    assert archived[0] > 0
    assert archived == archived[:1] * 3


def test_a_limit_below_a_page_is_refused(tmp_path: Path) -> None:
    """With the cause and the cure."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=30)
    cause = r"eviction cannot start: the archive's limit is less than .*: raise .*--recall-mib"
    with pytest.raises(SettingsError, match=cause):
        recalling_llama(path, recall_type="f32", recall_mib=1)
