"""`--mmproj` and `/image`, with a tiny model and its projector."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_fakes import Output, run
from tiny_pictures import write_models
from tiny_projector import png

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture
def models(tmp_path: Path) -> tuple[str, str]:
    model, mmproj = write_models(tmp_path)
    (tmp_path / "my cat.png").write_bytes(png(1))
    return str(model), str(mmproj)


def chat(models: tuple[str, str], lines: str, *options: str) -> Output:
    given = ("-m", models[0], "--ctx", "512", "-n", "4", "--seed", "1", *options)
    return run("chat", *given, stdin=lines)


def test_a_picture_is_sent_and_saved(models: tuple[str, str]) -> None:
    seeing = ("--mmproj", models[1], "--session", "cat")
    first = chat(models, '/image "my cat.png" what is that?\n', *seeing)
    assert (first.code, first.notes.count("error")) == (0, 0)
    again = chat(models, "and now?\n", *seeing)
    assert again.code == 0, again
    assert "1 turn" in again.notes
    blind = chat(models, "and now?\n", "--session", "cat")
    assert blind.code == 1
    assert "has pictures" in blind.notes
    assert "--mmproj FILE" in blind.notes


def test_messages_are_shown_without_marks(models: tuple[str, str]) -> None:
    output = chat(models, '/image "my cat.png" what is that?\n/undo\n', "--mmproj", models[1])
    assert "removed: [picture] what is that?" in output.notes


@pytest.mark.parametrize(
    ("options", "line", "says"),
    [
        ((), "/image my\\ cat.png", "start the chat with --mmproj FILE"),
        (("--mmproj",), "/image tiny.gguf", "give JPEG, PNG, BMP or GIF"),
        (("--mmproj",), "/image none.png", "No such file"),
    ],
)
def test_what_cannot_be_sent(
    options: tuple[str, ...], line: str, says: str, models: tuple[str, str]
) -> None:
    output = chat(models, f"{line}\n", *options, *(models[1:] if options else ()))
    assert output.code == 1
    assert says in output.notes


def test_a_projector_that_does_not_fit(models: tuple[str, str]) -> None:
    output = chat(models, "hello\n", "--mmproj", models[0])
    assert output.code == 1
    assert "is not a projector for this model" in output.notes
