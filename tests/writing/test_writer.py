"""The writer's draws: those of `Llama.generate`, and the same after a cut at any place."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt
import pytest

from pyh2o import Llama
from pyh2o.errors import BusyError
from pyh2o.writing.sampling import Sampling
from pyh2o.writing.writer import LogitsProcessor, Writer
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

SETTINGS = [
    Sampling(temperature=0.0, repeat_penalty=1.0),
    Sampling(temperature=0.0, repeat_penalty=1.3, frequency_penalty=0.2),
    Sampling(seed=5),
    Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=2**32 - 2),
    Sampling(temperature=1.2, typical_p=0.7, presence_penalty=0.5, repeat_penalty=1.0, seed=1),
    Sampling(top_k=1, seed=9),  # a single candidate takes a random number, too
    Sampling(temperature=0.0, repeat_penalty=1.0, dry_multiplier=2.0, dry_penalty_last_n=50),
    # now and then one token is left to XTC
    Sampling(temperature=0.7, min_p=0.8, seed=4, xtc_probability=0.5, xtc_threshold=0.02),
]
N_WRITTEN = 200


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=17)
    return tiny_llama(path, n_ctx=1024, hh=20, recent=20, slack=8)


def start(llm: Llama) -> list[int]:
    """Empty the cache; the tokens of a prompt."""
    llm.reset()
    return llm.tokenize(b"Once upon a time")


def endless(llm: Llama) -> LogitsProcessor:
    """A random model may end its text at any token; this forbids it."""
    end = llm.token_eos()

    def forbid_end(
        _input_ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        logits[end] = -np.inf
        return logits

    return forbid_end


def new_writer(llm: Llama, sampling: Sampling, after: Sequence[int] = ()) -> Writer:
    return Writer(llm, sampling, written=after, logits_processor=endless(llm))


def written(llm: Llama, sampling: Sampling, count: int = N_WRITTEN) -> list[int]:
    return list(islice(new_writer(llm, sampling).write(start(llm)), count))


@pytest.mark.parametrize("sampling", SETTINGS)
def test_going_on_after_cuts_is_the_same_as_never_stopping(
    llm: Llama, sampling: Sampling, rng: np.random.Generator
) -> None:
    whole = written(llm, sampling)
    cuts = [0, *sorted(rng.choice(np.arange(1, N_WRITTEN), 5, replace=False)), N_WRITTEN]
    tokens: list[int] = []
    unread = start(llm)
    for begin, end in pairwise(cuts):
        # A new writer each time, as in a new process; the last token is still to be evaluated.
        writer = new_writer(llm, sampling, tokens)
        tokens += islice(writer.write(unread), int(end - begin))
        unread = tokens[-1:]
    assert tokens == whole


def test_seeds_and_settings_matter(llm: Llama) -> None:
    assert len({tuple(written(llm, sampling, 60)) for sampling in SETTINGS}) == len(SETTINGS)
    assert written(llm, Sampling(seed=3)) != written(llm, Sampling(seed=4))


def test_a_token_is_evaluated_when_the_next_is_asked_for(llm: Llama) -> None:
    prompt = start(llm)
    tokens = new_writer(llm, Sampling()).write(prompt)
    for count in range(20):
        token = next(tokens)
        assert llm.n_tokens == len(prompt) + count
    next(tokens)
    assert llm.input_ids[llm.n_tokens - 1] == token


def refused_to_another_thread(llm: Llama) -> bool:
    """Whether another thread may not evaluate anything now."""
    refused: list[BusyError] = []

    def evaluate() -> None:
        try:
            llm.eval([40])
        except BusyError as error:
            refused.append(error)

    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join()
    return len(refused) == 1


def test_no_other_thread_comes_between_an_evaluation_and_its_draw(
    llm: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = start(llm)
    expected = written(llm, Sampling(seed=5), 3)
    moments: dict[str, list[bool]] = {"evaluated": [], "drawing": []}
    evaluate = llm.text.eval

    def evaluate_and_look(tokens: Sequence[int]) -> None:
        evaluate(tokens)
        if threading.current_thread() is threading.main_thread():
            moments["evaluated"].append(refused_to_another_thread(llm))

    def look(
        input_ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        moments["drawing"].append(refused_to_another_thread(llm))
        return endless(llm)(input_ids, logits)

    llm.reset()
    monkeypatch.setattr(llm.text, "eval", evaluate_and_look)
    writing = Writer(llm, Sampling(seed=5), logits_processor=look).write(prompt)
    assert list(islice(writing, 3)) == expected
    assert moments == {"evaluated": [True] * 3, "drawing": [True] * 3}


def test_nothing_to_evaluate_is_refused(llm: Llama) -> None:
    llm.reset()
    with pytest.raises(ValueError, match="evaluate a token first"):
        next(Writer(llm, Sampling()).write([]))
