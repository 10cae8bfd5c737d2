"""`Llama` with recall: prompts and questions that bring evicted rows back."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyh2o import Llama
from pyh2o.errors import NativeError, SettingsError
from pyh2o.llama.recall import TAIL
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

N_VOCAB = 384
CACHE: dict[str, Any] = {"n_ctx": 256, "hh": 30, "recent": 40, "slack": 30, "recall": 32}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_gguf(folder / "tiny.gguf", seed=4, n_ctx_train=400)


def recalling_llama(path: Path, **settings: Any) -> Llama:
    return tiny_llama(path, **{**CACHE, **settings})


def random_tokens(rng: np.random.Generator, n: int) -> list[int]:
    tokens: list[int] = rng.integers(3, N_VOCAB, n).tolist()
    return tokens


def next_logits(llm: Llama) -> np.ndarray:
    return np.array(llm._ctx.get_logits_ith(-1)[: llm.n_vocab()])


def some_answer(llm: Llama, prompt: list[int], n: int = 12) -> list[int]:
    return [token for _, token in zip(range(n), llm.generate(prompt, temp=0.0), strict=False)]


def test_heads_that_are_not_whole_blocks(tmp_path: Path, rng: np.random.Generator) -> None:
    """The usual type gives way to f16; another one that was asked for is refused."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=4, head_size=40)
    with recalling_llama(path) as llm:
        some_answer(llm, random_tokens(rng, 200))
        assert llm.kv.recalled == 32
        assert llm.settings.recall_type == llm.kv.limits.settings.recall_type == "f16"
    with pytest.raises(SettingsError, match="--recall-type"):
        recalling_llama(path, recall_type="q4_0")


# -------------------------------------------------------------------------------------------------
# Reading
# -------------------------------------------------------------------------------------------------


def test_the_end_of_a_prompt_is_read_twice(path: Path, rng: np.random.Generator) -> None:
    llm = recalling_llama(path)
    read: list[int] = []
    eval_part = llm.eval_part

    def watched(tokens: list[int], n_before: int, n_all: int) -> None:
        read.append(len(tokens))
        eval_part(tokens, n_before, n_all)

    llm.eval_part = watched  # type: ignore[assignment,method-assign]
    tokens = random_tokens(rng, 200)
    llm.read(tokens)
    assert read == [200 - TAIL, TAIL, TAIL]
    assert llm.input_ids[: llm.n_tokens].tolist() == tokens
    assert llm.kv.recalled == 32
    assert llm.kv.recalls == 1
    assert 0 < llm.kv.missed_mass < llm.kv.hidden_mass < 1


@pytest.mark.parametrize("n", [2, 31, 40, 90, 300])
@pytest.mark.parametrize("settings", [{}, {"prefill": "exact"}, {"recent": 1}], ids=str)
def test_progress_only_goes_on(
    path: Path, rng: np.random.Generator, n: int, settings: dict[str, Any]
) -> None:
    """Also where the end is read again."""
    llm = recalling_llama(path, **settings)
    for _ in range(2):  # in an empty cache, and in a full one
        seen: list[tuple[int, int]] = []
        llm.prompt_progress = lambda *progress, seen=seen: seen.append(progress)
        llm.read(random_tokens(rng, n))
        done = [part for part, _ in seen]
        assert {whole for _, whole in seen} == {n}
        assert all(before < after for before, after in pairwise(done)), done
        assert done[-1] == n


def test_a_prompt_is_read_without_what_was_recalled_before(
    path: Path, rng: np.random.Generator
) -> None:
    llm, alone = recalling_llama(path), recalling_llama(path)
    tokens, more = random_tokens(rng, 200), random_tokens(rng, 150)
    llm.read(tokens)
    recalls: list[int] = []
    llm.prompt_progress = lambda *_: recalls.append(llm.kv.recalled)
    llm.read(more)
    assert recalls[0] == 0
    assert recalls[-1] == 32
    alone.read(tokens)
    alone.read(more)
    np.testing.assert_array_equal(next_logits(llm), next_logits(alone))


def test_what_is_held_stays_while_an_answer_is_written(
    path: Path, rng: np.random.Generator
) -> None:
    llm = recalling_llama(path)
    llm.read(random_tokens(rng, 200))
    spans = llm.recalled()
    for token in random_tokens(rng, 150):
        llm.eval([token])
    assert llm.recalled() == spans
    assert llm.kv.recalls == 1
    llm.read(random_tokens(rng, 1))  # only goes on
    assert llm.recalled() == spans


def test_a_text_that_goes_on_asks_anew(path: Path, rng: np.random.Generator) -> None:
    """At the same places, whether it is read at once or token by token after its prompt."""
    llm = recalling_llama(path)
    llm.read(random_tokens(rng, 200), hold=False)
    n_recalls, places = llm.kv.recalls, []
    for token in random_tokens(rng, 150):
        llm.eval([token])
        if llm.kv.recalls > n_recalls:
            n_recalls = llm.kv.recalls
            places.append(llm.n_tokens)
    assert places == [224, 256, 288, 320]


def test_a_long_text_asks_anew_less_often(path: Path, rng: np.random.Generator) -> None:
    """It asked no more at all once its archive had some 64 times as many tokens as are recent."""
    llm = recalling_llama(path, recent=20)
    n_recalls, places = 0, []
    for token in random_tokens(rng, 4400):
        llm.eval([token])
        if llm.kv.recalls > n_recalls:
            n_recalls = llm.kv.recalls
            places.append(llm.n_tokens)
    expected = [*range(32, 2048, 32), *range(2048, 4096, 64), *range(4096, 4401, 128)]
    # an archive is a little shorter than the text
    assert set(expected) <= set(places)
    assert all(n % 32 == 0 for n in places)
    assert len(places) - len(expected) < 4


def test_a_single_token_holds_or_not(path: Path, rng: np.random.Generator) -> None:
    """As after a state was loaded: an answer that is written anew keeps what its question got."""
    llm = recalling_llama(path)
    llm.read(random_tokens(rng, 200))
    state = llm.save_state()
    for hold in (True, False):
        llm.load_state(state)
        spans = llm.recalled()
        llm.read(random_tokens(rng, 1), hold=hold)
        llm.eval(random_tokens(rng, 100))
        assert (llm.recalled() == spans) == hold


# -------------------------------------------------------------------------------------------------
# Questions
# -------------------------------------------------------------------------------------------------


def test_a_question_leaves_the_text_as_it_is(path: Path, rng: np.random.Generator) -> None:
    """Nothing but the recalled rows tells of it."""
    llm, alone = recalling_llama(path, logits_all=True), recalling_llama(path, logits_all=True)
    tokens = random_tokens(rng, 110)
    progress: list[Any] = []
    llm.prompt_progress = lambda *seen: progress.append(seen)
    for each in (llm, alone):
        each.eval(tokens)
    n_seen = len(progress)
    assert llm.room_in_batch() > 12
    spans = llm.recall("what is it?")
    assert spans == llm.recalled() != []
    assert len(progress) == n_seen
    assert llm.input_ids[: llm.n_tokens].tolist() == tokens
    for layer in range(llm.n_layer):
        for mine, others in zip(llm.kv_rows(layer), alone.kv_rows(layer), strict=True):
            np.testing.assert_array_equal(mine, others)
    llm._cache.drop_recalled()
    more = random_tokens(rng, 5)
    for each in (llm, alone):
        each._holds_recalled = True
        each.eval(more)
    np.testing.assert_array_equal(llm.scores[110:115], alone.scores[110:115])


def test_spans_say_what_they_hold(path: Path, rng: np.random.Generator) -> None:
    llm = recalling_llama(path)
    text = "a needle that nobody found in all of this hay, which is yellow. "
    llm.read(llm.tokenize((text * 6).encode()))
    spans = llm.recalled()
    assert sum(span.end - span.start for span in spans) >= 32
    for span in spans:
        tokens = llm.input_ids[span.start : span.end].tolist()
        assert span.text == llm.detokenize(tokens, special=True).decode()
        assert span.weight > 0
    for before, after in pairwise(spans):
        assert before.end < after.start


def test_what_the_end_of_the_text_asks_for(path: Path, rng: np.random.Generator) -> None:
    llm = recalling_llama(path)
    assert llm.recall() == []
    llm._holds_recalled = True
    llm.eval(random_tokens(rng, 150))
    assert llm.recalled() == []
    spans = llm.recall()
    assert spans == llm.recall() != []
    llm.eval(random_tokens(rng, 100))
    assert llm.recalled() == spans


def test_a_question_that_is_too_long(path: Path, rng: np.random.Generator) -> None:
    llm = recalling_llama(path)
    llm.eval(random_tokens(rng, 150))
    before = llm.kv_state()
    with pytest.raises(SettingsError, match=r"give at most 39, or raise recent \(--recent\)"):
        llm.recall("too long a question " * 20)
    assert llm.kv_state() == before


def test_a_question_that_is_interrupted_is_taken_back(
    path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = recalling_llama(path)
    tokens = random_tokens(rng, 150)
    llm.eval(tokens)

    def interrupt(_n_asking: int) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._cache, "recall", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.recall("what is it?")
    assert llm.input_ids[: llm.n_tokens].tolist() == tokens


# -------------------------------------------------------------------------------------------------
# Without recall, or without eviction
# -------------------------------------------------------------------------------------------------


def test_without_recall_reading_is_evaluating(path: Path, rng: np.random.Generator) -> None:
    reading, evaluating = (recalling_llama(path, recall=0, logits_all=True) for _ in range(2))
    tokens = random_tokens(rng, 200)
    for part in (tokens[:150], tokens[150:]):
        reading.read(part)
        evaluating.eval(part)
    np.testing.assert_array_equal(reading.scores[:200], evaluating.scores[:200])
    kv = reading.kv
    assert (kv.recalls, kv.recalled, kv.archived, kv.bytes_archive) == (0, 0, 0, 0)
    assert reading.recalled() == []
    with pytest.raises(SettingsError, match="give recall"):
        reading.recall()


@pytest.mark.parametrize("settings", [{"evict": False}, {"embedding": True}], ids=str)
def test_recall_without_eviction_is_refused(path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="nothing is evicted that could be recalled"):
        recalling_llama(path, **settings)


def test_a_vocabulary_takes_any_settings(path: Path) -> None:
    assert recalling_llama(path, vocab_only=True).tokenize(b"text")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recall": -1}, "recall is -1: give 0 or more"),
        ({"recall": 1.5}, "recall is 1.5, more than the whole window"),
        ({"recall_type": "q5_0"}, "recall_type is 'q5_0': give one of f32, f16, q8_0, q4_0"),
        ({"recall_mib": 0}, "recall_mib is 0: give 1 or more MiB"),
    ],
)
def test_wrong_settings(path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        recalling_llama(path, **settings)


def test_an_archive_may_be_larger_than_any_memory(path: Path, rng: np.random.Generator) -> None:
    tokens = random_tokens(rng, 200)
    archived = []
    for recall_mib in (None, 10**13, 10**20):
        llm = recalling_llama(path, recall_mib=recall_mib)
        llm.read(tokens)
        archived.append(llm.kv.archived)
    assert archived[0] > 0
    assert archived == archived[:1] * 3


# -------------------------------------------------------------------------------------------------
# Copies and states
# -------------------------------------------------------------------------------------------------


def test_pickling_keeps_the_settings(path: Path, rng: np.random.Generator) -> None:
    llm = recalling_llama(path, recall_type="f16", recall_mib=3)
    copy: Llama = pickle.loads(pickle.dumps(llm))
    assert copy.settings == llm.settings
    assert copy.budget == llm.budget
    tokens = random_tokens(rng, 150)
    for each in (llm, copy):
        each.read(tokens)
    np.testing.assert_array_equal(next_logits(llm), next_logits(copy))
    copy.close()


def test_a_removed_tail_keeps_what_is_recalled(path: Path, rng: np.random.Generator) -> None:
    llm = recalling_llama(path)
    llm.read(random_tokens(rng, 200))
    spans = llm.recalled()
    assert llm.remove_tail(190)
    assert llm.recalled() == spans
    assert llm.remove_tail(0)
    assert llm.recalled() == []
    assert (llm.kv.archived, llm.kv.used) == (0, 0)


def test_nobody_asks_behind_an_end_that_was_removed(path: Path, rng: np.random.Generator) -> None:
    """It brought nothing back, without a word."""
    llm = recalling_llama(path)
    llm.eval(random_tokens(rng, 200))
    assert llm.remove_tail(200 - TAIL)
    with pytest.raises(NativeError, match="evaluate a token first"):
        llm.recall()
    assert llm.recall("what is it?") != []
    llm.eval(random_tokens(rng, 1))
    assert llm.recall() != []


@pytest.mark.parametrize("go_on", [Llama.eval, Llama.read])
def test_a_state_goes_on_as_the_text(
    path: Path, rng: np.random.Generator, go_on: Callable[[Llama, list[int]], None]
) -> None:
    saved, loaded = recalling_llama(path), recalling_llama(path)
    saved.read(random_tokens(rng, 200), hold=False)
    loaded.read(random_tokens(rng, 300))
    loaded.load_state(pickle.loads(pickle.dumps(saved.save_state())))
    assert loaded.recalled() == saved.recalled() != []
    more = random_tokens(rng, 120)
    for llm in (saved, loaded):
        go_on(llm, more)
    np.testing.assert_array_equal(next_logits(saved), next_logits(loaded))
    assert loaded.recalled() == saved.recalled()


# -------------------------------------------------------------------------------------------------
# The same answer
# -------------------------------------------------------------------------------------------------


def next_prompt(rng: np.random.Generator, before: list[int]) -> list[int]:
    """One that has some of the beginning of another, and goes on otherwise."""
    n_shared = int(rng.choice([rng.integers(0, len(before)), len(before) - 1, 0]))
    other = [(before[n_shared] - 2) % (N_VOCAB - 3) + 3]
    return before[:n_shared] + other + random_tokens(rng, int(rng.integers(0, 100)))


@pytest.mark.parametrize("settings", [{"attention": "ops", "n_batch": 1}, {}], ids=str)
def test_a_prompt_gets_the_answer_it_gets_alone(
    path: Path, rng: np.random.Generator, settings: dict[str, Any]
) -> None:
    """Whatever was asked before of the same beginning, where it goes on otherwise."""
    exact: dict[str, Any] = {"type_k": 0, "type_v": 0, "recall_type": "f32", **settings}
    used, alone = recalling_llama(path, **exact), recalling_llama(path, **exact)
    n_reused, before = 0, random_tokens(rng, 170)
    for i in range(40):
        prompt = next_prompt(rng, before)
        read: list[int] = []
        used.prompt_progress = lambda _done, n_all, read=read: read.append(n_all)
        mine = some_answer(used, prompt)
        n_reused += bool(read) and read[-1] < len(prompt) - 1
        alone.reset()
        assert mine == some_answer(alone, prompt), f"{len(prompt)} tokens"
        if i % 3 == 0:
            used.recall("something else")
        if i % 4 == 0:
            used.eval(random_tokens(rng, int(rng.integers(1, 60))))
        before = prompt[:200]
    assert n_reused > 0


def test_questions_about_one_text_do_not_read_it_again(
    path: Path, rng: np.random.Generator
) -> None:
    llm = recalling_llama(path, slack=180, n_batch=16)
    text = random_tokens(rng, 300)
    for i in range(4):
        read: list[int] = []
        llm.prompt_progress = lambda _done, n_all, read=read: read.append(n_all)
        some_answer(llm, text + random_tokens(rng, TAIL + 8))
        assert llm.kv.recalled > 0
        assert read[-1] < 300 or i == 0


def test_a_prompt_that_was_broken_off_gets_its_answer(path: Path, rng: np.random.Generator) -> None:
    """As by a client of a server that leaves, at any moment."""
    llm, alone = recalling_llama(path), recalling_llama(path)
    before, prompt = random_tokens(rng, 200), random_tokens(rng, 250)
    prompt[:100] = before[:100]
    expected = some_answer(alone, prompt)

    def leave(*_: int) -> None:
        nonlocal n_left
        n_left -= 1
        if n_left == 0:
            raise InterruptedError

    n_left = n_breaks = 0
    while n_left <= 0:
        n_breaks += 1
        llm.reset()
        some_answer(llm, before)
        n_left, llm.prompt_progress = n_breaks, leave
        with contextlib.suppress(InterruptedError):
            some_answer(llm, prompt)
        llm.prompt_progress = None
        assert some_answer(llm, prompt) == expected, f"broken off at piece {n_breaks}"
    assert n_breaks > 4
