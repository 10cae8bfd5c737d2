"""`--recall` on the command line, with the tiny model as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cli_fakes import Output, run
from needed import needed
from pyh2o.cli.options import ModelOptions, RunOptions
from pyh2o.errors import ModelError
from pyh2o.sessions.saved import chats_folder
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

if TYPE_CHECKING:
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
    """The line under an answer, the passages, the numbers and the picture."""
    recall = ["--recall=32", "--recall-type=f16", "--recall-mib=5"]
    output = run("chat", *small(tiny, *recall), stdin=SCRIPT)
    assert output.code == 0, output.notes
    assert re.search(
        r" remembers [\d,]+ of [\d,]+ tokens · \d+\.\d% looked up$", output.notes, re.MULTILINE
    )
    assert re.search(r"^ +[\d,]+ \.\. [\d,]+ +\d\.\d{3}  \S", output.notes, re.MULTILINE)
    assert re.search(
        r"^archive +\d+ tokens · \d\.\d MiB · written in \d\.\d{3} s$", output.notes, re.MULTILINE
    )
    recalled = re.search(
        r"^recalled +32 rows for each token · (\d+\.\d)% of the attention of the last \d+ tokens$",
        output.notes,
        re.MULTILINE,
    )
    assert recalled, output.notes
    assert 0 < float(recalled[1]) < 100
    assert re.search(r"^ *↑[ ↑]*$", output.notes, re.MULTILINE)
    assert re.search(r"^↑ recalled: \d+ passages? of \d+ tokens; ", output.notes, re.MULTILINE)


def test_a_chat_recalls_by_default(tiny: Path) -> None:
    """An eighth of its rows; a session goes on with what it was begun with."""
    output = run("chat", *small(tiny, "--session=x"), stdin=SCRIPT)
    assert output.code == 0, output.notes
    assert re.search(r"^recalled +15 rows for each token", output.notes, re.MULTILINE)
    without = small(tiny, "--session=y")
    assert run("chat", *without, "--recall=0", stdin="Hello\n").code == 0
    for name, rows in (("x", "15"), ("y", None)):
        again = run("chat", "--session", name, stdin="/stats\n")
        assert again.code == 0, again.notes
        found = re.search(r"^recalled +(\d+) rows for each", again.notes, re.MULTILINE)
        assert (found and found[1]) == rows


@pytest.mark.parametrize(
    ("arguments", "recall", "mib"),
    [
        ([], None, 1024),
        (["--session=x"], None, None),
        (["--recall=0.2", "--recall-mib=7"], 0.2, 7),
        (["--session=x", "--recall-mib=7"], None, 7),
        (["--no-evict"], None, 1024),
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

    def load(options: RunOptions, *_: object) -> None:
        loaded.append(options)
        raise ModelError("not now")

    monkeypatch.setattr("pyh2o.cli.loading.load_llama", load)
    assert run("chat", "-m", str(tiny), *arguments, stdin="Hello\n").code == 1
    eviction = loaded[0].eviction
    assert (eviction.recall, eviction.recall_mib) == (recall, mib)


@pytest.mark.parametrize("command", [["serve", "--port=0"], ["chat", "--web"]], ids=str)
@pytest.mark.parametrize(
    ("arguments", "recall", "mib"),
    [([], None, 1024), (["--recall=0"], 0, 1024), (["--recall=0.2", "--recall-mib=7"], 0.2, 7)],
    ids=str,
)
def test_what_a_server_recalls_into(
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    arguments: list[str],
    recall: float | None,
    mib: int,
) -> None:
    """As a chat that is not saved, so that a chat of the terminal goes on there."""
    needed("pyh2o.server", name="the server's packages")
    served: list[ModelOptions] = []

    def sources(serving: Serving, _given: object) -> None:
        served.append(serving.options)
        raise ModelError("not now")

    monkeypatch.setattr("pyh2o.cli.serving.model_sources", sources)
    assert run(*command, "-m", str(tiny), *arguments).notes == "error: not now\n"
    eviction = served[0].eviction
    assert (eviction.recall, eviction.recall_mib) == (recall, mib)


def test_chat_without_recall(tiny: Path) -> None:
    output = run("chat", *small(tiny, "--recall=0"), stdin=SCRIPT)
    assert output.code == 1
    assert "error: this chat recalls nothing: begin a new one, without --recall 0\n" in output.notes
    assert "archive" not in output.notes
    assert "↑" not in output.notes


def test_before_anything_is_evicted(tiny: Path) -> None:
    output = run("chat", *small(tiny, "--recall=32"), stdin="Hello\n/recalled\n")
    assert output.code == 0
    assert "nothing was recalled: " in output.notes
    assert " looked up" not in output.notes


def test_a_chat_that_is_opened_again_goes_on_as_it_would_have(tiny: Path) -> None:
    """What its last answer had looked at is not saved."""
    settings = small(tiny, "--recall=32")
    whole = run("chat", *settings, stdin=f"{MESSAGE}\nWhat is in it?\nWhy?\n/recalled\n")
    first = run("chat", *settings, "--session=x", stdin=f"{MESSAGE}\nWhat is in it?\n/recalled\n")
    again = run("chat", *settings, "--session=x", stdin="/recalled\nWhy?\n/recalled\n")
    assert passages(first.notes) != []
    assert "nothing was recalled: " in again.notes
    assert passages(again.notes) == passages(whole.notes) != []
    assert whole.text.endswith(again.text)


@pytest.mark.parametrize("way", ["copy", "export"])
def test_a_copied_chat_recalls_what_the_first_one_does(
    tiny: Path, tmp_path: Path, way: str
) -> None:
    """With the archive, which lies in a file of its own."""
    settings = small(tiny, "--recall=32")
    assert run("chat", *settings, "--session=x", stdin=f"{MESSAGE}\nWhat is in it?\n").code == 0
    chats, question = tmp_path / "chats", "Why?\n/recalled\n"
    if way == "copy":
        output = run("sessions", "copy", "x", "y")
        assert output == Output(0, "", "copied x to y\n")
        files, script = (chats / "y.h2o", chats / "y.h2o.archive"), question
    else:
        output = run("sessions", "export", "x", "out")
        said = "exported x to out and out.archive beside it: /load goes on from there\n"
        assert output == Output(0, "", said)
        files, script = (Path("out"), Path("out.archive")), f"/load out\n{question}"
    saved = (chats / "x.h2o", chats / "x.h2o.archive")
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in saved]
    size = sum(file.stat().st_size for file in saved) / 1e6
    assert f" {size:.1f} MB " in run("sessions", "list").text
    expected = run("chat", *settings, "--session=x", stdin=question)
    run("sessions", "rm", "x")
    assert all(file.is_file() for file in files)
    arguments = ["--session=y"] if way == "copy" else []
    again = run("chat", *settings, *arguments, stdin=script)
    assert again.text == expected.text
    assert passages(again.notes) == passages(expected.notes) != []
    assert "warning" not in again.notes


def test_a_chat_whose_archive_is_missing_is_copied_without(tiny: Path, tmp_path: Path) -> None:
    settings = small(tiny, "--recall=32")
    run("chat", *settings, "--session=x", stdin=f"{MESSAGE}\nWhat is in it?\n")
    (tmp_path / "chats" / "x.h2o.archive").unlink()
    missing = (
        "warning: the archive of x is missing: what left its cache cannot be found until its text "
        "is read again (--reread)\n"
    )
    assert run("sessions", "copy", "x", "y") == Output(0, "", f"{missing}copied x to y\n")
    assert run("chat", *settings, "--session=y", stdin="Why?\n").code == 0


def passages(notes: str) -> list[str]:
    return re.findall(r"^ +[\d,]+ \.\. .*$", notes, re.MULTILINE)


LOST = re.compile(
    r"^warning: the archive's file lacks rows, or they are damaged: \d+ tokens before position \d+ "
    r"cannot be found any more; have the text read again \(--reread\) to build it anew$",
    re.MULTILINE,
)


@pytest.mark.parametrize("way", ["session", "load", "file"])
def test_a_chat_that_is_not_saved_leaves_nothing_in_the_archive(
    tiny: Path, tmp_path: Path, way: str
) -> None:
    """What is said in it is in no file, and it goes on as if it were saved."""
    options = small(tiny, "--recall=32")
    run("chat", *options, "--session", "x", stdin=f"{MESSAGE}\nWhat is in it?\n")
    if way == "file":
        run("sessions", "export", "x", "out")
    folders = chats_folder(), tmp_path
    before = [{file: file.read_bytes() for file in files_in(folder)} for folder in folders]
    said = "\n".join(["grass " * 200, "What?", "secret " * 200])
    opened, script = {
        "session": (["--session", "x", "--no-save"], said),
        "load": (["--no-save"], f"/load x\n{said}"),
        "file": ([], f"/load out\n{said}"),
    }[way]
    output = run("chat", *options, *opened, stdin=script)
    assert output.notes.count("% looked up") == 3
    assert [{file: file.read_bytes() for file in files_in(folder)} for folder in folders] == before
    assert run("chat", *options, "--session", "x", stdin=said).text == output.text


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


@pytest.mark.parametrize("way", ["option", "command"])
def test_a_chat_whose_archive_is_gone_says_so_and_builds_it_anew(tiny: Path, way: str) -> None:
    """It goes on without what is lost, and is none the worse when its text is read again."""
    settings = small(tiny, "--recall=32")
    run("chat", *settings, "--session=x", stdin=f"{MESSAGE}\nWhat is in it?\n")
    archive = chats_folder() / "x.h2o.archive"
    size = archive.stat().st_size
    archive.unlink()
    output = run("chat", *settings, "--session=x", stdin="")
    assert output.code == 0
    assert LOST.search(output.notes)
    if way == "option":
        output = run("chat", *settings, "--session=x", "--reread", stdin="Why?\n")
    else:
        run("chat", *settings, "--session=y", stdin="Hello\n")
        output = run("chat", *settings, "--session=y", stdin="/load x --reread\nWhy?\n")
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
    (archive,) = tmp_path.glob("*.archive")
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


def test_generate_with_recall_is_the_same_for_a_seed(tiny: Path) -> None:
    """The same seed gives the same story."""
    arguments = ["generate", "-p", MESSAGE, *small(tiny, "--recall=32"), "-n200"]
    first, second = run(*arguments), run(*arguments)
    assert first.code == 0, first.notes
    assert first.text == second.text
    assert first.text != run(*arguments, "--recall=0").text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recall=120"], "recall is 120 rows, of heavy 60 + recent 60, and at least one "),
        (["--recall=1.5"], "recall is 1.5, more than the whole window"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny: Path, arguments: list[str], message: str) -> None:
    for command in (["chat"], ["generate", "-p", "a"]):
        output = run(*command, *small(tiny, *arguments), stdin="")
        assert output.code != 0
        assert message in output.notes
