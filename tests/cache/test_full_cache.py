"""`Llama(evict=False)`: the window of the full cache, and refused arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyh2o.core import context
from pyh2o.errors import ContextLimitError, NativeError, SettingsError
from tiny_gguf import write_tiny_gguf
from tiny_llama import stored_as, tiny_llama

TRAINED = 300
"""No whole number of the blocks of cells that llama.cpp allocates."""


MODEL: dict[str, Any] = {"seed": 17}


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "learned.gguf",
        seed=17,
        n_ctx_train=TRAINED,
        arch_variant="learned_positions",
    )


def tokens(count: int) -> list[int]:
    return [5 + i % 200 for i in range(count)]


def test_the_window_is_the_requested_size(path: Path) -> None:
    """Even if llama.cpp allocates more cells: tokens in them would not be recorded."""
    with tiny_llama(path, n_ctx=300, evict=False) as llm:
        assert (llm.n_ctx(), llm.text.position_limit, llm.kv.window) == (300, 300, 300)
        assert llm.kv.capacity == 300
        llm.eval(tokens(300))
        assert llm.input_ids[:300].tolist() == tokens(300)
        for more in (1, 2):
            with pytest.raises(ContextLimitError, match=r"window of 300: .* raise n_ctx") as error:
                llm.eval(tokens(more))
            assert "\n" not in str(error.value)
        assert llm.n_tokens == 300
        with pytest.raises(NativeError, match="not attached"):
            llm.heavy_hitters()


def test_the_default_window_is_the_trained_context(learned: Path) -> None:
    with tiny_llama(learned, evict=False) as llm:
        assert llm.n_ctx() == llm.text.position_limit == TRAINED
        llm.eval(tokens(TRAINED))
        with pytest.raises(ContextLimitError):  # llama.cpp would end the process
            llm.eval(tokens(1))


def test_a_window_beyond_learned_positions_is_refused(learned: Path) -> None:
    """There are no more embeddings: llama.cpp would end the process at the first such token."""
    with pytest.raises(SettingsError, match=r"exceeds the 300 .* \(--ctx\)") as error:
        tiny_llama(learned, n_ctx=TRAINED + 1, evict=False)
    assert "\n" not in str(error.value)


def test_a_window_beyond_computed_positions_is_allowed(tmp_path: Path) -> None:
    for variant in ("llama", "alibi", "recurrent"):
        path = write_tiny_gguf(
            tmp_path / f"{variant}.gguf", seed=17, n_ctx_train=TRAINED, arch_variant=variant
        )
        with tiny_llama(path, n_ctx=512, evict=False) as llm:
            llm.eval(tokens(TRAINED + 10))
            assert llm.n_tokens == TRAINED + 10


def test_a_cache_larger_than_memory_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp used to fill memory cell by cell for minutes."""
    with pytest.raises(SettingsError, match=r"2000000000 cells .* lower n_ctx \(--ctx\)") as error:
        tiny_llama(path, n_ctx=2_000_000_000, evict=False)
    assert "\n" not in str(error.value)
    settings: dict[str, Any] = {"n_ctx": 4096, "evict": False}
    for name in ("f16", "q8_0"):
        with tiny_llama(path, **settings, **stored_as(name)) as llm:
            n_bytes = llm.kv.bytes_k + llm.kv.bytes_v
        # llama.cpp's metadata of a cell is a tenth of these tiny rows
        monkeypatch.setattr(context, "available_bytes", lambda: n_bytes)  # noqa: B023
        with pytest.raises(SettingsError, match=r"4096 cells needs at least 0\.0 GiB"):
            tiny_llama(path, **settings, **stored_as(name))
        monkeypatch.setattr(context, "available_bytes", lambda: n_bytes * 5 // 4)  # noqa: B023
        tiny_llama(path, **settings, **stored_as(name)).close()


def test_a_budget_larger_than_memory_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "available_bytes", lambda: 100_000)
    with pytest.raises(SettingsError, match=r"256 cells .* lower n_ctx \(--ctx\), hh \(--hh\) or"):
        tiny_llama(path, n_ctx=4096, hh=60, recent=60)


@pytest.mark.parametrize("variant", ["recurrent", "encoder"])
def test_models_without_kv_rows_need_no_memory_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=17, arch_variant=variant)
    monkeypatch.setattr(context, "available_bytes", lambda: 1)
    tiny_llama(path, n_ctx=512, evict=False).close()
