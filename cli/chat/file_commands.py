"""The commands of a chat about files and about the conversations that are saved."""

from __future__ import annotations

import shlex
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from pyh2o.errors import SessionError
from pyh2o.sessions.saved import SavedChat, saved_chats
from pyh2o.system.home import expanded

from ..errors import InputError
from ..sessions import lines_of, read_text
from ..shell_completion import complete_session
from ..terminal.terminal import terminal
from ..terminal.wording import count
from ..text_files import text_of
from .command_table import Commands
from .opening import open_conversation, say_last_exchange

if TYPE_CHECKING:
    from .loop import Chat

REREAD = "--reread"

FILE_COMMANDS = Commands()


@FILE_COMMANDS.add("/clear")
def _clear(chat: Chat, _argument: str) -> None:
    """Begin a new conversation; a saved one stays under its name."""
    n_turns, left = len(chat.conversation.turns), _make_sure_it_is_saved(chat)
    with chat.answers.undisturbed():
        chat.conversation.clear()
    what = f"forgotten: {count(n_turns, 'turn')}"
    if left:
        with chat.autosave.moving(None):
            what = (
                f"a new conversation begins, and `pyh2o chat --session {shlex.quote(left)}` "
                "goes on with the one so far"
            )
    terminal.say(what + ("; the system prompt stays" if chat.conversation.system else ""))


def _make_sure_it_is_saved(chat: Chat) -> str:
    """The name that the conversation is saved under, or "" if it is not to be saved."""
    if not chat.autosave.enabled or not chat.conversation.turns:
        return ""
    if not chat.autosave.settle():
        chat.autosave.save_now(chat.conversation)
    return chat.autosave.name


@FILE_COMMANDS.add("/read", "FILE [TEXT]")
def _read(chat: Chat, argument: str) -> None:
    """Send the text of a file, and a question after it."""
    file, question = _file_and_rest(argument)
    text = text_of(file)
    chat.send(f"{text}\n\n{question}" if question else text)


@FILE_COMMANDS.add("/image", "FILE [TEXT]")
def _image(chat: Chat, argument: str) -> None:
    """Send a picture, or sound, and a question after it."""
    file, question = _file_and_rest(argument)
    projector = chat.conversation.llm.model.projector
    if projector is None:
        raise InputError(
            "this model was loaded without a projector for pictures and sound: start the chat with "
            "--mmproj FILE"
        )
    with chat.answers.undisturbed():
        mark = projector.mark(file.read_bytes())
    chat.send(f"{mark}\n{question}")


@FILE_COMMANDS.add("/save", "[FILE]")
def _save(chat: Chat, argument: str) -> None:
    """Save the conversation, or a copy of it in a file."""
    if argument:
        path = _whole_file(argument)
        if path.exists():
            raise InputError(f"{path} exists: give another name")
        chat.conversation.save(path, portable=True)
        terminal.say(f"saved in {path}: /load goes on from here")
    elif not chat.autosave.enabled:
        raise InputError("this chat is not saved as it goes: /save FILE saves a copy of it")
    elif not chat.conversation.turns:
        raise InputError("there is nothing to save yet")
    else:
        chat.autosave.save_now(chat.conversation)
        terminal.say(f"saved as {chat.autosave.name}")


@FILE_COMMANDS.add("/load", f"NAME|FILE [{REREAD}]", words=complete_session)
def _load(chat: Chat, argument: str) -> None:
    """Go on with a saved conversation, by its name, its number in /sessions, or a file."""
    name, _, last = argument.rpartition(" ")
    reread = last == REREAD and bool(name.strip())
    argument = name.rstrip() if reread else argument
    found = _saved(chat, argument)
    if found is None or Path(argument).is_file():
        file = _whole_file(argument)
        if not file.exists():
            raise InputError(f"there is no file {file}, and no such session: /sessions lists them")
        _open(chat, file, None, reread=reread)
        if found is not None:
            terminal.say(f"this is the file {file}, not the session of that name")
        return
    _open(chat, found.path, found, reread=reread)
    terminal.say(f"this is session {found.name}")


def _open(chat: Chat, path: Path, session: SavedChat | None, *, reread: bool) -> None:
    """Go on with what is in a file; the conversation so far stays, also if that fails.

    Args:
        chat: which gets it.
        path: of the file.
        session: what is saved there, to be saved there again; None for a copy.
        reread: whether to read its text again without asking.
    """
    if session is not None and session.name == chat.autosave.name:
        raise InputError(f"this is session {session.name} already")
    left = _make_sure_it_is_saved(chat)
    with chat.autosave.moving(session, leave=bool(left)):
        again = f": /load {path if session is None else session.name} {REREAD}"
        open_conversation(chat, path, reread=reread, cure=again)
    say_last_exchange(chat, is_reread=reread)
    if session is None:
        chat.autosave.save(chat.conversation)


@FILE_COMMANDS.add("/sessions")
def _sessions(chat: Chat, _argument: str) -> None:
    """List the conversations that are saved."""
    chat.listed = saved_chats()
    texts = [read_text(each) for each in chat.listed]
    for number, (text, line) in enumerate(zip(texts, lines_of(texts), strict=True), start=1):
        this = "  (this one)" if text.name == chat.autosave.name else ""
        terminal.say(f"{number:>2}  {line}{this}")
    terminal.say("/load NAME, or its number here, goes on" if texts else "none is saved yet")


def _saved(chat: Chat, argument: str) -> SavedChat | None:
    """The saved conversation of this name, or else of this number."""
    try:
        named = SavedChat(argument)
    except SessionError:  # no name
        return None
    if not named.path.is_file() and argument.isdecimal() and 0 < int(argument) <= len(chat.listed):
        return chat.listed[int(argument) - 1]
    return named if named.path.is_file() else None


def _whole_file(argument: str) -> Path:
    """The file that an argument is."""
    file, rest = _file_and_rest(argument)
    if rest:
        raise InputError(f"{argument!r} is more than a file: put quotes around a name with spaces")
    return file


def _file_and_rest(argument: str) -> tuple[Path, str]:
    """A file, in quotes or with backslashes if its name has spaces, and the text after it."""
    if "\0" in argument:
        raise InputError(f"{argument!r} cannot be the name of a file")
    with suppress(OSError, ValueError):  # too long for a name, such as a whole question
        if (whole := expanded(argument)).is_file():
            return whole, ""
    text = StringIO(argument)
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        name = lexer.get_token() or ""
    except ValueError:
        raise InputError(f"a quote in {argument!r} is not closed") from None
    return expanded(name), text.read().strip()
