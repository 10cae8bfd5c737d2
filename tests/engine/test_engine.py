"""Many texts at once: each gets what it gets alone."""

from __future__ import annotations

import platform
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from llama_cpp import LogitsProcessorList

from many_texts import at_once, llama_in, random_pieces, read_by_pieces, tiny_engine
from own_memory import own_bytes
from pyh2o import Llama
from pyh2o.core.batcher import Pace
from pyh2o.engine import Engine
from pyh2o.errors import ClosedError, SettingsError
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, tiny_llama

N_PLACES = 4
N_VOCAB = 384
BUDGET = {"hh": 24, "recent": 16, "slack": 12, "n_ctx": 256}
# Of one kind of memory each.
VARIANTS = {"llama": 2, "sliding_window": 4, "qwen35": 4, "mla": 3, "falcon-h1": 3}


MODEL: dict[str, Any] = {"seed": 11}


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with tiny_engine(path, texts=N_PLACES, **BUDGET) as engine:
        yield engine


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell it")
def test_a_place_takes_no_memory_for_logits_of_whole_batches(tmp_path: Path) -> None:
    n_vocab = 18_000
    model = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_vocab=n_vocab, n_layer=1)
    budget = {**BUDGET, "slack": 200}
    with tiny_engine(model, texts=1, **budget):
        before = own_bytes()
        with tiny_engine(model, texts=9, **budget) as engine:
            logits_of_a_batch = engine.model.n_batch * n_vocab * 4
            assert own_bytes() - before < 8 * logits_of_a_batch / 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_text_among_others_is_what_it_is_alone(
    variant: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """To the rounding of batches of other sizes; texts come and go at any step."""
    model = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=3, arch_variant=variant, n_layer=VARIANTS[variant]
    )
    settings = {**BUDGET, **EXACT_ROWS, "attention": "ops", "logits_all": True}
    with tiny_llama(model, **settings) as alone:
        n_vocab = alone.n_vocab()
        texts = [random_pieces(rng, n_vocab, int(rng.integers(30, 150))) for _ in range(9)]
        expected = []
        for pieces in texts:
            alone.reset()
            expected.append(read_by_pieces(alone, pieces))
        assert alone.kv.compactions > 0 or len(texts[-1]) < 60

    with tiny_engine(model, texts=N_PLACES, reading=10, **settings) as engine:

        def read(pieces: list[list[int]]) -> np.ndarray:
            with llama_in(engine) as llm:
                llm.reset()
                return read_by_pieces(llm, pieces)

        logits = at_once([lambda pieces=pieces: read(pieces) for pieces in texts])
        assert engine.batches.texts > 1.5 * engine.batches.batches
    for mine, theirs in zip(logits, expected, strict=True):
        close = np.abs(mine - theirs).max(axis=1) < 1e-3
        assert close.mean() > 0.9  # another choice at a near tie may change what follows


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ggml's products of other processors")
@pytest.mark.parametrize(
    ("weights", "n_head_kv", "slack", "recall"),
    [
        ("Q4_0", 2, 12, 0),
        ("Q4_1", 2, 18, 8),
        ("Q4_1", 1, 64, 8),
        ("Q4_1", 2, 120, 20),
        ("Q8_0", 4, 64, 0),
    ],
)
def test_not_a_bit_depends_on_the_others(
    weights: str,
    n_head_kv: int,
    slack: int,
    recall: int,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With our kernels, rows in f16, and weights that ggml multiplies token by token."""
    monkeypatch.setattr(Pace, "chunk", lambda pace, n_written: 1)  # as short as may be
    dtype = GGMLQuantizationType[weights]
    model = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=3, dtype=dtype, n_head_kv=n_head_kv, n_layer=16
    )

    def read_and_write(llm: Llama, prompt: list[int]) -> np.ndarray:
        llm.reset()
        llm.eval(prompt)
        logits = [llm.scores[llm.n_tokens - 1].copy()]
        for _ in range(30):
            llm.eval([int(logits[-1].argmax())])
            logits.append(llm.scores[llm.n_tokens - 1].copy())
        return np.array(logits)

    settings = {**BUDGET, "slack": slack, "recall": recall, "logits_all": True}
    with tiny_llama(model, **settings) as alone:
        n_vocab = alone.n_vocab()
        lengths = [1, 2, 17, 33, *rng.integers(1, 150, 8).tolist()]
        prompts = [rng.integers(3, n_vocab, n).tolist() for n in lengths]
        expected = [read_and_write(alone, prompt) for prompt in prompts]

    with tiny_engine(model, texts=N_PLACES, **settings) as engine:

        def read(prompt: list[int]) -> np.ndarray:
            with llama_in(engine) as llm:
                return read_and_write(llm, prompt)

        logits = at_once([lambda prompt=prompt: read(prompt) for prompt in prompts])
        assert engine.batches.texts > 1.5 * engine.batches.batches
    for mine, theirs, prompt in zip(logits, expected, prompts, strict=True):
        np.testing.assert_array_equal(mine, theirs, err_msg=f"{len(prompt)} tokens")


def test_who_is_more_important_gets_a_place_first(path: Path) -> None:
    order: list[int] = []
    with tiny_engine(path, texts=1, **BUDGET) as engine:

        def wait(priority: int) -> None:
            with llama_in(engine, priority=priority):
                order.append(priority)

        with llama_in(engine):
            threads = [threading.Thread(target=wait, args=(p,)) for p in (0, 2, 1)]
            for n, thread in enumerate(threads, 1):
                thread.start()
                while engine.n_waiting < n:
                    time.sleep(0.001)
        for thread in threads:
            thread.join()
    assert order == [2, 1, 0]


def test_a_wait_ends_when_nobody_wants_the_text(path: Path) -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise TimeoutError("the client has left")

    with tiny_engine(path, texts=1, **BUDGET) as engine:
        with llama_in(engine):
            with pytest.raises(TimeoutError, match="has left"), llama_in(engine, check=look):
                pass
            assert (engine.n_running, engine.n_waiting) == (1, 0)
        looks = 2
        with pytest.raises(TimeoutError), llama_in(engine, check=look):
            pass
        assert engine.n_running == 0  # nor does it take a place that is free


def test_a_text_that_takes_long_to_choose_a_token_holds_up_no_other(engine: Engine) -> None:
    """As a grammar or a processor of one's own may."""
    chooses, goes_on = threading.Event(), threading.Event()
    in_time = []

    def waits(_tokens: Any, logits: Any) -> Any:
        chooses.set()
        in_time.append(goes_on.wait(10))
        return logits

    def slow() -> None:
        with llama_in(engine) as llm:
            processors = LogitsProcessorList([waits])
            llm.create_completion("slow", max_tokens=2, logits_processor=processors)

    def other() -> None:
        assert chooses.wait(20)
        with llama_in(engine) as llm:
            llm.create_completion("other", max_tokens=20)
        assert engine.report()
        goes_on.set()

    at_once([slow, other])
    assert all(in_time)


def test_one_that_fails_does_not_stop_the_others(engine: Engine, rng: np.random.Generator) -> None:
    """llama.cpp refuses a batch with a token that there is not, as a whole."""
    texts = [rng.integers(3, N_VOCAB, 1).tolist() for _ in range(60)]

    def fail() -> None:
        with llama_in(engine) as llm:
            llm.reset()
            for _ in range(20):
                with pytest.raises(RuntimeError, match="llama_decode returned"):
                    llm.eval([N_VOCAB + 7])

    def resume() -> int:
        with llama_in(engine) as llm:
            llm.reset()
            for piece in texts:
                llm.eval(piece)
            return llm.n_tokens

    assert at_once([resume, fail, resume]) == [60, None, 60]


class Sleeper:
    """A clock of a machine that sleeps for hours whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 36_000
        return self.now


def test_a_night_during_a_batch_lets_nobody_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that asks for nothing is waited for in proportion to the last batch."""
    with llama_in(engine) as idle, llama_in(engine) as other, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(time, "perf_counter", Sleeper())
        idle.eval([5])
        monkeypatch.undo()
        going_on = pool.submit(other.eval, [6])
        try:
            going_on.result(20)
        except BaseException:
            engine.close()  # or the thread would wait for hours
            raise


def test_a_night_does_not_count_as_a_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    with tiny_engine(path, texts=1, **BUDGET) as engine, ExitStack() as first:
        first.enter_context(llama_in(engine))
        monkeypatch.setattr(time, "monotonic", Sleeper())

        def look() -> None:
            looks.append(1)
            if len(looks) == 3:
                first.close()

        with llama_in(engine, wait_seconds=60, check=look):
            assert len(looks) >= 3


def test_closing_ends_what_runs(path: Path) -> None:
    engine = tiny_engine(path, texts=2, **BUDGET)
    begun = threading.Event()

    def write() -> None:
        with llama_in(engine) as llm:
            for _ in llm.generate([3, 4, 5]):
                begun.set()

    def close() -> None:
        assert begun.wait(30)
        engine.close()

    with pytest.raises(ClosedError):
        at_once([write, close])
    with pytest.raises(ClosedError), llama_in(engine):
        pass
    with pytest.raises(ClosedError):
        engine.report()
    engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"texts": 0}, "texts is 0: give a count from 1 to 256"),
        ({"prefill": "exact"}, "an engine does not support prefill='exact'"),
        ({"recall_archive": "somewhere"}, "does not support recall_archive"),
        ({"embedding": True}, "does not support embedding"),
    ],
)
def test_what_only_one_text_can_have_is_refused(
    path: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        tiny_engine(path, **settings)


def test_places_are_reported_while_their_texts_go_on(
    engine: Engine, rng: np.random.Generator
) -> None:
    """From another thread, which neither waits for a text nor makes one wait."""
    assert [(each.running, each.kv.position) for each in engine.report()] == [(False, 0)] * N_PLACES
    prompt = rng.integers(3, N_VOCAB, 60).tolist()
    with llama_in(engine, prompt) as llm:
        undisturbed = list(islice(llm.generate(prompt, temp=0.0), 39))
        llm.reset()
        tokens = llm.generate(prompt, temp=0.0)
        for n_sampled in range(1, 40):
            assert next(tokens) == undisturbed[n_sampled - 1]
            running, *others = at_once([engine.report])[0]
            assert running.running
            assert running.kv == llm.kv
            assert running.kv.position == len(prompt) + n_sampled - 1
            assert not any(each.running for each in others)
    assert not engine.report()[0].running
    assert engine.report()[0].kv.position == llm.n_tokens


def test_recalled_spans_are_reported(path: Path, rng: np.random.Generator) -> None:
    with tiny_engine(path, texts=2, **BUDGET, recall=16) as engine, llama_in(engine) as llm:
        llm.reset()
        llm.text.read(rng.integers(3, N_VOCAB, 160).tolist())
        spans = tuple((span.start, span.end) for span in llm.recalled())
        assert [place.recalled for place in engine.report()] == [spans, ()]
        assert spans
