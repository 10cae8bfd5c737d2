"""`pyh2o sessions`: what `pyh2o chat` and the server have saved."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyh2o.sessions.saved import ChatLock, SavedChat, chats_folder, saved_chats
from pyh2o.system.archives import of_session

from .chat.listing import lines_of, texts_of
from .errors import InputError, reported_errors
from .shell_completion import complete_session
from .terminal.terminal import terminal

if TYPE_CHECKING:
    from pyh2o.sessions.copies import CopiedConversation

app = typer.Typer(help="The conversations that `pyh2o chat` has saved.", no_args_is_help=True)


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
        str, typer.Argument(help="Name of the conversation.", autocompletion=complete_session)
    ],
    new: Annotated[str, typer.Argument(help="Name of the copy.")],
) -> None:
    """Copy a saved conversation, with its archive, so that both can be gone on with."""
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
    file: Annotated[Path, typer.Argument(help="New file.")],
) -> None:
    """Write a saved conversation to a file, which `/load FILE` in a chat goes on from.

    One that recalls has its archive in a second file, FILE.archive: keep the two together.
    """
    with reported_errors():
        chat = _saved(name)
        for path in (file, of_session(file)):
            if path.exists():
                raise InputError(f"{path} exists: give another name")
        copied = _copy(chat, file)
        archive = "" if copied.archive is None else f" and {copied.archive.name} beside it"
        terminal.say(f"exported {name} to {file}{archive}: /load goes on from there")


def _saved(name: str) -> SavedChat:
    """The conversation of this name.

    Raises:
        InputError: there is none.
    """
    chat = SavedChat(name)
    if not chat.path.is_file():
        raise InputError(f"there is no session {name}: see `pyh2o sessions list`")
    return chat


def _copy(chat: SavedChat, target: Path) -> CopiedConversation:
    """Copy a conversation that is not open in a chat."""
    # Imported here for the same reason as above.
    from pyh2o.sessions.copies import copy_conversation

    with closing(ChatLock(chat)):
        copied = copy_conversation(chat.path, target)
    if copied.lacks_archive:
        terminal.say(
            f"warning: the archive of {chat.name} is missing: what left its cache cannot be "
            "recalled any more",
            style="yellow",
        )
    return copied


@app.command("path")
def path() -> None:
    """Print the folder of the saved conversations (PYH2O_CHATS changes it)."""
    with reported_errors():
        terminal.write(f"{chats_folder()}\n")
