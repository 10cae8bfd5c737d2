"""`--recall` on the command line, with the tiny model as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cli_fakes import run
from needed import needed
from pyh2o.cli.options import RunOptions
from pyh2o.errors import ModelError
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
        (["--session=x"], None, None),
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
