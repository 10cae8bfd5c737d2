"""A model's archive in a file: what is in memory on its way, and pages that get damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from full_disk import full_disk
from pyh2o import Llama
from pyh2o.cache.kv_cache import KVCache
from pyh2o.errors import NativeError
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

N_VOCAB, N_POS = 384, 4000
N_PAGE, HEADER = 128, 4096  # tokens; bytes
PIECE = 16 * N_PAGE  # tokens that are in memory at most, on their way to the file
RECALL = 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_gguf(folder / "tiny.gguf", seed=4, n_layer=2, n_ctx_train=N_POS)


def opened(path: Path, archive: Path | None, **settings: Any) -> Llama:
    values = {"hh": 40, "recent": 40, "slack": 30, "n_ctx": 400, "recall": RECALL}
    return tiny_llama(path, recall_archive=archive, **{**values, **settings})


def random_tokens(n: int, seed: int = 1) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, N_VOCAB, n).tolist()
    return tokens


def trouble_of(llm: Llama, n_tokens: int) -> str:
    trouble = llm.archive_trouble
    assert f"{n_tokens} tokens before position {n_tokens} cannot be found any more" in trouble
    assert "\n" not in trouble
    return trouble


def damage(archive: Path, page_bytes: int, page: int, at: int = HEADER) -> None:
    """In place, as nobody expects of a file that is open."""
    with archive.open("r+b") as file:
        file.seek(HEADER + page * page_bytes + at)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))


# -------------------------------------------------------------------------------------------------
# On the way to the file
# -------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_read_exactly_goes_to_the_file_piece_by_piece(
    path: Path, tmp_path: Path
) -> None:
    tokens = random_tokens(3000)
    memory = opened(path, None, prefill="exact")
    memory.eval(tokens)
    filed = opened(path, tmp_path / "filed", prefill="exact")
    filed.eval(tokens)
    assert memory.kv.archived == filed.kv.archived > 2900
    n_pages = filed.kv.archived // N_PAGE
    memory._cache._kv.open_archive(tmp_path / "moved", bytes(16))
    filed.close()
    memory.close()
    whole = (tmp_path / "filed").read_bytes()
    assert (tmp_path / "moved").read_bytes() == whole

    # whoever cannot write them does not collect them
    page_bytes = (len(whole) - HEADER) // n_pages
    stopped = opened(path, tmp_path / "stopped", prefill="exact")
    with full_disk(HEADER + 3 * page_bytes):
        stopped.eval(tokens)
    assert "nothing is archived any more" in stopped.archive_trouble
    assert 3 * N_PAGE <= stopped.kv.archived <= 3 * N_PAGE + PIECE


# -------------------------------------------------------------------------------------------------
# Rows that are computed again
# -------------------------------------------------------------------------------------------------


def saved(
    path: Path, archive: Path, tokens: list[int], **settings: Any
) -> tuple[bytes, bytes, int]:
    """The state of a text, its archive's file, and bytes of a page."""
    llm = opened(path, archive, **settings)
    llm.eval(tokens)
    state, archived = llm.kv_state(), llm.kv.archived
    llm.close()
    whole = archive.read_bytes()
    return state, whole, (len(whole) - HEADER) // (archived // N_PAGE)


@pytest.mark.parametrize("settings", [{}, {"prefill": "exact"}, {"n_ctx": 300}], ids=str)
def test_rows_that_are_computed_again_are_the_same(
    path: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """What is there again is found by what is read behind it, as it was the first time."""
    archive, tokens = tmp_path / "rows", random_tokens(1300)
    state, whole, page_bytes = saved(path, archive, tokens, **settings)
    for page, at in ((0, HEADER), (2, 20), (6, page_bytes - HEADER)):
        damage(archive, page_bytes, page, at)
    llm = opened(path, archive, **settings)
    llm.load_kv_state(state, tokens)
    assert llm.archive_lost == 7 * N_PAGE
    trouble_of(llm, 7 * N_PAGE)
    before = llm.kv
    progress: list[tuple[int, int]] = []
    llm.prompt_progress = lambda *numbers: progress.append(numbers)
    llm.restore_archive()
    assert archive.read_bytes() == whole
    assert llm.archive_trouble == ""
    assert llm.archive_lost == 0
    assert llm.kv.archived == before.archived + 7 * N_PAGE
    assert (llm.n_tokens, llm.kv.used, llm.kv.compactions) == (
        1300,
        before.used,
        before.compactions,
    )
    # no more is read than it takes
    n_read, n_all = progress[-1]
    assert 7 * N_PAGE < n_read == n_all < 7 * N_PAGE + 200
    llm.restore_archive()
    assert len(progress) == progress.index((n_read, n_all)) + 1


@pytest.mark.parametrize("after", [1, 500])
def test_interrupted_it_is_as_before(path: Path, tmp_path: Path, after: int) -> None:
    archive, tokens = tmp_path / "rows", random_tokens(1300)
    state, _, page_bytes = saved(path, archive, tokens)
    damage(archive, page_bytes, 6)
    damaged = archive.read_bytes()
    llm = opened(path, archive)
    llm.load_kv_state(state, tokens)
    rows = llm.kv_rows(1)

    def interrupt(done: int, _total: int) -> None:
        if done >= after:
            raise KeyboardInterrupt

    llm.prompt_progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.restore_archive()
    assert archive.read_bytes() == damaged
    assert (llm.n_tokens, llm.archive_lost) == (1300, 7 * N_PAGE)
    trouble_of(llm, 7 * N_PAGE)
    for mine, other in zip(llm.kv_rows(1), rows, strict=True):
        np.testing.assert_array_equal(mine, other)
    # what is lost belongs to what is saved
    again = llm.kv_state()
    llm.close()
    llm = opened(path, archive)
    llm.load_kv_state(again, tokens)
    assert llm.archive_lost == 7 * N_PAGE
    llm.restore_archive()
    assert llm.archive_trouble == ""


KILLED = """
import os, signal, sys
sys.path[:0] = {folders!r}
from pathlib import Path
from test_archive_in_files import opened, random_tokens

llm = opened(Path(sys.argv[1]), Path(sys.argv[2]))
llm.load_kv_state(Path(sys.argv[3]).read_bytes(), random_tokens(1300))
def kill(done, total):
    if done >= 700:
        os.kill(os.getpid(), signal.SIGKILL)
llm.prompt_progress = kill
llm.restore_archive()
"""


def test_a_program_that_is_killed_meanwhile_leaves_no_more_damage(
    path: Path, tmp_path: Path
) -> None:
    archive, tokens = tmp_path / "rows", random_tokens(1300)
    state, whole, page_bytes = saved(path, archive, tokens)
    (tmp_path / "state").write_bytes(state)
    for page in (1, 6):
        damage(archive, page_bytes, page)
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]
    files = [str(path), str(archive), str(tmp_path / "state")]
    command = [sys.executable, "-c", KILLED.format(folders=folders), *files]
    ended = subprocess.run(command, cwd=tmp_path, check=False)
    assert ended.returncode == -signal.SIGKILL
    llm = opened(path, archive)
    llm.load_kv_state(state, tokens)
    assert llm.archive_lost == 7 * N_PAGE
    llm.restore_archive()
    assert llm.archive_trouble == ""
    assert archive.read_bytes() == whole


def test_without_an_archive_nothing_is_lost(path: Path) -> None:
    for settings in ({"recall": 0}, {}):
        llm = opened(path, None, **settings)
        llm.eval(random_tokens(500))
        assert llm.archive_lost == 0
        llm.restore_archive()
        assert llm.n_tokens == 500


def test_a_model_that_was_not_loaded_leaves_the_file_to_others(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while somebody still has the error."""
    archive = tmp_path / "archive"

    def fail(self: KVCache) -> int:
        raise NativeError(-19, "out of memory for the scores")

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "few_tokens", fail)
        with pytest.raises(NativeError) as kept:
            opened(path, archive)
    opened(path, archive).close()
    assert kept.tb is not None
