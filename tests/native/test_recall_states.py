"""States with an archive, a question and recalled rows."""

from __future__ import annotations

import pickle
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyh2o import Llama
from pyh2o.cache.statistics import KVStatistics
from pyh2o.errors import DecodeError, NativeError, StateError
from state_parts import HEAD_SIZE, N_LAYER, RecallPart, State
from tiny_gguf import write_tiny_gguf
from tiny_llama import stored_as, told_to_recall

N_VOCAB, N_POS = 384, 160
PADDING = 4096  # bytes in front of a page's keys
HEAVY, RECENT, SLACK, RECALL = 20, 16, 9, 60


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_gguf(folder / "tiny.gguf", seed=4, n_layer=N_LAYER, n_ctx_train=N_POS)


def recalling_llama(path: Path, **settings: Any) -> Llama:
    values: dict[str, Any] = {
        "hh": HEAVY,
        "recent": RECENT,
        "slack": SLACK,
        "recall": RECALL,
        "n_ctx": 200,
        "logits_all": True,
    }
    return told_to_recall(path, **{**values, **settings})


def random_tokens(rng: np.random.Generator, n: int) -> list[int]:
    tokens: list[int] = rng.integers(0, N_VOCAB, n).tolist()
    return tokens


def recall(llm: Llama, n_rows: int = RECALL) -> int:
    return llm._cache._kv.recall(n_rows)


def load(llm: Llama, state: bytes, tokens: Any) -> None:
    llm.load_kv_state(state, tokens)
    llm._holds_recalled = True


def assert_same_future(one: Llama, other: Llama, tokens: list[int]) -> None:
    """Bit for bit, with another recall halfway."""
    for i in range(0, len(tokens), 5):
        chunk = tokens[i : i + 5]
        for llm in (one, other):
            llm.eval(chunk)
            if i == len(tokens) // 2 // 5 * 5:
                recall(llm)
        last = slice(one.n_tokens - len(chunk), one.n_tokens)
        np.testing.assert_array_equal(one.scores[last], other.scores[last])
        assert one.recalled() == other.recalled()
    for name in ("used", "compactions", "rebases", "recalled", "archived", "unarchived", "recalls"):
        assert getattr(one.kv, name) == getattr(other.kv, name), name
    assert one.kv.hidden_mass == other.kv.hidden_mass
    assert one.kv.missed_mass == other.kv.missed_mass


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
    """Before and after the first compaction and re-base, with recalled rows in place and without.

    Nothing that the loading cache held before matters.
    """
    settings = {**stored_as(kv_type), **attention, "recall_type": archive_type}
    saved = recalling_llama(path, **settings)
    loaded = recalling_llama(path, **settings)
    for n_more, n_rows in ((7, 5), (30, -1), (40, RECALL), (61, 0), (70, 8), (100, RECALL)):
        saved.eval(random_tokens(rng, n_more))
        if n_rows >= 0:
            recall(saved, n_rows)
        assert saved.remove_tail(saved.n_tokens - int(rng.integers(0, 6)))
        state = saved.kv_state()
        loaded.eval(random_tokens(rng, 60))
        recall(loaded)
        load(loaded, state, saved.input_ids[: saved.n_tokens].copy())
        assert loaded.kv_state() == state
        assert loaded.recalled() == saved.recalled()
        assert_same_future(saved, loaded, random_tokens(rng, 25))
    assert saved.kv.rebases > 1


def test_parents_functions(path: Path, rng: np.random.Generator) -> None:
    saved, loaded = recalling_llama(path), recalling_llama(path)
    saved.eval(random_tokens(rng, 150))
    recall(saved)
    loaded.load_state(pickle.loads(pickle.dumps(saved.save_state())))
    loaded._holds_recalled = True
    assert loaded.recalled() == saved.recalled() != []
    assert_same_future(saved, loaded, random_tokens(rng, 60))


@pytest.mark.parametrize(
    "other", [{"recall": 0}, {"recall": RECALL + 1}, {"recall_type": "f16"}], ids=str
)
def test_a_state_of_another_archive_is_refused(
    path: Path, rng: np.random.Generator, other: dict[str, Any]
) -> None:
    saved = recalling_llama(path)
    saved.eval(random_tokens(rng, 90))
    recall(saved)
    loaded = recalling_llama(path, **other)
    with pytest.raises(StateError):
        loaded.load_kv_state(saved.kv_state(), saved.input_ids[:90])
    assert loaded.n_tokens == loaded.kv.used == loaded.kv.archived == 0
    with pytest.raises(StateError):
        saved.load_kv_state(loaded.kv_state(), [])


def test_the_type_of_no_archive_does_not_matter(path: Path, rng: np.random.Generator) -> None:
    saved = recalling_llama(path, recall=0)
    loaded = recalling_llama(path, recall=0, recall_type="f16")
    saved.eval(random_tokens(rng, 60))
    loaded.load_kv_state(saved.kv_state(), saved.input_ids[:60])


def test_any_limit_loads_any_state(path: Path, rng: np.random.Generator) -> None:
    saved = recalling_llama(path)
    saved.eval(random_tokens(rng, 90))
    recall(saved)
    loaded = recalling_llama(path, recall_mib=1)
    load(loaded, saved.kv_state(), saved.input_ids[:90].copy())
    assert loaded.recalled() == saved.recalled()


# -------------------------------------------------------------------------------------------------
# Damage
# -------------------------------------------------------------------------------------------------


def state_of(data: bytes, kv: KVStatistics) -> State:
    return State(data, kv.used, kv.bytes_archive)


def set_head(name: str, value: float) -> Callable[[State], None]:
    def change(state: State) -> None:
        state.recall.head[name] = value

    return change


def set_span(i: int, name: str, value: float) -> Callable[[State], None]:
    def change(state: State) -> None:
        state.recall.spans[name][i] = value

    return change


def spans_out_of_order(state: State) -> None:
    state.recall.spans[:] = state.recall.spans[::-1].copy()


def spans_one_over_the_other(state: State) -> None:
    state.recall.spans["p1"][0] = state.recall.spans["p0"][1] + 1


def rows_out_of_order(state: State) -> None:
    state.recall.pos[[0, 1]] = state.recall.pos[[1, 0]]


def row_twice(state: State) -> None:
    state.recall.pos[1] = state.recall.pos[0]


def set_row(value: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        state.recall.pos[-1] = value

    return change


def cell_twice(state: State) -> None:
    state.recall.cells[1] = state.recall.cells[0]


def cell_of_the_text(state: State) -> None:
    free = state.recall.cells.copy()
    free[0] = state.used[0]
    state.recall.cells[:] = np.sort(free)


def cell_outside(state: State) -> None:
    state.recall.cells[-1] = 10**6


def archive_ahead(state: State) -> None:
    move_end(state, 100)


def archive_behind(state: State) -> None:
    move_end(state, -1)


def move_end(state: State, n_tokens: int) -> None:
    """The last page has so many tokens more."""
    n_page = state.recall.page_size
    pages = bytearray(state.recall.pages)
    last = np.frombuffer(pages, RecallPart.PAGE, 1, len(pages) - n_page)
    room = 64 - int(last["count"][0])
    n_tokens = min(n_tokens, room)
    assert n_tokens != 0
    last["count"] = int(last["count"][0]) + n_tokens
    state.recall.archive["next"] += n_tokens
    state.recall.pages = bytes(pages)


def archive_elsewhere(state: State) -> None:
    state.recall.archive["layout"] = 1


def archive_begun_late(state: State) -> None:
    state.recall.archive["begin"] = 10**6


def shift_of(value: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        pages = bytearray(state.recall.pages)
        np.frombuffer(pages, RecallPart.PAGE, 1)["shift"][0, 5] = value
        state.recall.pages = bytes(pages)

    return change


def question_elsewhere(state: State) -> None:
    state.recall.question["pos"][0] += 1


def question_turned(state: State) -> None:
    state.recall.question["rope"][0] += 1


CRAFTED: dict[str, Callable[[State], None]] = {
    "spans out of order": spans_out_of_order,
    "spans one over the other": spans_one_over_the_other,
    "an empty span": lambda state: set_span(0, "p1", state.recall.spans["p0"][0])(state),
    "a span before the text": set_span(0, "p0", -5),
    "a span behind the archive": set_span(-1, "p1", 10**6),
    "a weight that is no number": set_span(0, "weight", np.nan),
    "rows out of order": rows_out_of_order,
    "a row twice": row_twice,
    "a row before the text": set_row(-1),
    "a row outside the spans": set_row(10**6),
    "a cell twice": cell_twice,
    "a cell of the text": cell_of_the_text,
    "a cell outside": cell_outside,
    "more rows than there may be": set_head("n_rows", RECALL + 1),
    "rows of no spans": set_head("n_spans", 0),
    "no number of spans": set_head("n_spans", 2**32 - 1),
    "no number of tokens": set_head("n_tokens", 2**32 - 1),
    "a share below 0": set_head("hidden", -0.5),
    "a share above 1": set_head("missed", 1.5),
    "a share that is no number": set_head("hidden", np.nan),
    "an archive ahead of the text": archive_ahead,
    "an archive behind the text": archive_behind,
    "an archived key turned back": shift_of(-1),
    "an archived key turned as far as numbers go": shift_of(-(2**31)),
    "an archived key turned by more than numbers go": shift_of(2**31 - 1),
    "a question elsewhere": question_elsewhere,
    "a question turned elsewhere": question_turned,
    "an archive of another model": archive_elsewhere,
    "an archive that begins behind its first": lambda s: s.recall.archive.__setitem__(
        "begin", 10**6
    ),
}


@pytest.fixture(scope="module")
def saved(path: Path) -> tuple[Llama, bytes, list[int]]:
    """With recalled rows of several spans, after a re-base."""
    llm = recalling_llama(path)
    for seed in range(100):
        llm.reset()
        llm._holds_recalled = True
        tokens = random_tokens(np.random.default_rng(seed), 250)
        llm.eval(tokens)
        recall(llm)
        if len(llm.recalled()) > 1 and llm.kv.archived % 64 > 1 and llm.kv.rebases:
            break
    return llm, llm.kv_state(), tokens


@pytest.mark.parametrize("name", CRAFTED)
def test_nonsense_with_the_right_checksum_is_refused(
    saved: tuple[Llama, bytes, list[int]], path: Path, name: str
) -> None:
    llm, data, tokens = saved
    if llm.n_tokens == 0:
        load(llm, data, tokens)
    state = state_of(data, llm.kv)
    assert state.bytes() == data
    CRAFTED[name](state)
    assert state.bytes() != data
    with pytest.raises(StateError):
        llm.load_kv_state(state.bytes(), tokens)
    assert llm.n_tokens == llm.kv.used == llm.kv.recalled == llm.kv.archived == 0


def test_a_number_of_spans_that_is_a_lie_takes_no_memory(
    saved: tuple[Llama, bytes, list[int]], path: Path
) -> None:
    """All that an archive without its file needs is a number, and as many spans were believed."""
    llm, data, tokens = saved
    if llm.n_tokens == 0:
        load(llm, data, tokens)
    state = state_of(data, llm.kv)
    n_spans = 2**25  # no more tokens than a text can have
    state.recall.archive["next"], state.recall.archive["page"] = 64 * n_spans - 64, n_spans - 1
    state.recall.archive["begin"] = state.recall.archive["first"] = 0
    state.recall.archive["text"], state.recall.pages = 1, b""
    state.recall.head["n_spans"] = n_spans
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StateError):
        llm.load_kv_state(state.bytes(), tokens)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    assert taken < RecallPart.SPAN.itemsize * n_spans // 4


def test_random_states_of_right_checksums_do_no_harm(
    saved: tuple[Llama, bytes, list[int]], rng: np.random.Generator
) -> None:
    """What is not refused goes on without a crash, over recalls and re-bases."""
    llm, data, tokens = saved
    load(llm, data, tokens)
    kv = llm.kv
    refused = 0
    for _ in range(150):
        state = state_of(data, kv)
        scramble(state, rng)
        try:
            load(llm, state.bytes(), tokens)
        except StateError:
            refused += 1
            continue
        llm.eval(random_tokens(rng, 90))
        recall(llm)
        llm.eval(random_tokens(rng, 20))
    assert 30 < refused < 150


def scramble(state: State, rng: np.random.Generator) -> None:
    arrays = [state.recall.archive.view("<i4")]
    arrays += [state.recall.pieces[name].view("<i4") for name in state.recall.pieces]
    pages = bytearray(state.recall.pages)
    n_page = state.recall.page_size
    first = n_page * int(rng.integers(len(pages) // n_page))
    header = np.frombuffer(pages, "<i4", 160, first)
    array = [*arrays, header, header][int(rng.integers(len(arrays) + 2))]
    i = int(rng.integers(array.size))
    array[i] = int(rng.choice([0, 1, array[i] ^ 1, array[(i + 1) % array.size], 100, -1]))
    state.recall.pages = bytes(pages)


def test_a_state_behind_an_archive_that_was_closed(path: Path, rng: np.random.Generator) -> None:
    """Another archive begins with the tokens that are recent then."""
    llm = recalling_llama(path)
    llm.eval(random_tokens(rng, 150))
    llm._cache._kv.close_archive()
    for n_more in (0, 3, 30):
        llm.eval(random_tokens(rng, n_more))
        other = recalling_llama(path)
        load(other, llm.kv_state(), llm.input_ids[: llm.n_tokens].tolist())
        assert other.kv.archived == llm.kv.archived
    assert llm.kv.archived > 0
    assert_same_future(llm, other, random_tokens(rng, 50))


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, 1e20])
@pytest.mark.parametrize("n_rows", [1, 64, 4 * 64])
def test_archived_keys_that_are_no_numbers(
    path: Path, rng: np.random.Generator, value: float, n_rows: int
) -> None:
    """Forged: what comes of them is an error, or logits that are numbers; it can be saved."""
    llm = recalling_llama(path, recall_type="f32")
    tokens = random_tokens(rng, 150)
    llm.eval(tokens)
    state = state_of(llm.kv_state(), llm.kv)
    pages = np.frombuffer(state.recall.pages, "<f4").copy()
    keys = pages[PADDING // 4 :][: n_rows * HEAD_SIZE]
    keys[:] = value
    state.recall.pages = pages.tobytes()
    load(llm, state.bytes(), tokens)
    with suppress(NativeError):
        recall(llm)
    saved = llm.kv_state()
    load(llm, saved, tokens)
    assert llm.kv_state() == saved
    with suppress(DecodeError):
        llm.eval(random_tokens(rng, 20))
        assert np.isfinite(llm.scores[150:170]).all()


def test_a_state_behind_tokens_that_no_room_was_made_for(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that was noted of them stays."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=4, n_ctx_train=N_POS, arch_variant="learned_positions"
    )
    llm, other = (recalling_llama(path, policy="snap:queries=4", n_ctx=N_POS) for _ in range(2))
    monkeypatch.setattr(llm._cache, "check_positions", lambda _: None)
    llm.eval(random_tokens(rng, N_POS - 2))
    state = llm.kv_state()
    with pytest.raises(DecodeError, match="positions"):
        llm.eval(random_tokens(rng, 3))
    assert llm.kv_state() == state
    load(other, llm.kv_state(), llm.input_ids[: llm.n_tokens].tolist())
    more = random_tokens(rng, 2)
    for each in (llm, other):
        recall(each)
        each.eval(more)
    np.testing.assert_array_equal(llm.scores[: llm.n_tokens][-2:], other.scores[N_POS - 2 : N_POS])


def test_a_state_behind_a_range_that_was_removed(path: Path, rng: np.random.Generator) -> None:
    """By others: before the first compaction any range of a text can go."""
    llm, other = recalling_llama(path), recalling_llama(path)
    tokens = random_tokens(rng, 30)
    llm.eval(tokens)
    assert llm._ctx.kv_cache_seq_rm(0, 3, 6)
    load(other, llm.kv_state(), tokens)
    assert other.kv_state() == llm.kv_state()
    assert_same_future(llm, other, random_tokens(rng, 60))
