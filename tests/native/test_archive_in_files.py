"""A model's archive in a file: rows buffered in memory, and damaged pages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from full_disk import full_disk
from pyh2o import Llama
from pyh2o.errors import NativeError
from tiny_llama import tiny_llama

N_VOCAB, N_POS = 384, 4000
N_PAGE, HEADER = 128, 4096  # tokens; bytes
PIECE = 16 * N_PAGE  # most tokens that are buffered in memory before they are written to the file
RECALL = 20
MODEL: dict[str, Any] = {"seed": 4, "n_layer": 2, "n_ctx_train": N_POS}


def opened(path: Path, archive: Path | None, **settings: Any) -> Llama:
    values = {"hh": 40, "recent": 40, "slack": 30, "n_ctx": 400, "recall": RECALL}
    return tiny_llama(path, recall_archive=archive, **{**values, **settings})


def random_tokens(n: int, seed: int = 1) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, N_VOCAB, n).tolist()
    return tokens


def error_of(llm: Llama, n_tokens: int) -> str:
    trouble = llm.text.archive_trouble
    assert f"{n_tokens} tokens before position {n_tokens} cannot be found any more" in trouble
    assert "\n" not in trouble
    return trouble


def damage(archive: Path, page_bytes: int, page: int, at: int = HEADER) -> None:
    """Damage the open file in place."""
    with archive.open("r+b") as file:
        file.seek(HEADER + page * page_bytes + at)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))


def test_an_exact_prefill_writes_the_prompt_to_the_file_in_chunks(
    path: Path, tmp_path: Path
) -> None:
    tokens = random_tokens(3000)
    settings = {"prefill": "exact", "recall_mib": 1024}  # the file records this
    memory = opened(path, None, **settings)
    memory.eval(tokens)
    filed = opened(path, tmp_path / "filed", **settings)
    filed.eval(tokens)
    assert memory.kv.archived == filed.kv.archived > 2900
    n_pages = filed.kv.archived // N_PAGE
    memory.text.cache.open_archive(tmp_path / "moved", bytes(16))
    filed.close()
    memory.close()
    whole = (tmp_path / "filed").read_bytes()
    assert (tmp_path / "moved").read_bytes() == whole

    # a cache that cannot write rows does not collect them
    page_bytes = (len(whole) - HEADER) // n_pages
    stopped = opened(path, tmp_path / "stopped", prefill="exact")
    with full_disk(HEADER + 3 * page_bytes):
        stopped.eval(tokens)
    assert "nothing is archived any more" in stopped.text.archive_trouble
    assert 3 * N_PAGE <= stopped.kv.archived <= 3 * N_PAGE + PIECE


def test_damaged_pages_are_reported_and_the_text_continues(path: Path, tmp_path: Path) -> None:
    """All rows up to the last damaged page are dropped; later rows are archived as before."""
    archive, tokens = tmp_path / "rows", random_tokens(1300)
    llm = opened(path, archive)
    llm.eval(tokens)
    state, before = llm.kv_state(), llm.kv
    llm.close()
    page_bytes = (archive.stat().st_size - HEADER) // (before.archived // N_PAGE)
    for page, at in ((0, HEADER), (2, 20), (6, page_bytes - HEADER)):
        damage(archive, page_bytes, page, at)
    llm = opened(path, archive)
    llm.load_kv_state(state, tokens)
    error_of(llm, 7 * N_PAGE)
    assert (llm.n_tokens, llm.kv.used) == (1300, before.used)
    assert llm.kv.archived == before.archived - 7 * N_PAGE
    llm.eval(random_tokens(300, seed=2))
    assert llm.kv.archived > before.archived - 7 * N_PAGE


def test_a_failed_model_load_releases_the_file(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the caller still holds the exception."""
    archive = tmp_path / "archive"

    def fail(_address: int) -> int:
        raise NativeError(-19, "out of memory for the scores")

    with monkeypatch.context() as patch:
        patch.setattr("pyh2o.core.model.few_tokens", fail)
        with pytest.raises(NativeError) as kept:
            opened(path, archive)
    opened(path, archive).close()
    assert kept.tb is not None
