"""The command line: whole outputs with a fake model, and the real program as a process."""

from __future__ import annotations

import itertools
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from pyh2o.cli import answers, chat, loading, models
from pyh2o.cli.app import app, version_text
from pyh2o.cli.options import KVType, RunOptions
from pyh2o.errors import ContextLimitError, ModelError, SettingsError
from pyh2o.models import DEMO, Fetched
from pyh2o.statistics import KVStatistics
from tiny_gguf import write_tiny_gguf

SUMMARY = (
    "KV {used}/300 cells · budget 200 (100 heavy + 100 recent) · 0 evicted · "
    "3.0 MiB of 8.0 MiB full"
)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing outside tmp_path is read or written, whatever the user has set."""
    for name in list(os.environ):
        if name.startswith("PYH2O_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYH2O_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def ctrl_c_reaches_us() -> Iterator[None]:
    """Also where the tests run in the background, which starts programs with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# -------------------------------------------------------------------------------------------------
# A fake model
# -------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """What the fake model does for one prompt: pieces (or actions) in turn, then the end."""

    pieces: list[str | Callable[[], None]]
    finish: str = "stop"


@dataclass
class FakeLlama:
    """Has a queue of answers; a piece is a token, a word of the prompt is one, too."""

    turns: deque[Turn | Exception]
    on_read: Callable[[int, int], None] = lambda done, total: None
    options: RunOptions | None = None
    position: int = 0
    evicting: bool = True
    window: int = 1000
    calls: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False
    before_reading: Callable[[], None] = lambda: None

    @property
    def kv(self) -> KVStatistics:
        return KVStatistics(
            evicting=self.evicting,
            window=self.window,
            position=self.position,
            position_limit=1000,
            cells=512,
            used=self.position,
            capacity=300,
            budget=200,
            heavy=100,
            recent=100,
            pinned=0,
            slack=100,
            compactions=0,
            tokens_evicted=0,
            rows_evicted=0,
            rows_moved=0,
            compaction_seconds=0.25,
            bytes_k=2**20,
            bytes_v=2**20,
            bytes_scores=2**20,
            bytes_full=2**23,
        )

    def create_completion(self, prompt: str, **keywords: Any) -> Iterator[dict[str, Any]]:
        self.calls.append({"prompt": prompt, **keywords})
        for text, finish in self._answer(prompt):
            yield {"choices": [{"text": text, "finish_reason": finish}]}

    def create_chat_completion(
        self, messages: list[dict[str, str]], **keywords: Any
    ) -> Iterator[dict[str, Any]]:
        self.calls.append({"messages": [dict(each) for each in messages], **keywords})
        if isinstance(self.turns[0], Exception):
            raise self.turns.popleft()  # type: ignore[misc]
        return self._chat_chunks(" ".join(each["content"] for each in messages))

    def _chat_chunks(self, prompt: str) -> Iterator[dict[str, Any]]:
        yield {"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]}
        for text, finish in self._answer(prompt):
            delta = {"content": text} if text else {}
            yield {"choices": [{"delta": delta, "finish_reason": finish}]}

    def _answer(self, prompt: str) -> Iterator[tuple[str, str | None]]:
        turn = self.turns.popleft()
        if isinstance(turn, Exception):
            raise turn
        self.before_reading()
        self.position = len(prompt.split())
        self.on_read(self.position, self.position)
        for number, piece in enumerate(turn.pieces):
            if callable(piece):
                piece()
                continue
            self.position += number > 0  # a token is evaluated when the next one is asked for
            yield piece, None
        self.position += turn.finish == "stop"
        yield "", turn.finish

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    """The model that the commands load; the clock moves half a second with each look at it."""
    llama = FakeLlama(deque())

    def load_llama(
        options: RunOptions, _bars: object, on_read: Callable[[int, int], None]
    ) -> FakeLlama:
        llama.options, llama.on_read = options, on_read
        return llama

    monkeypatch.setattr(loading, "load_llama", load_llama)
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 2)
    monkeypatch.setattr(answers, "time", clock)
    return llama


@dataclass(frozen=True)
class Output:
    """What a run printed and returned."""

    code: int
    text: str
    notes: str


def run(*arguments: str, stdin: str | bytes | None = None) -> Output:
    result = CliRunner().invoke(app, arguments, input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Output(result.exit_code, result.stdout, result.stderr)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


# -------------------------------------------------------------------------------------------------
# generate
# -------------------------------------------------------------------------------------------------


def test_story_on_stdout(fake: FakeLlama) -> None:
    fake.turns.append(Turn([" a", " time", "."]))
    assert run("generate", "-p", "Once upon", "--seed", "7") == Output(
        0,
        "Once upon a time.\n",
        "read 2 tokens at 4.0 tokens/s · wrote 3 tokens at 2.0 tokens/s · the model ended its text "
        f"· seed 7 · {SUMMARY.format(used=5)}\n",
    )
    assert fake.calls == [
        {
            "prompt": "Once upon",
            "max_tokens": None,
            "stream": True,
            "seed": 7,
            "temperature": 0.8,
            "top_k": 40,
            "top_p": 0.95,
            "min_p": 0.05,
            "repeat_penalty": 1.1,
        }
    ]
    assert fake.closed


def test_story_without_its_prompt(fake: FakeLlama) -> None:
    fake.turns.append(Turn(["a", " time\n"]))
    assert run("generate", "-p", "Once upon ", "--no-echo").text == "a time\n"


def test_model_with_nothing_to_add(fake: FakeLlama) -> None:
    fake.turns.append(Turn([]))
    output = run("generate", "-p", "The end.", "--seed", "7")
    assert output == Output(
        0,
        "The end.\n",
        "read 2 tokens at 4.0 tokens/s · wrote 0 tokens · the model ended its text "
        f"· seed 7 · {SUMMARY.format(used=3)}\n",
    )


def test_seed_is_new_each_run_and_shown(fake: FakeLlama) -> None:
    fake.turns.extend([Turn(["a"]), Turn(["a"])])
    notes = [run("generate", "-p", "x").notes for _ in range(2)]
    seeds = [int(re.search(r"seed (\d+)", note)[1]) for note in notes]  # type: ignore[index]
    assert seeds == [call["seed"] for call in fake.calls]
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize(
    ("finish", "evicting", "window", "words"),
    [
        ("length", True, 1000, "the number of tokens asked for is reached"),
        ("length", False, 1000, "the number of tokens asked for is reached"),
        ("length", False, 2, "the window of 2 tokens is full, and --no-evict drops nothing"),
        ("trained_context", True, 9, "all 1,000 positions the model was trained for are used up"),
    ],
)
def test_why_a_story_ended(
    fake: FakeLlama, finish: str, evicting: bool, window: int, words: str
) -> None:
    fake.evicting, fake.window = evicting, window
    fake.turns.append(Turn(["a"], finish))
    output = run("generate", "-p", "x", "-n", "1")
    assert output.code == 0
    assert f" · wrote 1 token · {words} · seed " in output.notes
    assert fake.calls[0]["max_tokens"] == 1


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_tokens_are_counted_where_a_character_takes_several(fake: FakeLlama, finish: str) -> None:
    def step() -> None:
        fake.position += 1  # a token without text: part of a character

    fake.turns.append(Turn(["a", step, "\N{PARTY POPPER}"], finish))
    assert " · wrote 3 tokens " in run("generate", "-p", "x").notes


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (b"Once", "Once"),
        (b"Once\n", "Once"),
        (b"Once\n\n", "Once\n"),
        (b"Once\r\nupon\r\n", "Once\nupon"),
        ("\ufeffÉs".encode(), "És"),
    ],
)
@pytest.mark.parametrize("source", ["file", "stdin"])
def test_prompt_file(
    fake: FakeLlama, tmp_path: Path, content: bytes, prompt: str, source: str
) -> None:
    fake.turns.append(Turn(["."]))
    (tmp_path / "start.txt").write_bytes(content)
    if source == "file":
        output = run("generate", "-f", "start.txt")
    else:
        output = run("generate", "-f", "-", stdin=content)
    assert (output.code, output.text) == (0, f"{prompt}.\n")
    assert fake.calls[0]["prompt"] == prompt


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-f", "none.txt"], "there is no prompt file none.txt"),
        (["-f", "folder"], "folder is a folder: give --prompt-file a text file"),
        (["-f", "latin.txt"], "latin.txt is not UTF-8 text (byte 2): save it as UTF-8"),
        (
            ["-f", "empty.txt"],
            "the prompt is empty: give the model at least one word to go on with",
        ),
        (["-p", ""], "the prompt is empty: give the model at least one word to go on with"),
        (["-p", "\udcff"], "the prompt is not UTF-8 text"),
        (["-p", "x", "-o", "folder"], "folder is a folder: give --output the name of a file"),
        (
            ["-p", "x", "-o", "old.txt"],
            "old.txt exists: give another --output, or replace it with --force",
        ),
        (
            ["-f", "old.txt", "-o", "old.txt", "--force", "--no-echo"],
            "--no-echo would lose the prompt in old.txt: give another --output",
        ),
    ],
)
def test_unusable_files(
    fake: FakeLlama, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.txt").write_bytes("caé".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"\n")
    (tmp_path / "old.txt").write_text("old")
    assert run("generate", *arguments) == Output(1, "", f"error: {message}\n")
    assert fake.options is None  # no model was loaded for it
    assert (tmp_path / "old.txt").read_text() == "old"


def test_output_folder_that_is_not_there(fake: FakeLlama, tmp_path: Path) -> None:
    expected = f"error: there is no folder {tmp_path}/no: create it, or give another --output\n"
    assert run("generate", "-p", "x", "-o", "no/story.txt") == Output(1, "", expected)
    assert fake.options is None


@pytest.mark.parametrize("arguments", [[], ["-p", "x", "-f", "y"]])
def test_one_prompt_is_needed(fake: FakeLlama, arguments: list[str]) -> None:
    output = run("generate", *arguments)
    assert output.code == 2
    assert "give either --prompt TEXT or --prompt-file FILE" in output.notes
    assert "Traceback" not in output.notes


def test_file_grows_as_the_story_is_written(fake: FakeLlama, tmp_path: Path) -> None:
    story = tmp_path / "story.txt"
    seen: list[str] = []

    def look() -> None:
        seen.append(story.read_text())

    fake.turns.append(Turn([look, " a", look, " time", look]))
    output = run("generate", "-p", "Once upon", "-o", "story.txt", "--seed", "7")
    assert seen == ["", "Once upon a", "Once upon a time"]
    assert story.read_text() == "Once upon a time\n"
    assert (output.code, output.text) == (0, "")
    assert output.notes.splitlines()[0] == f"the text is in {story}"
    assert output.notes.splitlines()[1].startswith("read 2 tokens")


def test_story_can_be_gone_on_with_in_place(fake: FakeLlama, tmp_path: Path) -> None:
    story = tmp_path / "story.txt"
    story.write_text("Once upon\n")
    story.chmod(0o600)
    fake.turns.append(Turn([" a", " time"]))
    assert run("generate", "-f", "story.txt", "-o", "story.txt", "--force").code == 0
    assert story.read_text() == "Once upon a time\n"
    assert story.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [story]


def test_replaced_file_comes_back_if_nothing_is_written(fake: FakeLlama, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("old")
    fake.turns.append(ContextLimitError("too long"))
    output = run("generate", "-p", "x", "-o", "story.txt", "--force")
    assert output == Output(1, "", "error: too long\n")
    assert (tmp_path / "story.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["story.txt"]


def test_replaced_file_comes_back_if_the_model_is_silent(fake: FakeLlama, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("old")
    fake.turns.append(Turn([]))
    assert run("generate", "-p", "x", "-o", "story.txt", "--force", "--no-echo").code == 0
    assert (tmp_path / "story.txt").read_text() == "old"


def test_no_file_is_left_if_nothing_is_written(fake: FakeLlama, tmp_path: Path) -> None:
    fake.turns.append(ContextLimitError("too long"))
    assert run("generate", "-p", "x", "-o", "story.txt").code == 1
    assert list(tmp_path.iterdir()) == []


def test_replaced_file_stays_if_the_story_is_cut_short(fake: FakeLlama, tmp_path: Path) -> None:
    story = tmp_path / "story.txt"
    story.write_text("old")
    fake.turns.append(Turn([" a", press_ctrl_c, " b", " c"]))
    output = run("generate", "-p", "x", "-o", "story.txt", "--force")
    assert story.read_text() == "x a b"
    [aside] = [path for path in tmp_path.iterdir() if path != story]
    assert aside.read_text() == "old"
    assert output.code == 130
    assert output.notes.splitlines()[:2] == [
        f"the earlier story.txt is kept as {aside}",
        f"the text is in {story}",
    ]


def test_link_is_followed_and_stays(fake: FakeLlama, tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "story.txt").symlink_to("real.txt")
    fake.turns.append(Turn(["a"]))
    assert run("generate", "-p", "x", "-o", "story.txt", "--force", "--no-echo").code == 0
    assert (tmp_path / "real.txt").read_text() == "a\n"
    assert (tmp_path / "story.txt").is_symlink()


def test_device_is_written_in_place(fake: FakeLlama) -> None:
    fake.turns.append(Turn(["a"]))
    assert run("generate", "-p", "x", "-o", "/dev/null").code == 0
    assert Path("/dev/null").is_char_device()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk(fake: FakeLlama) -> None:
    fake.turns.append(Turn(["a"]))
    output = run("generate", "-p", "x", "-o", "/dev/full")
    assert output == Output(
        1,
        "",
        "error: cannot write /dev/full: No space left on device; what is in it stays: make room, "
        "or give another --output\n",
    )


def test_ctrl_c_keeps_what_was_written(fake: FakeLlama) -> None:
    fake.turns.append(Turn([" a", press_ctrl_c, " b", " c"]))
    output = run("generate", "-p", "x", "--seed", "7")
    assert output == Output(
        130,
        "x a b\n",
        "read 1 token at 2.0 tokens/s · wrote 2 tokens at 2.0 tokens/s · stopped by Ctrl-C "
        f"· seed 7 · {SUMMARY.format(used=2)}\n",
    )


@pytest.mark.parametrize("arguments", [[], ["-o", "story.txt"]])
def test_ctrl_c_while_reading(fake: FakeLlama, tmp_path: Path, arguments: list[str]) -> None:
    fake.turns.append(Turn(["never written"]))
    fake.before_reading = press_ctrl_c
    assert run("generate", "-p", "x y", "--seed", "7", *arguments) == Output(
        130,
        "",
        "read 2 tokens at 4.0 tokens/s · wrote 0 tokens · stopped by Ctrl-C · seed 7 · "
        f"{SUMMARY.format(used=2)}\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_second_ctrl_c_does_not_wait(fake: FakeLlama) -> None:
    fake.turns.append(Turn([" a", press_ctrl_c, press_ctrl_c, " b"]))
    output = run("generate", "-p", "x")
    assert output == Output(130, "x a\n", "stopped by Ctrl-C\n")


def test_ctrl_c_works_as_before_afterwards(fake: FakeLlama) -> None:
    fake.turns.append(Turn([" a"]))
    before = signal.getsignal(signal.SIGINT)
    run("generate", "-p", "x")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "error",
    [ModelError("broken\nfile"), SettingsError("broken file"), OSError(5, "file", "broken")],
)
def test_library_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_llama(*_: object) -> None:
        raise error

    monkeypatch.setattr(loading, "load_llama", load_llama)
    expected = "error: broken: file\n" if isinstance(error, OSError) else "error: broken file\n"
    assert run("generate", "-p", "x") == Output(1, "", expected)
    assert run("chat", stdin="x\n") == Output(1, "", expected)


@pytest.mark.parametrize("aborted", [True, False])
def test_ctrl_c_while_loading(monkeypatch: pytest.MonkeyPatch, aborted: bool) -> None:
    """Whether the library can break off the load then or goes on to its end."""

    class SlowLlama:
        def __init__(self, _path: str, *, load_progress: Callable[[float], None], **_: Any) -> None:
            press_ctrl_c()
            with suppress(KeyboardInterrupt):  # a C callback passes no exception on
                load_progress(0.5)
            if aborted:
                raise ModelError("damaged")

    library = SimpleNamespace(Llama=SlowLlama, KV_TYPES={"f16": 1})
    monkeypatch.setitem(sys.modules, "pyh2o.llama", library)
    expected = Output(130, "", "stopped by Ctrl-C\n")
    assert run("generate", "-m", "m.gguf", "-p", "x") == expected


# -------------------------------------------------------------------------------------------------
# The shared options
# -------------------------------------------------------------------------------------------------


def options_of(fake: FakeLlama, *arguments: str) -> RunOptions:
    fake.turns.append(Turn(["a"]))
    output = run("generate", "-p", "x", *arguments)
    assert output.code == 0, output.notes
    assert fake.options is not None
    return fake.options


def test_defaults_reach_the_model(fake: FakeLlama) -> None:
    assert options_of(fake) == RunOptions()
    assert (RunOptions().hh, RunOptions().recent) == (0.1, 0.1)


def test_every_option_reaches_the_model(fake: FakeLlama) -> None:
    arguments = (
        "-m m.gguf --ctx 512 --gpu-layers -1 --threads 3 --verbose --hh 0.2 --recent 30 "
        "--pinned 4 --slack 1 --no-evict --kv-type q8_0 --temp 0 --top-k 5 --top-p 0.5 "
        "--min-p 0 --repeat-penalty 1 --seed 0"
    )
    given = options_of(fake, *arguments.split())
    assert given == RunOptions(
        model=Path("m.gguf"),
        ctx=512,
        gpu_layers=-1,
        threads=3,
        verbose=True,
        hh=0.2,
        recent=30,
        pinned=4,
        slack=1,
        no_evict=True,
        kv_type=KVType.q8_0,
        temp=0.0,
        top_k=5,
        top_p=0.5,
        min_p=0.0,
        repeat_penalty=1.0,
        seed=0,
    )
    assert fake.calls[0]["temperature"] == 0.0
    assert fake.calls[0]["seed"] == 0


@pytest.mark.parametrize(
    ("text", "rows"), [("1", 1), ("1.0", 1.0), ("256", 256), ("0.1", 0.1), ("1e-1", 0.1), ("0", 0)]
)
def test_rows_are_a_fraction_or_a_count(fake: FakeLlama, text: str, rows: float) -> None:
    given = options_of(fake, "--hh", text, "--recent", text)
    assert (given.hh, given.recent) == (rows, rows)
    assert type(given.hh) is type(given.recent) is type(rows)


def test_model_from_the_environment(fake: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYH2O_MODEL", "env.gguf")
    monkeypatch.setenv("PYH2O_THREADS", "2")
    given = options_of(fake)
    assert (given.model, given.threads) == (Path("env.gguf"), 2)
    assert options_of(fake, "-m", "m.gguf").model == Path("m.gguf")


@pytest.mark.parametrize(
    "arguments",
    [
        "--hh abc",
        "--recent 1,5",
        "--kv-type q5_1",
        "--slack 0",
        "--pinned -1",
        "--ctx -1",
        "--threads 0",
        "--seed -1",
        "--seed 4294967295",
        "--temp -1",
        "--top-p 1.1",
        "--max-tokens 0",
        "--no-such-option",
    ],
)
def test_wrong_usage(fake: FakeLlama, arguments: str) -> None:
    output = run("generate", "-p", "x", *arguments.split())
    assert (output.code, output.text) == (2, "")
    assert "Traceback" not in output.notes
    assert fake.options is None


# -------------------------------------------------------------------------------------------------
# chat
# -------------------------------------------------------------------------------------------------


def footer(written: str, used: int) -> str:
    return f"wrote {written} · {SUMMARY.format(used=used)}\n"


def test_script_is_answered_line_by_line(fake: FakeLlama) -> None:
    fake.turns.extend([Turn(["Hi", " there"]), Turn(["I", " am", " H2O\n"])])
    output = run("chat", "--seed", "7", "--system", "Be kind.", stdin="Hello\n\n  Who?  \n")
    assert output == Output(
        0,
        "Hi there\nI am H2O\n",
        footer("2 tokens at 2.0 tokens/s", 5) + footer("3 tokens at 2.0 tokens/s", 9),
    )
    history = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi there"},
        {"role": "user", "content": "Who?"},
    ]
    sampling = {**RunOptions().sampling(), "stream": True, "max_tokens": None}
    assert fake.calls == [
        {"messages": history[:2], "seed": 7, **sampling},
        {"messages": history, "seed": 8, **sampling},
    ]
    assert fake.closed


def test_commands(fake: FakeLlama) -> None:
    fake.turns.append(Turn(["Hi"]))
    output = run("chat", stdin="/help\n/foo bar\n /usr is sent\n/quit \nnot answered\n")
    assert output == Output(
        0,
        "Hi\n",
        f"{chat.HELP}\n"
        "unknown command /foo: /help lists the commands; begin the line with a space to send it "
        "to the model\n" + footer("1 token", 4),
    )
    assert fake.calls[0]["messages"] == [{"role": "user", "content": "/usr is sent"}]


def test_stats_show_every_number(fake: FakeLlama) -> None:
    fake.window = 8192
    output = run("chat", stdin="/stats\n")
    assert (output.code, output.text) == (0, "")
    lines = [re.split(r"\s{2,}", line) for line in output.notes.splitlines()]
    shown = dict(lines)
    assert list(shown) == [name.replace("_", " ") for name in KVStatistics.__dataclass_fields__]
    assert shown["evicting"] == "yes"
    assert shown["window"] == "8,192"
    assert shown["compaction seconds"] == "0.250"


def test_ctrl_c_ends_a_script_and_keeps_the_text(fake: FakeLlama) -> None:
    fake.turns.append(Turn(["Hi", press_ctrl_c, " there", "!"]))
    output = run("chat", stdin="Hello\nWho?\n")
    assert (output.code, output.text) == (130, "Hi there\n")
    assert output.notes == (
        footer("2 tokens at 2.0 tokens/s", 2)
        + "stopped by Ctrl-C: what was said so far stays\nstopped by Ctrl-C\n"
    )


def test_end_of_the_trained_context(fake: FakeLlama) -> None:
    fake.turns.append(Turn(["Hi"], "trained_context"))
    output = run("chat", stdin="Hello\n")
    assert output == Output(
        0,
        "Hi\n",
        footer("1 token", 1)
        + "the answer ends here: all 1,000 positions the model was trained for are used up; all "
        "text is kept, but start a new chat to go on\n",
    )


def test_refused_message_ends_a_script(fake: FakeLlama) -> None:
    fake.turns.extend([Turn(["Hi"]), ContextLimitError("too long"), Turn(["no"])])
    output = run("chat", stdin="Hello\nmuch\nmore\n")
    assert output == Output(1, "Hi\n", footer("1 token", 2) + "error: too long\n")


def test_refusal_of_the_chat_template(fake: FakeLlama) -> None:
    fake.turns.append(ValueError("System role not supported"))
    output = run("chat", "--system", "Be kind.", stdin="Hello\n")
    assert output == Output(
        1, "", "error: the model's chat template refuses this: System role not supported\n"
    )


def test_script_that_is_not_utf8(fake: FakeLlama) -> None:
    fake.turns.append(Turn(["Hi"]))
    output = run("chat", stdin=b"\xef\xbb\xbfHello\n\xff\n")
    assert (output.code, output.text) == (1, "Hi\n")
    assert output.notes.endswith("error: line 2 of standard input is not UTF-8 text\n")
    assert fake.calls[0]["messages"] == [{"role": "user", "content": "Hello"}]


# -------------------------------------------------------------------------------------------------
# models and the program itself
# -------------------------------------------------------------------------------------------------


def test_models_list(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    demo = folder / DEMO.file
    title = "demo  SmolLM2-135M-Instruct Q4_1 by Hugging Face  98 MB  Apache 2.0"
    expected = f"{title}  not fetched: run `pyh2o models fetch`\n      {demo}\n"
    assert run("models", "list") == Output(0, expected, "")

    folder.mkdir()
    demo.write_bytes(b"GGUF")
    with (folder / "big.gguf").open("wb") as big:
        big.truncate(4_100_000_000)
    (folder / "notes.txt").write_text("no model")
    expected = f"{title}  fetched\n      {demo}\n{folder}/big.gguf  4.1 GB\n"
    assert run("models", "list") == Output(0, expected, "")


@pytest.mark.parametrize(
    ("new", "state"), [(True, "fetched and checked"), (False, "there already")]
)
def test_models_fetch(monkeypatch: pytest.MonkeyPatch, new: bool, state: str) -> None:
    fetched = Fetched(Path("/models/demo.gguf"), new=new)
    monkeypatch.setattr(models, "fetch_demo_model", lambda _progress: fetched)
    notes = f"SmolLM2-135M-Instruct Q4_1, 98 MB, Apache 2.0: {state}\n"
    for arguments in (["fetch"], ["fetch", "demo"]):
        assert run("models", *arguments) == Output(0, "/models/demo.gguf\n", notes)


def test_models_fetch_of_another_name() -> None:
    output = run("models", "fetch", "llama")
    assert output.code == 2
    assert "there is no model 'llama' to fetch" in output.notes


def test_models_path(tmp_path: Path) -> None:
    assert run("models", "path") == Output(0, f"{tmp_path / 'models'}\n", "")


@pytest.mark.parametrize("arguments", [["generate", "-p", "x"], ["chat"]])
def test_demo_model_that_is_not_fetched(arguments: list[str]) -> None:
    output = run(*arguments, stdin="Hello\n")
    assert output == Output(
        1,
        "",
        "error: the demo model is not here yet: run `pyh2o models fetch`, or give --model FILE\n",
    )


def test_version_text() -> None:
    build = {
        "llama_cpp_python": "0.3.36",
        "llama_cpp_commit": "0c1e570",
        "patches": ["0001", "0002"],
        "backends": ["CPU"],
    }
    assert version_text("1.2", build) == (
        "pyh2o 1.2\nllama.cpp 0c1e570\nllama-cpp-python 0.3.36\npatches 0001, 0002\nbackends CPU\n"
    )
    assert version_text("1.2", {}) == "pyh2o 1.2\n"


@pytest.mark.parametrize("arguments", [["--help"], ["chat", "--help"], ["generate", "--help"]])
def test_help(arguments: list[str]) -> None:
    output = run(*arguments)
    assert (output.code, output.notes) == (0, "")
    if len(arguments) > 1:
        for name in ("hh", "recent", "seed", "no-evict", "kv-type"):
            assert f"--{name} " in output.text


# -------------------------------------------------------------------------------------------------
# The real program
# -------------------------------------------------------------------------------------------------

real = pytest.mark.real
PATIENCE = 120
"""Seconds after which a test gives up: far more than is needed even on a busy machine."""

# With the likeliest tokens only, the tiny model repeats a few letters for ever.
ENDLESS = ["--temp", "0", "--repeat-penalty", "1"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_gguf(path, seed=17, n_ctx_train=1 << 17)


def program_environment() -> dict[str, str]:
    """One thread: more of them only wait for each other over a tiny model on a busy machine."""
    return {**os.environ, "PYH2O_THREADS": "1"}


def pyh2o_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "pyh2o.cli", *map(str, arguments)]


def run_program(*arguments: str | Path, stdin: str = "") -> Output:
    done = subprocess.run(
        pyh2o_command(*arguments),
        input=stdin.encode(),
        env=program_environment(),
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    return Output(done.returncode, done.stdout.decode(), done.stderr.decode())


@real
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "none.gguf"], "there is no model file none.gguf"),
        (["-m", "."], r"\. is not a file"),
        (["-m", "text.gguf"], "text.gguf is not a GGUF file"),
        (["-m", "garbage.gguf"], "garbage.gguf.* damaged"),
        (["-m", "cut.gguf"], "cut.gguf.* damaged"),
        (["-m", "recurrent.gguf"], "eviction cannot be used with this model"),
        (["--hh", "1.5"], r"hh is 1\.5, more than the whole window"),
        (["--hh", "0", "--recent", "0"], "hh and recent are both 0"),
        (["--hh", "10", "--recent", "0"], "recent is 0"),
        (["--hh", "-5"], "hh is -5"),
        (["--hh", "nan"], "hh is nan"),
        (["--ctx", "512", "--hh", "500", "--recent", "100"], "budget of 600 rows .* larger"),
    ],
)
def test_bad_models_and_settings(
    tiny: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    whole = tiny.read_bytes()
    (tmp_path / "text.gguf").write_text("no model")
    (tmp_path / "garbage.gguf").write_bytes(b"GGUF" + bytes(range(256)) * 20)
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    if "recurrent.gguf" in arguments:
        write_tiny_gguf(tmp_path / "recurrent.gguf", seed=1, arch_variant="recurrent")
    model = [] if "-m" in arguments else ["-m", str(tiny)]
    command = ["chat"] if "1.5" in arguments else ["generate", "-p", "x"]
    output = run_program(*command, *model, *arguments, stdin="x\n")
    assert (output.code, output.text) == (1, "")
    assert re.fullmatch(rf"error: .*{message}.*\n", output.notes), output.notes


@real
def test_same_seed_same_story(tiny: Path, tmp_path: Path) -> None:
    small = [
        "-m",
        str(tiny),
        "--hh",
        "32",
        "--recent",
        "32",
        "--slack",
        "8",
        "-n",
        "300",
        "--seed",
        "3",
    ]
    printed = run_program("generate", "-p", "Once upon a time", *small)
    written = run_program("generate", "-p", "Once upon a time", *small, "-o", "story.txt")
    assert (printed.code, written.code, written.text) == (0, 0, "")
    assert printed.text.startswith("Once upon a time")
    assert (tmp_path / "story.txt").read_bytes().decode() == printed.text
    assert re.search(r"wrote \d+ tokens at .* · seed 3 · KV \d+/\d+ cells", printed.notes)


@real
def test_written_tokens_are_exact(tiny: Path) -> None:
    for count in (1, 2, 37):
        output = run_program("generate", "-m", tiny, "-p", "a", "-n", str(count), *ENDLESS)
        assert f"wrote {count} token" in output.notes
        assert "the number of tokens asked for is reached" in output.notes


@real
def test_story_up_to_the_trained_context(tmp_path: Path) -> None:
    short = write_tiny_gguf(tmp_path / "short.gguf", seed=17, n_ctx_train=600)
    output = run_program("generate", "-m", short, "-p", "Once", *ENDLESS)
    assert output.code == 0
    assert "all 600 positions the model was trained for are used up" in output.notes


@real
def test_prompt_beyond_the_trained_context(tmp_path: Path) -> None:
    short = write_tiny_gguf(tmp_path / "short.gguf", seed=17, n_ctx_train=600)
    output = run_program("generate", "-m", short, "-f", "-", "-o", "s.txt", stdin="word " * 700)
    assert (output.code, output.text) == (1, "")
    assert re.fullmatch(r"error: Requested tokens .*\n", output.notes)
    assert not (tmp_path / "s.txt").exists()


@real
def test_every_kv_type(tiny: Path) -> None:
    for kv_type in KVType:
        output = run_program(
            "generate", "-m", tiny, "-p", "x", "-n", "20", "--kv-type", kv_type.value
        )
        assert output.code == 0, output.notes


@real
def test_chat_script(tiny: Path) -> None:
    output = run_program("chat", "-m", tiny, "--seed", "1", stdin="/nonsense\n/stats\n/quit\nx\n")
    assert (output.code, output.text) == (0, "")
    assert output.notes.startswith("unknown command /nonsense: ")
    assert re.search(r"^window +131,072$", output.notes, re.MULTILINE)


def start_program(*arguments: str | Path) -> subprocess.Popen[bytes]:
    # A test runner in the background may itself ignore Ctrl-C, and its children with it.
    return subprocess.Popen(
        pyh2o_command(*arguments),
        env=program_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@real
def test_ctrl_c_leaves_the_text_in_the_file(tiny: Path, tmp_path: Path) -> None:
    story = tmp_path / "story.txt"
    program = start_program("generate", "-m", tiny, "-p", "Once upon", "-o", story, *ENDLESS)
    wait_until(lambda: story.exists() and story.stat().st_size > 100)
    program.send_signal(signal.SIGINT)
    text, notes = program.communicate(timeout=PATIENCE)
    assert (program.returncode, text) == (130, b"")
    assert story.read_text().startswith("Once upon")
    assert story.stat().st_size > 100
    lines = notes.decode().splitlines()
    assert lines[0] == f"the text is in {story}"
    assert " · stopped by Ctrl-C · " in lines[1]
    assert len(lines) == 2


@real
def test_reader_that_leaves_early(tiny: Path) -> None:
    program = start_program("generate", "-m", tiny, "-p", "Once upon", *ENDLESS)
    assert program.stdout is not None
    assert program.stderr is not None
    assert program.stdout.read(9) == b"Once upon"
    program.stdout.close()
    assert program.wait(timeout=PATIENCE) == 141
    assert program.stderr.read() == b""
    program.stderr.close()


class Screen:
    """The program on a terminal of its own, as a person has it."""

    def __init__(self, *arguments: str | Path) -> None:
        command = pyh2o_command(*arguments)
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execve(command[0], command, {**program_environment(), "TERM": "xterm"})
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, pattern: str) -> None:
        """Read until the pattern is shown, and forget what is shown up to its end."""
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < deadline, self.shown
            if not self._read():
                raise AssertionError(f"the program ended before {pattern!r}: {self.shown}")
        self.shown = self.shown[found.end() :]

    def end(self) -> int:
        """Read to the end; the exit code."""
        while self._read():
            pass
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> bool:
        if not select.select([self._terminal], [], [], PATIENCE)[0]:
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"nothing more came after {self.shown!r}")
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:  # how Linux reports that the program has gone
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


@real
def test_chat_on_a_terminal(tiny: Path) -> None:
    screen = Screen("chat", "-m", tiny, *ENDLESS)
    screen.wait_for(r"window 131,072 tokens, budget 26,214 ")
    screen.wait_for("> ")
    screen.type("Hello\n")
    screen.wait_for(r"Hello\r\n[^\r\n]")  # the echo of the terminal, then the answer
    screen.type("\x03")
    screen.wait_for("stopped by Ctrl-C: what was said so far stays\r\n")
    screen.wait_for("> ")
    time.sleep(0.5)  # readline shows its prompt a moment before it listens
    screen.type("\x03")
    screen.wait_for("/quit or Ctrl-D leaves")
    screen.wait_for("> ")
    screen.type("/what\n")
    screen.wait_for("unknown command /what")
    screen.wait_for("> ")
    screen.type("\x04")
    assert screen.end() == 0


@real
def test_bars_on_a_terminal_only(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 1500)
    arguments = ["generate", "-m", str(tiny), "-f", "long.txt", "-n", "3"]
    screen = Screen(*arguments)
    screen.wait_for("reading the prompt")
    screen.wait_for(r"[\d,]+ of [\d,]+ tokens")
    screen.wait_for("the number of tokens asked for is reached")
    assert screen.end() == 0
    piped = run_program(*arguments)
    assert piped.code == 0
    assert piped.notes.count("\n") == 1
    assert "\x1b" not in piped.notes + piped.text


@real
def test_version_and_help_of_the_program() -> None:
    version = run_program("--version")
    assert version.code == 0
    assert re.match(r"pyh2o [\d.]+\S*\nllama.cpp [0-9a-f]{7}", version.text)
    assert run_program("--help").code == 0
    assert run_program("generate", "-p", "x", "--hh", "abc").code == 2
