"""The text of a story as it comes, and all that can end it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pyh2o import Llama
from pyh2o.errors import ContextLimitError, SettingsError
from pyh2o.sessions.story import Story
from pyh2o.writing.repetition import MANY_LOOPS
from pyh2o.writing.sampling import Sampling
from stories import LOOPING, PROMPT, in_pieces, result, whole
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama


def test_text_comes_token_by_token_after_the_opening(
    llm: Llama, scripted: Callable[[bytes], None]
) -> None:
    scripted("né!".encode())
    tale = Story(llm, PROMPT, echo=True)
    assert tale.text() == ""
    assert list(tale.write(4)) == [f"{PROMPT}n", "", "é", "!"]
    assert tale.text() == f"{PROMPT}né!"
    assert (tale.written, tale.held_back, tale.finish) == (4, "", "length")


def test_a_story_ends_before_a_stop_text_and_can_go_on_behind_it(
    llm: Llama, tmp_path: Path, scripted: Callable[[bytes], None]
) -> None:
    scripted(b"So it went. THE END? No. THE END. And so on")
    path = tmp_path / "s.h2o"
    tale = Story(llm, PROMPT, until=["THE END", "THE EN"])
    assert "".join(tale.write()) == "So it went. "
    assert (tale.finish, tale.held_back) == ("until", "THE EN")

    tale.save(path)
    again = Story.load(path, llm)
    assert (again.finish, again.held_back, again.text()) == ("until", "THE EN", "So it went. ")
    assert "".join(again.write()) == "THE END? No. "
    assert again.text() == "So it went. THE END? No. "

    again.save(path)
    last = Story.load(path, llm)
    last.set_ends(until=[""])
    assert "".join(last.write(9)) == "THE END. And so"
    assert last.finish == "length"


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_stop_text_is_found_across_a_cut(
    llm: Llama, tmp_path: Path, scripted: Callable[[bytes], None], cut: int
) -> None:
    scripted(b"THE ETHE THE ENDING")
    tale = Story(llm, PROMPT, until=["THE END"])
    text = "".join(tale.write(cut))
    tale.save(tmp_path / "s.h2o")
    tale = Story.load(tmp_path / "s.h2o", llm)
    if tale.finish == "length":
        text += "".join(tale.write())
    assert (text, tale.held_back, tale.finish) == ("THE ETHE ", "THE END", "until")


def test_a_model_that_ends_its_text_may_not_do_so_again_at_once(llm: Llama, tmp_path: Path) -> None:
    ending = None
    for seed in range(100):
        tale = Story(llm, PROMPT, sampling=Sampling(seed=seed, temperature=1.5), echo=True)
        text = "".join(tale.write(30))
        if tale.finish == "stop":
            ending = seed
            break
    print(f"{ending=}")
    assert ending is not None
    assert llm.token_eos() not in tale.tokens
    assert text == tale.text()
    n_tokens = len(tale.tokens)
    tale.save(tmp_path / "s.h2o")
    loaded = Story.load(tmp_path / "s.h2o", llm)
    more = "".join(loaded.write(20))
    assert len(loaded.tokens) > n_tokens
    assert loaded.text() == text + more
    # in this process it goes on alike, and so does one that was cut right after
    expected = result(loaded, text + more)
    again = Story.load(tmp_path / "s.h2o", llm)
    text += "".join(again.write(1))
    again.save(tmp_path / "t.h2o")
    again = Story.load(tmp_path / "t.h2o", llm)
    if again.finish == "length":
        text += "".join(again.write(19))
    assert result(again, text) == expected


def test_a_model_that_may_not_end_its_text(llm: Llama, tmp_path: Path) -> None:
    settings = {"sampling": Sampling(seed=1, temperature=1.5), "loop_guard": False}
    assert whole(llm, 2000, **settings).finish == "stop"
    endless = whole(llm, 2000, **settings, ignore_eos=True)
    assert endless.finish == "length"
    assert llm.token_eos() not in endless.tokens
    assert in_pieces([llm], tmp_path / "s.h2o", [900, 1100], **settings, ignore_eos=True) == endless
    tale = Story.load(tmp_path / "s.h2o", llm)
    tale.set_ends(ignore_eos=False)
    "".join(tale.write(2000))
    assert tale.finish == "stop"


def test_positions_that_are_used_up(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=1, n_ctx_train=128, arch_variant="learned_positions"
    )
    llm = tiny_llama(path, hh=20, recent=20, slack=8)
    tale = Story(llm, PROMPT, sampling=Sampling(temperature=0, frequency_penalty=1.0))
    text = "".join(tale.write())
    assert (tale.finish, llm.n_tokens) == ("trained_context", 128)
    assert result(tale, text)
    with pytest.raises(ContextLimitError, match="exceed context window of 128"):
        next(tale.write())
    with pytest.raises(ContextLimitError):
        Story(llm, "word " * 200)


@pytest.mark.usefixtures("no_end")
def test_window_that_is_full(model: Path) -> None:
    llm = tiny_llama(model, n_ctx=256, evict=False)
    tale = Story(llm, PROMPT, sampling=Sampling(seed=1))
    assert "".join(tale.write()) == tale.text()
    assert (tale.finish, llm.n_tokens) == ("length", 256)
    assert len(tale.tokens) == 257
    with pytest.raises(ContextLimitError, match="turn eviction on"):
        next(tale.write())


@pytest.mark.usefixtures("no_end")
def test_loops_end_a_story_that_has_nothing_more_to_say(llm: Llama) -> None:
    tale = Story(llm, PROMPT, sampling=LOOPING)
    text = "".join(tale.write(20_000))
    assert tale.finish == "repetition"
    assert tale.loops >= MANY_LOOPS
    assert text == tale.text()


def test_loops_are_left_alone_if_asked_to(llm: Llama) -> None:
    guarded = whole(llm, 600, sampling=LOOPING)
    free = whole(llm, 600, sampling=LOOPING, loop_guard=False)
    assert (guarded.loops, free.loops) == (1, 0)
    assert len(set(guarded.tokens[-300:])) > len(set(free.tokens[-300:]))


def test_wrong_arguments(llm: Llama) -> None:
    with pytest.raises(SettingsError, match="max_tokens is 0"):
        next(Story(llm, PROMPT).write(0))
    with pytest.raises(ValueError, match="prompt"):
        Story(llm, [])
