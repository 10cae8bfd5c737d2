"""Stories: any cut, save and load goes on at the exact token, and nothing of the text is lost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyh2o import Llama
from pyh2o.errors import ContextLimitError, PyH2OError, SessionError, SettingsError, StateError
from pyh2o.generation.repetition import MANY_LOOPS, MANY_LOOPS_TOKENS, STRICT_TOKENS, Loop
from pyh2o.generation.sampling import Sampling
from pyh2o.sessions import story
from pyh2o.sessions.session_file import read_session, write_session
from pyh2o.sessions.story import Story
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

PROMPT = "Once upon a time"
LOOPING = Sampling(temperature=0, repeat_penalty=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf", seed=17, n_ctx_train=1 << 17
    )


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Llama]:
    yield from opened(model, n_ctx=1024, hh=20, recent=20, slack=8)


@pytest.fixture(scope="module")
def other(model: Path) -> Iterator[Llama]:
    """The same model with the same settings, as in another process."""
    yield from opened(model, n_ctx=1024, hh=20, recent=20, slack=8)


@pytest.fixture(scope="module")
def full(model: Path) -> Iterator[Llama]:
    yield from opened(model, n_ctx=512, evict=False)


def opened(model: Path, **settings: Any) -> Iterator[Llama]:
    llm = tiny_llama(model, **settings)
    yield llm
    llm.close()


@dataclasses.dataclass
class Result:
    """A story written to an end: its tokens, its text and why it ended."""

    tokens: list[int]
    text: str
    held_back: str
    finish: str | None
    loops: int


def whole(llm: Llama, count: int, **settings: Any) -> Result:
    """A story written in one go."""
    tale = Story(llm, PROMPT, **settings)
    text = "".join(tale.write(count))
    return result(tale, text)


def result(tale: Story, text: str) -> Result:
    assert tale.text() == text
    return Result(tale.tokens, text, tale.held_back, tale.finish, tale.loops)


def in_pieces(llms: Sequence[Llama], path: Path, lengths: Sequence[int], **settings: Any) -> Result:
    """The same, saved after each of the lengths and loaded in the next model."""
    tale = Story(llms[0], PROMPT, **settings)
    text = ""
    for number, length in enumerate(lengths):
        if number:
            tale = Story.load(path, llms[number % len(llms)])
        text += "".join(tale.write(length))
        tale.save(path)
    return result(tale, text)


def cuts(rng: np.random.Generator, total: int, pieces: int = 5) -> list[int]:
    """`total` cut into pieces at random."""
    ends = sorted(rng.choice(np.arange(1, total), pieces - 1, replace=False).tolist())
    return [end - begin for begin, end in pairwise([0, *ends, total])]


SETTINGS = [
    {"sampling": Sampling(seed=1)},
    {"sampling": Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=2)},
    {"sampling": Sampling(temperature=1.0, repeat_penalty=1.0, presence_penalty=0.3, seed=3)},
    {"sampling": Sampling(temperature=0, repeat_penalty=1.2), "echo": True},
    {"sampling": LOOPING, "loop_guard": False},
    {"sampling": LOOPING},
]


# -------------------------------------------------------------------------------------------------
# Cutting, saving and loading
# -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model may end its text at any token; here it does not."""
    forbid = Story._forbid

    def forbid_end_too(self: Story, input_ids: Any, logits: Any) -> Any:
        logits[self.llm.token_eos()] = -np.inf
        return forbid(self, input_ids, logits)

    monkeypatch.setattr(Story, "_forbid", forbid_end_too)


@pytest.mark.usefixtures("no_end")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("evict", [True, False])
def test_a_story_that_was_cut_is_the_same(
    llm: Llama,
    other: Llama,
    full: Llama,
    tmp_path: Path,
    rng: np.random.Generator,
    settings: dict[str, Any],
    evict: bool,
) -> None:
    llms = [llm, other] if evict else [full]
    expected = whole(llms[0], 400, **settings)
    assert len(expected.tokens) > 400
    assert expected.finish == "length"
    assert (llms[0].kv.compactions > 10) == evict
    assert in_pieces(llms, tmp_path / "s.h2o", cuts(rng, 400), **settings) == expected


@pytest.mark.usefixtures("no_end")
@pytest.mark.parametrize("positions", ["original", "dense"])
def test_a_story_beyond_the_trained_context_that_was_cut_is_the_same(
    tmp_path: Path, rng: np.random.Generator, positions: str
) -> None:
    path = write_tiny_gguf(tmp_path / "short.gguf", seed=3, n_ctx_train=200)
    llms = [tiny_llama(path, hh=20, recent=20, slack=8, positions=positions) for _ in range(2)]
    expected = whole(llms[0], 700, sampling=Sampling(seed=6))
    assert llms[0].kv.rebases > 2
    pieces = cuts(rng, 700, 8)
    assert in_pieces(llms, tmp_path / "s.h2o", pieces, sampling=Sampling(seed=6)) == expected


@pytest.mark.usefixtures("no_end")
def test_a_story_left_between_two_tokens_is_the_same(
    llm: Llama, other: Llama, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Saved while `write` waits, as a checkpoint is, and while it is closed early."""
    settings = {"sampling": Sampling(seed=5), "until": ["never", "\ufffd"]}
    expected = whole(llm, 300, **settings)
    tale = Story(llm, PROMPT, **settings)
    text = ""
    for number, length in enumerate(cuts(rng, 300)):
        writing = tale.write()
        text += "".join(next(writing) for _ in range(length))
        if number % 2:
            writing.close()
            assert tale.finish == "interrupted"
        tale.save(tmp_path / "s.h2o")
        tale = Story.load(tmp_path / "s.h2o", [other, llm][number % 2])
    tale.finish = expected.finish
    assert result(tale, text) == expected


@pytest.mark.usefixtures("no_end")
def test_writing_again_goes_on(llm: Llama, rng: np.random.Generator) -> None:
    expected = whole(llm, 300, sampling=Sampling(seed=5))
    tale = Story(llm, PROMPT, sampling=Sampling(seed=5))
    text = "".join("".join(tale.write(length)) for length in cuts(rng, 300, 20))
    assert result(tale, text) == expected


@pytest.mark.usefixtures("no_end")
def test_a_model_used_for_something_else_reads_the_story_again(full: Llama) -> None:
    sampling = Sampling(temperature=0, repeat_penalty=1.1)
    expected = whole(full, 100, sampling=sampling)
    told: list[int] = []
    tale = Story(full, PROMPT, sampling=sampling, on_recompute=told.append)
    text = "".join(tale.write(30)) + "".join(tale.write(30))
    n_prompt, n_evaluated = tale.n_read, full.n_tokens
    assert told == []
    full.create_completion("The end of the world", max_tokens=30)
    text += "".join(tale.write(40))
    assert told == [n_evaluated]
    assert tale.n_read == n_prompt + len(expected.tokens) - 40
    assert result(tale, text) == expected


def test_using_the_model_amid_a_story_is_noticed(llm: Llama) -> None:
    tale = Story(llm, PROMPT)
    writing = tale.write(20)
    text = "".join(next(writing) for _ in range(10))
    written = list(tale.tokens)
    llm.reset()
    llm.eval([1, 2, 3])
    with pytest.raises(PyH2OError, match="used for another text"):
        next(writing)
    assert tale.tokens == written
    text += "".join(tale.write(10))
    assert (tale.text(), tale.written) == (text, 20)
    assert llm.input_ids[: len(written)].tolist() == written


def test_text_of_random_bytes_is_not_lost(
    llm: Llama, tmp_path: Path, rng: np.random.Generator
) -> None:
    """A model that draws single bytes, half of them no characters, is saved at every token."""
    tale = Story(llm, PROMPT, sampling=Sampling(temperature=5.0, top_k=0, top_p=1, min_p=0, seed=4))
    text = ""
    for _ in range(200):
        text += "".join(tale.write(1))
        held = tale.held_back
        tale.save(tmp_path / "s.h2o")
        tale = Story.load(tmp_path / "s.h2o", llm)
        assert (tale.text(), tale.held_back) == (text, held)
    data = llm.detokenize(tale.tokens[tale.n_prompt :], prev_tokens=tale.tokens[: tale.n_prompt])
    assert text + held == data.decode(errors="ignore")
    assert len(text) > 100


# -------------------------------------------------------------------------------------------------
# The text and its end
# -------------------------------------------------------------------------------------------------


class ScriptedWriter:
    """Draws what the test wants."""

    script: list[int]

    def __init__(self, llm: Llama, *_: Any, written: Sequence[int], **__: Any) -> None:
        self._llm = llm
        self._at = len(written)

    def write(self, tokens: Sequence[int]) -> Generator[int, None, None]:
        self._llm.eval(tokens)
        while True:
            token = self.script[self._at]
            self._at += 1
            yield token
            self._llm.eval([token])


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, llm: Llama) -> Callable[[bytes], None]:
    """Lets stories have this text, a token for each byte."""
    byte_0 = llm.tokenize(b"\x01", add_bos=False)[-1] - 1

    def script(text: bytes) -> None:
        ScriptedWriter.script = [byte_0 + byte for byte in text]

    monkeypatch.setattr(story, "Writer", ScriptedWriter)
    return script


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
    last = Story.load(path, llm, until=[""])
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


def test_a_character_is_found_across_a_cut(
    llm: Llama, tmp_path: Path, scripted: Callable[[bytes], None]
) -> None:
    scripted("a\N{PARTY POPPER}b".encode())
    tale = Story(llm, PROMPT)
    text = "".join(tale.write(3))
    assert (text, tale.held_back) == ("a", "")
    tale.save(tmp_path / "s.h2o")
    assert "".join(Story.load(tmp_path / "s.h2o", llm).write(3)) == "\N{PARTY POPPER}b"


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
    tale = Story.load(tmp_path / "s.h2o", llm, ignore_eos=False)
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
    with pytest.raises(ContextLimitError, match="end of the 128 positions"):
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
def test_loops_are_reported_and_end_a_story_that_has_nothing_more_to_say(llm: Llama) -> None:
    noticed: list[Loop] = []
    tale = Story(llm, PROMPT, sampling=LOOPING, on_loop=noticed.append)
    text = "".join(tale.write(20_000))
    assert tale.finish == "repetition"
    assert tale.loops == len(noticed) >= MANY_LOOPS
    assert noticed[-1].position == tale.written
    assert tale.written - noticed[-MANY_LOOPS].position <= MANY_LOOPS_TOKENS
    assert text == tale.text()
    # a story that is to go on all the same goes on to the next loop that is one of many
    n_loops, n_written = tale.loops, tale.written
    "".join(tale.write(20_000))
    assert tale.written > n_written + STRICT_TOKENS // 2
    assert tale.finish == "repetition"
    assert tale.loops == len(noticed) > n_loops
    for i in range(n_loops, tale.loops):
        span = noticed[i].position - noticed[i - MANY_LOOPS + 1].position
        assert (span <= MANY_LOOPS_TOKENS) == (i == tale.loops - 1)


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


# -------------------------------------------------------------------------------------------------
# Records and files
# -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_end")
def test_records_tell_what_was_written_since_the_last(llm: Llama, tmp_path: Path) -> None:
    tale = Story(llm, PROMPT, sampling=Sampling(seed=1))
    "".join(tale.write(200))
    first = tale.record()
    "".join(tale.write(100))
    second = tale.record()
    assert json.loads(json.dumps(dataclasses.asdict(second)))["tokens"] == 300
    kv = llm.kv
    assert (second.position, second.cells_used, second.capacity, second.kv_bytes) == (
        kv.position,
        kv.used,
        kv.capacity,
        kv.bytes_total,
    )
    assert 0 < first.tokens_evicted < second.tokens_evicted == kv.tokens_evicted
    assert first.seconds < second.seconds
    seconds = second.seconds - first.seconds
    rounding = 0.002  # seconds come in whole milliseconds
    assert second.tokens_per_second == pytest.approx(100 / seconds, rel=rounding / seconds)
    assert second.tokens_per_second_overall == pytest.approx(
        300 / second.seconds, rel=rounding / second.seconds
    )
    assert 10 * 2**20 < second.resident_bytes < 100 * 2**30
    assert second.finish == "length"

    tale.save(tmp_path / "s.h2o")
    later = Story.load(tmp_path / "s.h2o", llm)
    "".join(later.write(50))
    third = later.record()
    assert third.tokens == 350
    assert third.seconds > second.seconds
    assert third.tokens_per_second == pytest.approx(50 / (third.seconds - second.seconds), rel=0.2)


def test_prompts_are_told_apart(llm: Llama, tmp_path: Path) -> None:
    tale = Story(llm, PROMPT)
    "".join(tale.write(3))
    tale.save(tmp_path / "s.h2o")
    loaded = Story.load(tmp_path / "s.h2o", llm)
    assert loaded.begins_with(PROMPT)
    assert not loaded.begins_with(PROMPT + " and more")
    assert not loaded.begins_with(PROMPT[:-1])


def test_a_story_of_other_settings_is_refused(llm: Llama, model: Path, tmp_path: Path) -> None:
    Story(llm, PROMPT).save(tmp_path / "s.h2o")
    smaller = tiny_llama(model, n_ctx=1024, hh=10, recent=20, slack=8)
    with pytest.raises(SessionError, match="--hh 20"):
        Story.load(tmp_path / "s.h2o", smaller)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"temperature": -1}},
        {"sampling": {"warmth": 1}},
        {"sampling": None},
        {"held": "xyz"},
        {"prompt_tokens": 0},
        {"prompt_tokens": "many"},
        {"evaluated": 10_000},
        {"evaluated": None},
        {"until": 5},
        {"text_bytes": None},
        {"unsearched": -1},
        {"unknown": 1},
        None,
    ],
)
def test_a_header_that_makes_no_sense_is_refused(
    llm: Llama, tmp_path: Path, changes: dict[str, Any] | None
) -> None:
    path = tmp_path / "s.h2o"
    tale = Story(llm, PROMPT)
    "".join(tale.write(3))
    tale.save(path)
    session = read_session(path, "story")
    if changes is None:
        del session.header["story"]
    else:
        session.header["story"].update(changes)
    write_session(path, session)
    with pytest.raises((SessionError, SettingsError, StateError)) as caught:
        Story.load(path, llm)
    assert "\n" not in str(caught.value)


def test_notes_are_there_again_when_a_story_is_loaded(llm: Llama, tmp_path: Path) -> None:
    tale = Story(llm, PROMPT)
    tale.notes = {"length": 40, "by": "me"}
    tale.save(tmp_path / "s.h2o")
    assert Story.load(tmp_path / "s.h2o", llm).notes == {"length": 40, "by": "me"}
    session = read_session(tmp_path / "s.h2o", "story")
    del session.header["notes"]  # a file of an earlier pyh2o
    write_session(tmp_path / "s.h2o", session)
    assert Story.load(tmp_path / "s.h2o", llm).notes == {}


def test_a_story_saved_before_its_prompt_was_read_is_the_same(llm: Llama, tmp_path: Path) -> None:
    expected = whole(llm, 50, echo=True)
    Story(llm, PROMPT, echo=True).save(tmp_path / "s.h2o")
    loaded = Story.load(tmp_path / "s.h2o", llm)
    assert loaded.text() == ""
    assert result(loaded, "".join(loaded.write(50))) == expected


EDITED = [
    "Once upon a time there was a \N{SNOWMAN}.\n",  # the prompt is as it was
    "Twice upon a time!",
    "On",
    "\N{SNOWMAN}" * 30,
    "It has the word \u2581 in it",
]


@pytest.mark.parametrize("text", EDITED)
@pytest.mark.parametrize("echo", [True, False])
def test_an_edited_story_is_read_again(llm: Llama, tmp_path: Path, text: str, echo: bool) -> None:
    tale = Story(llm, PROMPT, echo=echo, sampling=Sampling(seed=5))
    "".join(tale.write(20))
    prompt = tale.tokens[: tale.n_prompt]
    tale.edit(text)
    if echo:
        assert tale.tokens == llm.tokenize(text.encode())
    else:
        assert tale.tokens[: len(prompt)] == prompt
    assert (tale.text(), tale.finish) == (text, None)
    n_read = len(tale.tokens)
    more = "".join(tale.write(10))
    assert (tale.n_read - len(prompt), tale.llm.n_tokens) == (n_read, n_read + 9)
    assert tale.text() == text + more
    # the edited text is the story's from now on
    tale.save(tmp_path / "s.h2o")
    loaded = Story.load(tmp_path / "s.h2o", llm)
    assert loaded.text() == text + more
    assert "".join(loaded.write(10)) == "".join(tale.write(10))


def test_what_was_written_of_an_edited_story_counts(llm: Llama) -> None:
    tale = Story(llm, PROMPT, echo=True)
    n_prompt = tale.n_prompt
    "".join(tale.write(20))
    for edited in (f"{PROMPT} there was", f"{PROMPT.lower()} there was"):
        tale.edit(edited)
        assert tale.n_prompt == n_prompt
        assert tale.written > 0


def test_an_edited_story_that_is_too_long_is_refused(full: Llama) -> None:
    tale = Story(full, PROMPT, echo=True)
    text = "".join(tale.write(5))
    with pytest.raises(ContextLimitError):
        tale.edit("word " * 512)
    assert tale.text() == text
