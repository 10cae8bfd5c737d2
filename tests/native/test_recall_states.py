"""Save and load states with an archive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyh2o import Llama
from pyh2o.cache.statistics import KVStatistics
from pyh2o.errors import DecodeError, StateError
from state_parts import HEAD_SIZE, N_LAYER, RecallPart, State
from tiny_gguf import write_tiny_gguf
from tiny_llama import assert_same_future, random_tokens, stored_as, tiny_llama

N_POS = 160
N_PAGE, PADDING = RecallPart.N_PAGE, 4096  # tokens; bytes before a page's keys
HEAVY, RECENT, SLACK, RECALL = 20, 16, 9, 40


MODEL: dict[str, Any] = {"seed": 4, "n_layer": N_LAYER, "n_ctx_train": N_POS}


def recall_llama(path: Path, *, recall: int = RECALL, **settings: Any) -> Llama:
    values = {"recent": RECENT, "slack": SLACK, "n_ctx": 200, "logits_all": True, **settings}
    return tiny_llama(path, hh=HEAVY + recall, recall=recall, **values)


@pytest.mark.parametrize("archive_type", ["f32", "q8_0"])
@pytest.mark.parametrize(
    "attention",
    [{"attention": "ops", "flash_attn": False}, {"attention": "auto"}],
    ids=["ops", "auto"],
)
@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
def test_a_saved_state_continues_like_the_text(
    path: Path, rng: np.random.Generator, kv_type: str, attention: dict[str, Any], archive_type: str
) -> None:
    """Before and after the first compaction and re-base; the previous text has no effect."""
    settings = {**stored_as(kv_type), **attention, "recall_type": archive_type}
    saved, loaded = (recall_llama(path, **settings) for _ in range(2))
    for n_more in (7, 30, 40, 61, 70, 100):
        saved.eval(random_tokens(rng, n_more))
        assert saved.text.remove_tail(saved.n_tokens - int(rng.integers(0, 6)))
        state = saved.kv_state()
        loaded.eval(random_tokens(rng, 60))
        loaded.load_kv_state(state, saved.input_ids[: saved.n_tokens].copy())
        assert loaded.kv_state() == state
        assert_same_future(saved, loaded, random_tokens(rng, 25))
    assert saved.kv.rebases > 1
    assert saved.kv.found_share > 0


@pytest.mark.parametrize(
    "other", [{"recall": 0}, {"recall": RECALL + 1}, {"recall_type": "f16"}], ids=str
)
def test_a_state_of_another_archive_is_refused(
    path: Path, rng: np.random.Generator, other: dict[str, Any]
) -> None:
    saved, loaded = recall_llama(path), recall_llama(path, **other)
    saved.eval(random_tokens(rng, 90))
    with pytest.raises(StateError):
        loaded.load_kv_state(saved.kv_state(), saved.input_ids[:90])
    assert loaded.n_tokens == loaded.kv.used == loaded.kv.archived == 0
    with pytest.raises(StateError):
        saved.load_kv_state(loaded.kv_state(), [])


def test_the_archive_type_is_ignored_without_an_archive(
    path: Path, rng: np.random.Generator
) -> None:
    saved = recall_llama(path, recall=0)
    loaded = recall_llama(path, recall=0, recall_type="f16")
    saved.eval(random_tokens(rng, 60))
    loaded.load_kv_state(saved.kv_state(), saved.input_ids[:60])


def test_a_state_is_loaded_with_any_archive_limit(path: Path, rng: np.random.Generator) -> None:
    saved, loaded = recall_llama(path), recall_llama(path, recall_mib=1)
    saved.eval(random_tokens(rng, 90))
    loaded.load_kv_state(saved.kv_state(), saved.input_ids[:90].copy())
    assert_same_future(saved, loaded, random_tokens(rng, 60))


def state_of(data: bytes, kv: KVStatistics) -> State:
    return State(data, kv.used, kv.bytes_archive)


def set_archive(name: str, value: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        state.recall.archive[name] = value

    return change


def set_page(i: int, name: str, value: int) -> Callable[[State], None]:
    """In the page headers."""

    def change(state: State) -> None:
        pages = bytearray(state.recall.pages)
        header = np.frombuffer(pages, RecallPart.PAGE, 1, i % 2 * state.recall.page_size)
        header[name][0] = value
        state.recall.pages = bytes(pages)

    return change


def move_end(n_tokens: int) -> Callable[[State], None]:
    """Lengthen the last page by `n` tokens, consistently in all headers."""

    def change(state: State) -> None:
        end = int(state.recall.archive["next"][0]) + n_tokens
        set_page(-1, "count", (end - 1) % N_PAGE + 1)(state)
        set_archive("next", end)(state)

    return change


def pages_in_a_file(state: State) -> None:
    """A state without a file stores only a number for these pages."""
    end = 2**31 - N_PAGE
    for name, value in (("next", end), ("page", end // N_PAGE), ("text", 1)):
        set_archive(name, value)(state)
    state.recall.pages = b""


def tokens_after(n: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        state.recall.tokens = np.resize(state.recall.tokens, n)

    return change


def set_sum(name: str, value: float) -> Callable[[State], None]:
    def change(state: State) -> None:
        getattr(state.recall, name)[1] = value

    return change


CRAFTED: dict[str, Callable[[State], None]] = {
    "with a page less": set_archive("next", N_PAGE),
    "in a file behind the text": pages_in_a_file,
    "ahead of the text": move_end(20),
    "with a token that is recent": move_end(1),
    "behind the text": move_end(-1),
    "with a page of another version": set_page(0, "magic", 1),
    "with a page of elsewhere": set_page(1, "page", 2),
    "with a page of another text": set_page(1, "text_before", 1),
    "with a page of another archive": set_page(1, "begin", 1),
    "with a page that lacks its first": set_page(1, "first", N_PAGE + 1),
    "with a page that lacks its last": set_page(0, "count", N_PAGE - 1),
    "with a page of too many": set_page(1, "count", 2**32 - 1),
    "with other tokens": set_page(0, "token", 1),
    "whose heads gain less than nothing": set_sum("gains", -1.0),
    "whose heads gain no number": set_sum("gains", np.nan),
    "with less than no interest": set_sum("interest", -1.0),
    "with an interest that is no number": set_sum("interest", np.nan),
    "with too many tokens behind it": tokens_after(30),
    "with more tokens behind it than there is room for": tokens_after(10**6),
}


@pytest.fixture(scope="module")
def saved(path: Path) -> tuple[Llama, bytes, list[int]]:
    """Return a state with two pages, after a re-base."""
    llm = recall_llama(path)
    tokens = random_tokens(np.random.default_rng(1), 250)
    llm.eval(tokens)
    assert llm.kv.rebases
    assert N_PAGE + 20 < llm.kv.archived < 2 * N_PAGE - 20
    return llm, llm.kv_state(), tokens


@pytest.mark.parametrize("name", CRAFTED)
def test_an_invalid_state_with_a_valid_checksum_is_refused(
    saved: tuple[Llama, bytes, list[int]], name: str
) -> None:
    """Each case forges one field of the archive."""
    llm, data, tokens = saved
    llm.load_kv_state(data, tokens)
    state = state_of(data, llm.kv)
    assert state.bytes() == data
    CRAFTED[name](state)
    assert state.bytes() != data
    with pytest.raises(StateError):
        llm.load_kv_state(state.bytes(), tokens)
    assert llm.n_tokens == llm.kv.used == llm.kv.archived == 0


@pytest.mark.parametrize("value", [np.nan, 3e38])
@pytest.mark.parametrize("n_rows", [1, 4 * N_PAGE])
def test_forged_nan_keys_give_an_error_or_finite_logits(
    path: Path, rng: np.random.Generator, value: float, n_rows: int
) -> None:
    """The cache can still be saved."""
    llm = recall_llama(path, recall_type="f32")
    tokens = random_tokens(rng, 150)
    llm.eval(tokens)
    state = state_of(llm.kv_state(), llm.kv)
    pages = np.frombuffer(state.recall.pages, "<f4").copy()
    pages[PADDING // 4 :][: n_rows * HEAD_SIZE] = value
    state.recall.pages = pages.tobytes()
    llm.load_kv_state(state.bytes(), tokens)
    saved = llm.kv_state()
    llm.load_kv_state(saved, tokens)
    assert llm.kv_state() == saved
    with suppress(DecodeError):
        llm.eval(random_tokens(rng, 20))
        assert np.isfinite(llm.scores[150:170]).all()
    llm.reset()
    llm.eval(tokens)
    assert np.isfinite(llm.scores[:150]).all()


def test_a_state_without_space_for_later_tokens_is_saved(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of those tokens are dropped."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=4, n_ctx_train=N_POS, arch_variant="learned_positions"
    )
    llm, other = (recall_llama(path, policy="snap:queries=4", n_ctx=N_POS) for _ in range(2))
    monkeypatch.setattr(llm.text.cache, "check_positions", lambda _: None)
    llm.eval(random_tokens(rng, N_POS - 2))
    state = llm.kv_state()
    with pytest.raises(DecodeError, match="positions"):
        llm.eval(random_tokens(rng, 3))
    assert llm.kv_state() == state
    other.load_kv_state(llm.kv_state(), llm.input_ids[: llm.n_tokens].tolist())
    assert_same_future(llm, other, random_tokens(rng, 2))


def test_a_state_after_a_removed_range_is_saved(path: Path, rng: np.random.Generator) -> None:
    """A caller of llama.cpp can remove any range before the first compaction."""
    llm, other = recall_llama(path), recall_llama(path)
    tokens = random_tokens(rng, 30)
    llm.eval(tokens)
    assert llm._ctx.kv_cache_seq_rm(0, 3, 6)
    other.load_kv_state(llm.kv_state(), tokens)
    assert other.kv_state() == llm.kv_state()
    assert_same_future(llm, other, random_tokens(rng, 60))
