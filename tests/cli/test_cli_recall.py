"""`--recall` on the command line, with the tiny model as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli_fakes import run
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

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


def test_chat(tiny: Path) -> None:
    """The line under an answer, the passages, the numbers and the picture."""
    recall = ["--recall=32", "--recall-type=f16", "--recall-mib=5"]
    output = run("chat", *small(tiny, *recall), stdin=SCRIPT)
    assert output.code == 0, output.notes
    assert re.search(r" evicted · 32 recalled · ", output.notes)
    assert re.search(r"^ +[\d,]+ \.\. [\d,]+ +\d\.\d{3}  \S", output.notes, re.MULTILINE)
    assert re.search(
        r"^archive +\d+ tokens · \d\.\d MiB · written in \d\.\d{3} s$", output.notes, re.MULTILINE
    )
    recalled = re.search(
        r"^recalled +32 of 32 rows · 2 times in \d\.\d{3} s · missed (\d+\.\d)% of the attention, "
        r"without recall (\d+\.\d)%$",
        output.notes,
        re.MULTILINE,
    )
    assert recalled, output.notes
    assert float(recalled[1]) < float(recalled[2])
    assert re.search(r"^ *↑[ ↑]*$", output.notes, re.MULTILINE)
    assert re.search(
        r"^↑ recalled: \d+ passages? of \d+ tokens came back", output.notes, re.MULTILINE
    )


def test_chat_without_recall(tiny: Path) -> None:
    output = run("chat", *small(tiny), stdin=SCRIPT)
    assert output.code == 1
    assert "error: this chat recalls nothing: start it with --recall 0.05\n" in output.notes
    assert "archive" not in output.notes
    assert "↑" not in output.notes


def test_before_anything_is_evicted(tiny: Path) -> None:
    output = run("chat", *small(tiny, "--recall=32"), stdin="Hello\n/recalled\n")
    assert output.code == 0
    assert "nothing is recalled: " in output.notes
    assert " recalled · " not in output.notes


def test_a_chat_goes_on_with_what_was_recalled(tiny: Path) -> None:
    settings = small(tiny, "--recall=32")
    whole = run("chat", *settings, stdin=f"{MESSAGE}\nWhat is in it?\nWhy?\n/recalled\n")
    first = run("chat", *settings, "--session=x", stdin=f"{MESSAGE}\nWhat is in it?\n/recalled\n")
    again = run("chat", *settings, "--session=x", stdin="/recalled\nWhy?\n/recalled\n")
    assert passages(first.notes) != []
    n = len(passages(first.notes))
    assert passages(again.notes) == passages(first.notes) + passages(whole.notes)
    assert len(passages(again.notes)) > n
    assert whole.text.endswith(again.text)


def passages(notes: str) -> list[str]:
    return re.findall(r"^ +[\d,]+ \.\. .*$", notes, re.MULTILINE)


def test_generate(tiny: Path) -> None:
    """The same seed gives the same story; the last line says what was recalled."""
    arguments = ["generate", "-p", MESSAGE, *small(tiny, "--recall=32"), "-n200"]
    first, second = run(*arguments), run(*arguments)
    assert first.code == 0, first.notes
    assert first.text == second.text
    assert first.text != run(*arguments, "--recall=0").text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recall=32", "--no-evict"], "nothing is evicted that could be recalled"),
        (["--recall=1.5"], "recall is 1.5, more than the whole window"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny: Path, arguments: list[str], message: str) -> None:
    for command in (["chat"], ["generate", "-p", "a"]):
        output = run(*command, *small(tiny, *arguments), stdin="")
        assert output.code != 0
        assert message in output.notes


def test_options_of_the_server() -> None:
    output = run("serve", "--help")
    for option in ("--recall", "--recall-type", "--recall-mib"):
        assert option in output.text
