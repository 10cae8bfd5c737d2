"""`pyh2o sessions`: what `pyh2o chat` and the server have saved."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyh2o.sessions.saved import ChatLock, SavedChat, chats_folder, copy_session, saved_chats
from pyh2o.system.archives import of_session

from .errors import InputError, reported_errors
from .help import Group
from .shell_completion import complete_session
from .terminal.terminal import terminal
from .terminal.wording import SHORT, count, shortened
from .text_files import write_file

if TYPE_CHECKING:
    from pyh2o.sessions.listing import SavedText

STDOUT = Path("-")
FORMS = {".txt": "text", ".md": "markdown", ".json": "json"}
"""What files with these endings get; others get the session."""

app = typer.Typer(cls=Group, invoke_without_command=True)
SessionName = Annotated[
    str, typer.Argument(help="Name of the session.", autocompletion=complete_session)
]


# -------------------------------------------------------------------------------------------------
# What is saved
# -------------------------------------------------------------------------------------------------


@app.callback()
def sessions(context: typer.Context) -> None:
    """Saved conversations and stories: without a command, list them."""
    if context.invoked_subcommand is None:
        with reported_errors():
            list_command()


@app.command("list")
def list_command() -> None:
    """List what is saved, what was last changed first, with its first words."""
    texts = [read_text(chat) for chat in saved_chats()]
    for line in lines_of(texts):
        terminal.write(f"{line}\n")
    if not texts:
        terminal.say(f"nothing is saved in {chats_folder()} yet: `pyh2o chat` saves as it goes")
        return
    total = sum(text.n_bytes for text in texts)
    terminal.say(f"{len(texts)} in {chats_folder()}, {total / 1e6:,.1f} MB")


def read_text(chat: SavedChat) -> SavedText:
    """What a session's file says."""
    # Imported here, as below, because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.listing import read_saved_text

    return read_saved_text(chat)


def lines_of(texts: Sequence[SavedText]) -> list[str]:
    """A line for each: when it was changed, how large it is, how it begins."""
    width = max((len(text.name) for text in texts), default=0)
    lines: list[str] = []
    for text in texts:
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(text.changed))
        size = f"{text.n_bytes / 1e6:,.1f} MB"
        what = "a story" if text.kind == "story" else count(len(text.turns), "turn")
        first = shortened(text.turns[0].user if text.turns else text.text)
        summary = text.trouble or f"{what:>9}  {first}".rstrip()
        lines.append(f"{text.name:<{width}}  {changed}  {size:>10}  {summary}")
    return lines


@app.command("search")
def search(
    words: Annotated[
        list[str], typer.Argument(help="Words that a message with its answer, or a paragraph, has.")
    ],
) -> None:
    """Find the turns of conversations and the paragraphs of stories that have all these words."""
    wanted = [" ".join(word.split()).casefold() for word in words]
    n_found = 0
    for text in map(read_text, saved_chats()):
        for place, passage in _passages(text):
            said = " ".join(passage.split())
            if all(word in said.casefold() for word in wanted):
                # folding may change the length of a text, but hardly the place
                start = max(0, said.casefold().find(wanted[0]) - SHORT // 2)
                shown = ("..." if start else "") + shortened(said[start:])
                terminal.write(f"{text.name}  {place}  {shown}\n")
                n_found += 1
    terminal.say(f"{n_found} found")


def _passages(text: SavedText) -> Iterator[tuple[str, str]]:
    """The parts of a text that are searched: where each is, and what it says."""
    for number, turn in enumerate(text.turns, start=1):
        yield f"turn {number}", f"{turn.user} {turn.answer}"
    for number, paragraph in enumerate(filter(str.strip, text.text.splitlines()), start=1):
        yield f"paragraph {number}", paragraph


# -------------------------------------------------------------------------------------------------
# Removed, copied, exported
# -------------------------------------------------------------------------------------------------


@app.command("rm")
def remove(
    names: Annotated[
        list[str],
        typer.Argument(help="Names of the conversations.", autocompletion=complete_session),
    ],
) -> None:
    """Remove saved conversations for good."""
    for chat in [_saved(name) for name in names]:
        with closing(ChatLock(chat)):
            chat.remove()
        terminal.say(f"removed {chat.name}")


@app.command("copy")
def copy(name: SessionName, new: Annotated[str, typer.Argument(help="Name of the copy.")]) -> None:
    """Copy a saved conversation or story, with its archive, so that both can be gone on with."""
    chat, other = _saved(name), SavedChat(new)
    with closing(ChatLock(other)):
        if other.path.exists():
            raise InputError(f"there is a session {new}: give another name")
        _copy(chat, other.path)
    terminal.say(f"copied {name} to {new}")


@app.command("export")
def export(
    name: SessionName,
    file: Annotated[
        Path,
        typer.Argument(
            help="New file: .txt, .md and .json get what was said, others the session; - is "
            "standard output, as text."
        ),
    ],
) -> None:
    """Write a saved conversation to a file: what was said, or the session.

    `/load FILE` in a chat goes on from a session. One that recalls has its archive in a second
    file, FILE.archive: keep the two together.
    """
    chat = _saved(name)
    form = "text" if file == STDOUT else FORMS.get(file.suffix.lower())
    for path in (file,) if form else (file, of_session(file)):
        if path.exists():
            raise InputError(f"{path} exists: give another name")
    if form is None:
        _copy(chat, file)
        archive = of_session(file)
        beside = f" and {archive.name} beside it" if archive.exists() else ""
        terminal.say(f"exported {name} to {file}{beside}: /load goes on from there")
        return
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.listing import text_of

    saved = read_text(chat)
    if saved.trouble:
        raise InputError(saved.trouble)
    text = text_of(saved, form)
    if file == STDOUT:
        terminal.write(text)
    else:
        write_file(file, text.encode())
        terminal.say(f"exported {name} to {file} as {form}")


def _saved(name: str) -> SavedChat:
    """The conversation of this name."""
    chat = SavedChat(name)
    if not chat.path.is_file():
        raise InputError(f"there is no session {name}: see `pyh2o sessions list`")
    return chat


def _copy(chat: SavedChat, target: Path) -> None:
    """Copy a session that is not open in a chat."""
    with closing(ChatLock(chat)):
        is_whole = copy_session(chat.path, target)
    if not is_whole:
        terminal.say(
            f"warning: the archive of {chat.name} is missing: what left its cache cannot be "
            "found until its text is read again (--reread)",
            style="yellow",
        )
