"""`pyh2o sessions`: the conversations that `pyh2o chat` has saved."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Annotated

import typer

from pyh2o.errors import SessionError

from .chat.saved import ChatLock, SavedChat, chats_folder, saved_chats
from .errors import InputError, one_line, reported_errors
from .terminal.terminal import terminal
from .terminal.wording import count, shortened

app = typer.Typer(help="The conversations that `pyh2o chat` has saved.", no_args_is_help=True)


@app.command("list")
def list_command() -> None:
    """List the saved conversations, the one last changed first, with their first words."""
    with reported_errors():
        chats = saved_chats()
        width = max((len(chat.name) for chat in chats), default=0)
        total = 0
        for chat in chats:
            about = chat.path.stat()
            changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(about.st_mtime))
            n_bytes = about.st_size + chat.archive_bytes
            size = f"{n_bytes / 1e6:,.1f} MB"
            terminal.write(f"{chat.name:<{width}}  {changed}  {size:>10}  {_summary(chat)}\n")
            total += n_bytes
        terminal.say(f"{len(chats)} in {chats_folder()}, {total / 1e6:,.1f} MB")


def _summary(chat: SavedChat) -> str:
    """How long a conversation is, and how it begins."""
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.saved_conversation import read_saved_conversation

    try:
        turns = read_saved_conversation(chat.path).turns
    except SessionError as error:
        return one_line(error)
    first = f"  {shortened(turns[0].user)}" if turns else ""
    return f"{count(len(turns), 'turn'):>9}{first}"


@app.command("rm")
def remove(
    names: Annotated[list[str], typer.Argument(help="Names of the conversations.")],
) -> None:
    """Remove saved conversations for good."""
    with reported_errors():
        chats = [SavedChat(name) for name in names]
        for chat in chats:
            if not chat.path.is_file():
                raise InputError(f"there is no session {chat.name}: see `pyh2o sessions list`")
        for chat in chats:
            with closing(ChatLock(chat)):
                chat.remove()
            terminal.say(f"removed {chat.name}")


@app.command("path")
def path() -> None:
    """Print the folder of the saved conversations (PYH2O_CHATS changes it)."""
    with reported_errors():
        terminal.write(f"{chats_folder()}\n")
