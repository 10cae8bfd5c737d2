"""`pyh2o sessions`: what `pyh2o chat` and the server have saved."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyh2o.sessions.saved import ChatLock, SavedChat, chats_folder, saved_chats
from pyh2o.system.archives import of_session
from pyh2o.system.files import replacement

from .chat.listing import PARAGRAPH, TURN, found_passages, lines_of, texts_of
from .errors import InputError, reported_errors
from .help import Group
from .shell_completion import complete_session
from .terminal.terminal import terminal
from .terminal.wording import count

if TYPE_CHECKING:
    from pyh2o.sessions.copies import CopiedSession

STDOUT = Path("-")
TEMPORARY = ".pyh2o-export-"


class Form(str, Enum):
    """What a conversation can be exported as, by its name."""

    session = "session"
    text = "text"
    markdown = "markdown"
    json = "json"


ENDINGS = {".txt": Form.text, ".md": Form.markdown, ".markdown": Form.markdown, ".json": Form.json}
"""The forms that files with these endings have; others are session files."""

app = typer.Typer(
    cls=Group, help="The conversations that `pyh2o chat` has saved.", no_args_is_help=True
)


@app.command("list")
def list_command() -> None:
    """List what is saved, what was last changed first, with its first words."""
    with reported_errors():
        texts = texts_of(saved_chats())
        for line in lines_of(texts):
            terminal.write(f"{line}\n")
        total = sum(text.n_bytes for text in texts)
        terminal.say(f"{len(texts)} in {chats_folder()}, {total / 1e6:,.1f} MB")


@app.command("rm")
def remove(
    names: Annotated[
        list[str],
        typer.Argument(help="Names of the conversations.", autocompletion=complete_session),
    ],
) -> None:
    """Remove saved conversations for good."""
    with reported_errors():
        for chat in [_saved(name) for name in names]:
            with closing(ChatLock(chat)):
                chat.remove()
            terminal.say(f"removed {chat.name}")


@app.command("copy")
def copy(
    name: Annotated[
        str, typer.Argument(help="Name of the session.", autocompletion=complete_session)
    ],
    new: Annotated[str, typer.Argument(help="Name of the copy.")],
) -> None:
    """Copy a saved conversation or story, with its archive, so that both can be gone on with."""
    with reported_errors():
        chat, other = _saved(name), SavedChat(new)
        with closing(ChatLock(other)):
            if other.path.exists():
                raise InputError(f"there is a session {new}: give another name")
            _copy(chat, other.path)
        terminal.say(f"copied {name} to {new}")


@app.command("export")
def export(
    name: Annotated[
        str, typer.Argument(help="Name of the conversation.", autocompletion=complete_session)
    ],
    file: Annotated[
        Path, typer.Argument(help="New file; - is standard output, for all forms but session.")
    ],
    form: Annotated[
        Form | None,
        typer.Option(
            "--format",
            help="What was said as text, Markdown or JSON, or all of the session.",
            show_default="by the file's ending: .txt, .md, .json, or else session",
        ),
    ] = None,
) -> None:
    """Write a saved conversation to a file: what was said, or the session.

    `/load FILE` in a chat goes on from a session. One that recalls has its archive in a second
    file, FILE.archive: keep the two together.
    """
    with reported_errors():
        chat = _saved(name)
        is_stdout = file == STDOUT
        form = form or (Form.text if is_stdout else ENDINGS.get(file.suffix.lower(), Form.session))
        if is_stdout and form is not Form.session:
            terminal.write(_transcript(chat, form))
            return
        for path in (file, of_session(file)) if form is Form.session else (file,):
            if path.exists():
                raise InputError(f"{path} exists: give another name")
        if form is Form.session:
            _export_session(chat, file)
        else:
            text = _transcript(chat, form)
            with replacement(file, prefix=TEMPORARY) as new:
                new.write(text.encode())
            terminal.say(f"exported {name} to {file} as {form.value}")


def _export_session(chat: SavedChat, file: Path) -> None:
    copied = _copy(chat, file)
    archive = "" if copied.archive is None else f" and {copied.archive.name} beside it"
    terminal.say(f"exported {chat.name} to {file}{archive}: /load goes on from there")


def _transcript(chat: SavedChat, form: Form) -> str:
    """What was said, in a form that is not the session's.

    Raises:
        InputError: the session is damaged.
    """
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.listing import read_saved_text, text_of

    saved = read_saved_text(chat)
    if saved.trouble:
        raise InputError(saved.trouble)
    return text_of(saved, form.value)


@app.command("search")
def search(
    words: Annotated[
        list[str], typer.Argument(help="Words that a message with its answer, or a paragraph, has.")
    ],
) -> None:
    """Find the turns of conversations and the paragraphs of stories that have all these words."""
    with reported_errors():
        kinds: Counter[str] = Counter()
        sessions = 0
        for text in texts_of(saved_chats()):
            found = found_passages(text, words)
            for place, said in found:
                terminal.write(f"{text.name}  {place}  {said}\n")
                kinds[place.partition(" ")[0]] += 1
            sessions += bool(found)
        shown = [count(kinds[kind], kind) for kind in (TURN, PARAGRAPH) if kinds[kind]]
        where = f" in {count(sessions, 'session')}" if shown else "nothing"
        terminal.say(" and ".join(shown) + where)


def _saved(name: str) -> SavedChat:
    """The conversation of this name.

    Raises:
        InputError: there is none.
    """
    chat = SavedChat(name)
    if not chat.path.is_file():
        raise InputError(f"there is no session {name}: see `pyh2o sessions list`")
    return chat


def _copy(chat: SavedChat, target: Path) -> CopiedSession:
    """Copy a session that is not open in a chat."""
    # Imported here for the same reason as above.
    from pyh2o.sessions.copies import copy_session

    with closing(ChatLock(chat)):
        copied = copy_session(chat.path, target)
    if copied.lacks_archive:
        terminal.say(
            f"warning: the archive of {chat.name} is missing: what left its cache cannot be "
            "found until its text is read again (--reread)",
            style="yellow",
        )
    return copied


@app.command("path")
def path() -> None:
    """Print the folder of the saved conversations (PYH2O_CHATS changes it)."""
    with reported_errors():
        terminal.write(f"{chats_folder()}\n")
