"""`pyh2o sessions`: manage the sessions that `pyh2o chat` and the server have saved."""

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
"""Export formats by file name extension; other files get the session."""

app = typer.Typer(cls=Group, invoke_without_command=True)
SessionName = Annotated[
    str, typer.Argument(help="Name of the session.", autocompletion=complete_session)
]


# -------------------------------------------------------------------------------------------------
# Listing and searching
# -------------------------------------------------------------------------------------------------


@app.callback()
def sessions(context: typer.Context) -> None:
    """Manage saved conversations and stories; without a command, list them."""
    if context.invoked_subcommand is None:
        with reported_errors():
            list_command()


@app.command("list")
def list_command() -> None:
    """List saved sessions with their first words, the most recent first."""
    texts = [read_text(chat) for chat in saved_chats()]
    for line in lines_of(texts):
        terminal.write(f"{line}\n")
    if not texts:
        terminal.say(f"no saved sessions in {chats_folder()} yet: `pyh2o chat` saves each turn")
        return
    total = sum(text.n_bytes for text in texts)
    terminal.say(f"{len(texts)} in {chats_folder()}, {total / 1e6:,.1f} MB")


def read_text(chat: SavedChat) -> SavedText:
    """Read a session's file."""
    # imported here, as below, because it loads llama.cpp, which would delay `--help`
    from pyh2o.sessions.listing import read_saved_text

    return read_saved_text(chat)


def lines_of(texts: Sequence[SavedText]) -> list[str]:
    """Return a line per session: time of the last change, size and first words."""
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
        list[str], typer.Argument(help="Words that a turn or a paragraph must contain.")
    ],
) -> None:
    """Search turns of conversations and paragraphs of stories for all of these words."""
    wanted = [" ".join(word.split()).casefold() for word in words]
    n_found = 0
    for text in map(read_text, saved_chats()):
        for place, passage in _passages(text):
            content = " ".join(passage.split())
            if all(word in content.casefold() for word in wanted):
                # case folding may change the length of a text, but hardly the offset
                start = max(0, content.casefold().find(wanted[0]) - SHORT // 2)
                shown = ("..." if start else "") + shortened(content[start:])
                terminal.write(f"{text.name}  {place}  {shown}\n")
                n_found += 1
    terminal.say(f"{n_found} found")


def _passages(text: SavedText) -> Iterator[tuple[str, str]]:
    """Yield the parts of a text to search: a label and the text of each."""
    for number, turn in enumerate(text.turns, start=1):
        yield f"turn {number}", f"{turn.user} {turn.answer}"
    for number, paragraph in enumerate(filter(str.strip, text.text.splitlines()), start=1):
        yield f"paragraph {number}", paragraph


# -------------------------------------------------------------------------------------------------
# Removing, copying, exporting
# -------------------------------------------------------------------------------------------------


@app.command("rm")
def remove(
    names: Annotated[
        list[str],
        typer.Argument(help="Names of the sessions.", autocompletion=complete_session),
    ],
) -> None:
    """Delete saved sessions permanently."""
    for chat in [_saved(name) for name in names]:
        with closing(ChatLock(chat)):
            chat.remove()
        terminal.say(f"removed {chat.name}")


@app.command("copy")
def copy(name: SessionName, new: Annotated[str, typer.Argument(help="Name of the copy.")]) -> None:
    """Copy a saved conversation or story with its archive; both can be resumed."""
    chat, other = _saved(name), SavedChat(new)
    with closing(ChatLock(other)):
        if other.path.exists():
            raise InputError(f"session {new} exists: give another name")
        _copy(chat, other.path)
    terminal.say(f"copied {name} to {new}")


@app.command("export")
def export(
    name: SessionName,
    file: Annotated[
        Path,
        typer.Argument(
            help="New file: .txt, .md and .json get the messages, others the session; - is "
            "standard output, as text."
        ),
    ],
) -> None:
    """Export a saved conversation to a file: its messages, or the session.

    `/load FILE` in a chat resumes a session. A session with recall has a second file with its
    archive, FILE.archive: keep the two together.
    """
    chat = _saved(name)
    form = "text" if file == STDOUT else FORMS.get(file.suffix.lower())
    for path in (file,) if form else (file, of_session(file)):
        if path.exists():
            raise InputError(f"{path} exists: give another name")
    if form is None:
        _copy(chat, file)
        archive = of_session(file)
        extra = f" and {archive.name}" if archive.exists() else ""
        terminal.say(f"exported {name} to {file}{extra}: resume it with /load")
        return
    # imported here because it loads llama.cpp, which would delay `--help`
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
    """Return the session of this name, or raise an InputError."""
    chat = SavedChat(name)
    if not chat.path.is_file():
        raise InputError(f"unknown session {name}: see `pyh2o sessions list`")
    return chat


def _copy(chat: SavedChat, target: Path) -> None:
    """Copy a session that is not open in a chat."""
    with closing(ChatLock(chat)):
        is_whole = copy_session(chat.path, target)
    if not is_whole:
        terminal.say(
            f"warning: the archive of {chat.name} is missing: evicted rows cannot be recalled "
            "until the text is read again (--reread)",
            style="yellow",
        )
