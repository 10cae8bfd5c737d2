"""The slash commands for files and saved sessions."""

from __future__ import annotations

import shlex
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from pyh2o.system.home import expanded

from ..errors import InputError
from ..sessions import lines_of
from ..shell_completion import complete_session
from ..terminal.terminal import terminal
from ..terminal.wording import count
from ..text_files import text_of
from .command_table import Commands
from .opening import chat_database, open_conversation, say_last_exchange

if TYPE_CHECKING:
    from .loop import Chat

FILE_COMMANDS = Commands()


@FILE_COMMANDS.add("/clear")
def _clear(chat: Chat, _argument: str) -> None:
    """Start a new conversation; a saved one stays under its name."""
    n_turns, left = len(chat.conversation.turns), _make_sure_it_is_saved(chat)
    with chat.answers.safe_interrupts():
        if left:
            chat.conversation.place = None
        chat.conversation.clear()
    what = f"removed: {count(n_turns, 'turn')}"
    if left:
        with chat.autosave.moving(None):
            what = (
                f"a new conversation starts; `pyh2o chat --session {shlex.quote(left)}` resumes "
                "the previous one"
            )
    terminal.say(what + ("; the system prompt stays" if chat.conversation.system else ""))


def _make_sure_it_is_saved(chat: Chat) -> str:
    """Wait until the conversation is saved, and return its name; "" if it is not saved."""
    if not chat.autosave.enabled or not chat.conversation.turns:
        return ""
    chat.autosave.settle()
    chat.autosave.save_now(chat.conversation, leaving=True)
    return chat.autosave.name


@FILE_COMMANDS.add("/read", "FILE [TEXT]")
def _read(chat: Chat, argument: str) -> None:
    """Send the text of a file, followed by a question."""
    file, question = _file_and_rest(argument)
    text = text_of(file)
    chat.send(f"{text}\n\n{question}" if question else text)


@FILE_COMMANDS.add("/image", "FILE [TEXT]")
def _image(chat: Chat, argument: str) -> None:
    """Send a picture or sound, followed by a question."""
    file, question = _file_and_rest(argument)
    projector = chat.conversation.llm.model.projector
    if projector is None:
        raise InputError(
            "this model was loaded without a projector for pictures and sound: start the chat with "
            "--mmproj FILE"
        )
    with chat.answers.safe_interrupts():
        mark = projector.mark(file.read_bytes())
    chat.send(f"{mark}\n{question}")


@FILE_COMMANDS.add("/save", "[FILE]")
def _save(chat: Chat, argument: str) -> None:
    """Save the conversation, or a copy in a file."""
    if argument:
        path = _whole_file(argument)
        if path.exists():
            raise InputError(f"{path} exists: give another name")
        chat.conversation.save(path)
        terminal.say(f"saved to {path}: /load resumes it")
    elif not chat.autosave.enabled:
        raise InputError("this chat is not saved automatically: /save FILE saves a copy")
    elif not chat.conversation.turns:
        raise InputError("there is nothing to save yet: send a message")
    else:
        chat.autosave.save_now(chat.conversation)
        terminal.say(f"saved as {chat.autosave.name}")


@FILE_COMMANDS.add("/load", "NAME|FILE", words=complete_session)
def _load(chat: Chat, argument: str) -> None:
    """Resume a saved conversation by name, number in /sessions, or file."""
    found = _saved(chat, argument)
    if found is None or Path(argument).is_file():
        file = _whole_file(argument)
        if not file.exists():
            raise InputError(f"no session or file {file}: /sessions lists the sessions")
        _open(chat, file)
        chat.autosave.save(chat.conversation)
        if found is not None:
            terminal.say(f"this is the file {file}, not the session of that name")
        return
    with chat_database(chat) as database:
        title = database.info(found).title
    if found == chat.autosave.text:
        raise InputError(f"session {title} is already open in this chat")
    _open(chat, found)
    terminal.say(f"this is session {title}")


def _open(chat: Chat, saved: int | Path) -> None:
    """Resume a session, or a copy of a file; if that fails, the current conversation stays."""
    left = _make_sure_it_is_saved(chat)
    with chat.autosave.moving(saved if isinstance(saved, int) else None, leave=bool(left)):
        open_conversation(chat, saved)
    say_last_exchange(chat)


@FILE_COMMANDS.add("/sessions")
def _sessions(chat: Chat, _argument: str) -> None:
    """List saved sessions."""
    with chat_database(chat) as database:
        texts = database.texts()
        lines = lines_of(database, texts)
    chat.listed = [text.id for text in texts]
    for number, (text, line) in enumerate(zip(texts, lines, strict=True), start=1):
        this = "  (this one)" if text.id == chat.autosave.text else ""
        terminal.say(f"{number:>2}  {line}{this}")
    terminal.say("/load NAME or /load NUMBER resumes one" if texts else "no saved sessions yet")


def _saved(chat: Chat, argument: str) -> int | None:
    """Return the session of this name, or else of this number in /sessions."""
    with chat_database(chat) as database:
        found = database.find(argument)
    if found is None and argument.isdecimal() and 0 < int(argument) <= len(chat.listed):
        return chat.listed[int(argument) - 1]
    return found


def _whole_file(argument: str) -> Path:
    """Return an argument as a path."""
    file, rest = _file_and_rest(argument)
    if rest:
        raise InputError(f"{argument!r} is not a file: put quotes around a name with spaces")
    return file


def _file_and_rest(argument: str) -> tuple[Path, str]:
    """Split an argument into a path, quoted or escaped if it has spaces, and the text after it."""
    if "\0" in argument:
        raise InputError(f"{argument!r} is not a valid file name")
    with suppress(OSError, ValueError):  # too long for a name
        if (whole := expanded(argument)).is_file():
            return whole, ""
    text = StringIO(argument)
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        name = lexer.get_token() or ""
    except ValueError:
        raise InputError(f"unclosed quote in {argument!r}") from None
    return expanded(name), text.read().strip()
