"""States with an archive."""

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
N_PAGE, PADDING = RecallPart.N_PAGE, 4096  # tokens; bytes in front of a page's keys
HEAVY, RECENT, SLACK, RECALL = 20, 16, 9, 40


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_gguf(folder / "tiny.gguf", seed=4, n_layer=N_LAYER, n_ctx_train=N_POS)


def finding_llama(path: Path, *, recall: int = RECALL, **settings: Any) -> Llama:
    values = {"recent": RECENT, "slack": SLACK, "n_ctx": 200, "logits_all": True, **settings}
    return tiny_llama(path, hh=HEAVY + recall, recall=recall, **values)


@pytest.mark.parametrize("archive_type", ["f32", "q8_0"])
@pytest.mark.parametrize(
    "attention",
    [{"attention": "ops", "flash_attn": False}, {"attention": "auto"}],
    ids=["ops", "auto"],
)
@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
def test_save_load_continue_equals_continue(
    path: Path, rng: np.random.Generator, kv_type: str, attention: dict[str, Any], archive_type: str
) -> None:
    """Before and after the first compaction and re-base; nothing that was held before matters."""
    settings = {**stored_as(kv_type), **attention, "recall_type": archive_type}
    saved, loaded = (finding_llama(path, **settings) for _ in range(2))
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
    saved, loaded = finding_llama(path), finding_llama(path, **other)
    saved.eval(random_tokens(rng, 90))
    with pytest.raises(StateError):
        loaded.load_kv_state(saved.kv_state(), saved.input_ids[:90])
    assert loaded.n_tokens == loaded.kv.used == loaded.kv.archived == 0
    with pytest.raises(StateError):
        saved.load_kv_state(loaded.kv_state(), [])


def test_the_type_of_no_archive_does_not_matter(path: Path, rng: np.random.Generator) -> None:
    saved = finding_llama(path, recall=0)
    loaded = finding_llama(path, recall=0, recall_type="f16")
    saved.eval(random_tokens(rng, 60))
    loaded.load_kv_state(saved.kv_state(), saved.input_ids[:60])


def test_any_limit_loads_any_state(path: Path, rng: np.random.Generator) -> None:
    saved, loaded = finding_llama(path), finding_llama(path, recall_mib=1)
    saved.eval(random_tokens(rng, 90))
    loaded.load_kv_state(saved.kv_state(), saved.input_ids[:90].copy())
    assert_same_future(saved, loaded, random_tokens(rng, 60))


def test_a_state_behind_an_archive_that_was_closed(path: Path, rng: np.random.Generator) -> None:
    """Another archive begins with the tokens that are recent then."""
    llm = finding_llama(path)
    llm.eval(random_tokens(rng, 150))
    llm.text.cache.close_archive()
    for n_more in (0, 3, 30):
        llm.eval(random_tokens(rng, n_more))
        other = finding_llama(path)
        other.load_kv_state(llm.kv_state(), llm.input_ids[: llm.n_tokens].tolist())
        assert other.kv.archived == llm.kv.archived
    assert llm.kv.archived > 0
    assert_same_future(llm, other, random_tokens(rng, 50))


# -------------------------------------------------------------------------------------------------
# Damage
# -------------------------------------------------------------------------------------------------


def state_of(data: bytes, kv: KVStatistics) -> State:
    return State(data, kv.used, kv.bytes_archive)


def set_archive(name: str, value: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        state.recall.archive[name] = value

    return change


def set_page(i: int, name: str, value: int) -> Callable[[State], None]:
    """In a header of the pages."""

    def change(state: State) -> None:
        pages = bytearray(state.recall.pages)
        header = np.frombuffer(pages, RecallPart.PAGE, 1, i % 2 * state.recall.page_size)
        header[name][0] = value
        state.recall.pages = bytes(pages)

    return change


def move_end(n_tokens: int) -> Callable[[State], None]:
    """The last page has so many tokens more, and says so everywhere."""

    def change(state: State) -> None:
        end = int(state.recall.archive["next"][0]) + n_tokens
        set_page(-1, "count", (end - 1) % N_PAGE + 1)(state)
        set_archive("next", end)(state)

    return change


def pages_in_a_file(state: State) -> None:
    """All that a state without a file needs for these is a number."""
    end = 2**31 - N_PAGE
    for name, value in (("next", end), ("page", end // N_PAGE), ("text", 1)):
        set_archive(name, value)(state)
    state.recall.pages = b""


def tokens_behind(n: int) -> Callable[[State], None]:
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
    "with too many tokens behind it": tokens_behind(30),
    "with more tokens behind it than there is room for": tokens_behind(10**6),
}


@pytest.fixture(scope="module")
def saved(path: Path) -> tuple[Llama, bytes, list[int]]:
    """With two pages, after a re-base."""
    llm = finding_llama(path)
    tokens = random_tokens(np.random.default_rng(1), 250)
    llm.eval(tokens)
    assert llm.kv.rebases
    assert N_PAGE + 20 < llm.kv.archived < 2 * N_PAGE - 20
    return llm, llm.kv_state(), tokens


@pytest.mark.parametrize("name", CRAFTED)
def test_nonsense_with_the_right_checksum_is_refused(
    saved: tuple[Llama, bytes, list[int]], name: str
) -> None:
    """An archive ..."""
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
def test_archived_keys_that_are_no_numbers(
    path: Path, rng: np.random.Generator, value: float, n_rows: int
) -> None:
    """Forged: what comes of them is an error, or logits that are numbers; it can be saved."""
    llm = finding_llama(path, recall_type="f32")
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


def test_a_state_behind_tokens_that_no_room_was_made_for(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that was noted of them stays."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=4, n_ctx_train=N_POS, arch_variant="learned_positions"
    )
    llm, other = (finding_llama(path, policy="snap:queries=4", n_ctx=N_POS) for _ in range(2))
    monkeypatch.setattr(llm.text.cache, "check_positions", lambda _: None)
    llm.eval(random_tokens(rng, N_POS - 2))
    state = llm.kv_state()
    with pytest.raises(DecodeError, match="positions"):
        llm.eval(random_tokens(rng, 3))
    assert llm.kv_state() == state
    other.load_kv_state(llm.kv_state(), llm.input_ids[: llm.n_tokens].tolist())
    assert_same_future(llm, other, random_tokens(rng, 2))


def test_a_state_behind_a_range_that_was_removed(path: Path, rng: np.random.Generator) -> None:
    """By others: before the first compaction any range of a text can go."""
    llm, other = finding_llama(path), finding_llama(path)
    tokens = random_tokens(rng, 30)
    llm.eval(tokens)
    assert llm._ctx.kv_cache_seq_rm(0, 3, 6)
    other.load_kv_state(llm.kv_state(), tokens)
    assert other.kv_state() == llm.kv_state()
    assert_same_future(llm, other, random_tokens(rng, 60))
