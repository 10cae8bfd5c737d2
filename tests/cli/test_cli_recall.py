"""`--recall` on the command line, with the tiny model as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cli_fakes import Output, run
from needed import needed
from pyh2o.cache.settings import UNLIMITED_MIB
from pyh2o.cli.options import RunOptions
from pyh2o.errors import ModelError
from pyh2o.sessions.saved import chats_folder
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

if TYPE_CHECKING:
    from pyh2o.cache.settings import EvictionSettings
    from pyh2o.cli.serving import Serving

pytestmark = pytest.mark.usefixtures("surroundings")

MESSAGE = "hay " * 80 + "needle " + "straw " * 40
SCRIPT = f"{MESSAGE}\nWhat is in it?\n/recalled\n/stats\n/kv\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_gguf(folder / "tiny.gguf", seed=4, chat_template=CHAT_TEMPLATE)


def small(tiny: Path, *more: str) -> list[str]:
    cache = ["--ctx=512", "--hh=60", "--recent=60", "--slack=40", "-n5", "--seed=3"]
    return ["-m", str(tiny), *cache, *more]


def test_a_chat_shows_what_it_recalled(tiny: Path) -> None:
    """The line under an answer, the passages, and the numbers."""
    recall = ["--recall=32", "--recall-type=f16", "--recall-mib=5"]
    output = run("chat", *small(tiny, *recall), stdin=SCRIPT)
    assert output.code == 0, output.notes
    assert re.search(
        r" [\d,]+ of [\d,]+ tokens cached · \d+\.\d% recalled$", output.notes, re.MULTILINE
    )
    assert re.search(r"^ +[\d,]+ \.\. [\d,]+ +\d\.\d{3}  \S", output.notes, re.MULTILINE)
    assert re.search(r"^archive +\d+ tokens · \d\.\d MiB$", output.notes, re.MULTILINE)
    recalled = re.search(
        r"^recalled +32 rows per token · (\d+\.\d)% of its attention$",
        output.notes,
        re.MULTILINE,
    )
    assert recalled, output.notes
    assert 0 < float(recalled[1]) < 100


def test_a_chat_recalls_by_default(tiny: Path) -> None:
    """An eighth of its rows; a session goes on with what it was begun with."""
    output = run("chat", *small(tiny, "--session=x"), stdin=SCRIPT)
    assert output.code == 0, output.notes
    assert re.search(r"^recalled +15 rows per token", output.notes, re.MULTILINE)
    without = small(tiny, "--session=y")
    assert run("chat", *without, "--recall=0", stdin="Hello\n").code == 0
    for name, rows in (("x", "15"), ("y", None)):
        again = run("chat", "--session", name, stdin="/stats\n")
        assert again.code == 0, again.notes
        found = re.search(r"^recalled +(\d+) rows per token", again.notes, re.MULTILINE)
        assert (found and found[1]) == rows


@pytest.mark.parametrize(
    ("arguments", "recall", "mib"),
    [
        ([], None, None),
        (["--session=x"], None, UNLIMITED_MIB),
        (["--recall=0.2", "--recall-mib=7"], 0.2, 7),
        (["--session=x", "--recall-mib=7"], None, 7),
        (["--no-evict"], None, None),
    ],
    ids=str,
)
def test_what_a_chat_recalls_into(
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    recall: float | None,
    mib: int | None,
) -> None:
    """Memory that nobody was asked about is limited."""
    loaded: list[RunOptions] = []

    def load(options: RunOptions, *_: object, store_mib: int) -> None:
        loaded.append(options)
        raise ModelError("not now")

    monkeypatch.setattr("pyh2o.cli.loading.load_llama", load)
    assert run("chat", "-m", str(tiny), *arguments, stdin="Hello\n").code == 1
    eviction = loaded[0].eviction
    assert (eviction.recall, eviction.recall_mib) == (recall, mib)


@pytest.mark.parametrize("command", [["serve", "--port=0"], ["chat", "--web"]], ids=str)
def test_what_a_server_recalls_into(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """As a chat that is not saved, so that a chat of the terminal goes on there."""
    needed("pyh2o.server", name="the server's packages")
    served: list[EvictionSettings] = []

    def sources(serving: Serving, _given: object) -> None:
        served.append(serving.options.eviction)
        raise ModelError("not now")

    monkeypatch.setattr("pyh2o.cli.serving.model_sources", sources)
    for arguments in ((), ("--recall=0.2", "--recall-mib=7")):
        assert run(*command, "-m", str(tiny), *arguments).notes == "error: not now\n"
    assert [(each.recall, each.recall_mib) for each in served] == [(None, None), (0.2, 7)]


def test_nothing_was_recalled(tiny: Path) -> None:
    """By a chat that recalls nothing, and before anything is evicted."""
    output = run("chat", *small(tiny, "--recall=0"), stdin=SCRIPT)
    assert output.code == 1
    assert "error: this chat has no recall: start a new one without --recall 0\n" in output.notes
    assert "archive" not in output.notes
    output = run("chat", *small(tiny, "--recall=32"), stdin="Hello\n/recalled\n")
    assert output.code == 0
    assert "no answer has recalled evicted rows" in output.notes
    assert "% recalled" not in output.notes


def test_an_archive_goes_along_with_its_chat(tiny: Path, tmp_path: Path) -> None:
    """It lies in a file of its own; a chat without it is copied as it is."""
    settings, chats = small(tiny, "--recall=32"), tmp_path / "chats"
    assert run("chat", *settings, "--session=x", stdin=f"{MESSAGE}\nWhat is in it?\n").code == 0
    assert run("sessions", "copy", "x", "y") == Output(0, "", "copied x to y\n")
    said = "exported x to out and out.archive: resume it with /load\n"
    assert run("sessions", "export", "x", "out") == Output(0, "", said)
    saved = [(chats / f"x.h2o{suffix}") for suffix in ("", ".archive")]
    for copy in (chats / "y.h2o", Path("out")):
        assert copy.read_bytes() == saved[0].read_bytes()
        assert copy.with_name(f"{copy.name}.archive").read_bytes() == saved[1].read_bytes()
    size = sum(file.stat().st_size for file in saved) / 1e6
    assert f" {size:.1f} MB " in run("sessions", "list").text
    expected = run("chat", *settings, "--session=x", stdin="Why?\n/recalled\n")
    run("sessions", "rm", "x")
    again = run("chat", *settings, stdin="/load out\nWhy?\n/recalled\n")
    assert again.text == expected.text
    assert passages(again.notes) == passages(expected.notes) != []
    assert "warning" not in again.notes
    (chats / "y.h2o.archive").unlink()
    missing = (
        "warning: the archive of y is missing: evicted rows cannot be recalled until the text "
        "is read again (--reread)\n"
    )
    assert run("sessions", "copy", "y", "z") == Output(0, "", f"{missing}copied y to z\n")
    assert run("chat", *settings, "--session=z", stdin="Why?\n").code == 0


def passages(notes: str) -> list[str]:
    return re.findall(r"^ +[\d,]+ \.\. .*$", notes, re.MULTILINE)


LOST = re.compile(
    r"^warning: the archive's file lacks rows, or they are damaged: \d+ tokens before position \d+ "
    r"cannot be found any more; read the text again \(--reread\) to rebuild the archive$",
    re.MULTILINE,
)


@pytest.mark.parametrize("way", ["session", "file"])
def test_a_chat_that_is_not_saved_leaves_nothing_in_the_archive(
    tiny: Path, tmp_path: Path, way: str
) -> None:
    """What is said in it is in no file, and it goes on as if it were saved."""
    options = small(tiny, "--recall=32")
    run("chat", *options, "--session", "x", stdin=f"{MESSAGE}\nWhat is in it?\n")
    opened, load = ["--session", "x", "--no-save"], ""
    if way == "file":
        run("sessions", "export", "x", "out")
        opened, load = [], "/load out\n"
    folders = chats_folder(), tmp_path
    before = [{file: file.read_bytes() for file in files_in(folder)} for folder in folders]
    said = "\n".join(["grass " * 200, "What?", "secret " * 200])
    output = run("chat", *options, *opened, stdin=f"{load}{said}")
    assert output.notes.count("% recalled") == 3
    assert [{file: file.read_bytes() for file in files_in(folder)} for folder in folders] == before
    assert run("chat", *options, "--session", "x", stdin=said).text == output.text


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def test_a_chat_whose_archive_is_gone_says_so_and_builds_it_anew(tiny: Path) -> None:
    """It goes on without what is lost, and is none the worse when its text is read again."""
    settings = small(tiny, "--recall=32")
    run("chat", *settings, "--session=x", stdin=f"{MESSAGE}\nWhat is in it?\n")
    archive = chats_folder() / "x.h2o.archive"
    size = archive.stat().st_size
    archive.unlink()
    output = run("chat", *settings, "--session=x", stdin="")
    assert output.code == 0
    assert LOST.search(output.notes)
    output = run("chat", *settings, "--session=x", "--reread", stdin="Why?\n")
    assert output.code == 0, output.notes
    assert "tokens will be read again with the next message" in output.notes
    assert "lacks" not in output.notes
    assert archive.stat().st_size >= size
    output = run("chat", *settings, "--session=x", stdin="Who?\n/recalled\n")
    assert "lacks" not in output.notes
    assert passages(output.notes) != []


def test_a_story_whose_archive_is_gone_says_so_and_builds_it_anew(
    tiny: Path, tmp_path: Path
) -> None:
    story = tmp_path / "story.txt"
    arguments = ["-o", str(story), "--checkpoint=50", "--ignore-eos"]
    run("generate", "-p", MESSAGE, *small(tiny, "--recall=32"), "-n200", *arguments)
    (archive,) = Path().glob("*.archive")
    size = archive.stat().st_size
    archive.unlink()
    text = story.read_text().removesuffix("\n")
    output = run("generate", "--resume", "-n220", *arguments)
    assert output.code == 0, output.notes
    assert LOST.search(output.notes)
    output = run("generate", "--resume", "--reread", "-n240", *arguments)
    assert output.code == 0, output.notes
    assert "lacks" not in output.notes
    assert re.search(r"^read [\d,]+ tokens at ", output.notes.splitlines()[-1])
    assert story.read_text().startswith(text)
    assert archive.stat().st_size >= size
    assert "lacks" not in run("generate", "--resume", "-n260", *arguments).notes
