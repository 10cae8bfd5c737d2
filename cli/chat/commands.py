"""The commands that begin with a slash in a chat."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from pyh2o.errors import SettingsError

from ..errors import InputError
from ..terminal.terminal import stderr, terminal
from ..terminal.wording import count, shortened
from . import keeping, pinning, swiping
from .file_arguments import file_and_rest, text_of
from .kv_picture import kv_picture
from .rereading import say_unread

if TYPE_CHECKING:
    from .loop import Chat

EMPTY = '""'
"""How an empty text is written."""
# Lines of the screen that `/kv` needs for what stands around the heavy hitters.
PICTURE_FRAME = 14
PICTURE_LINES = 16


@dataclass(frozen=True)
class Command:
    """A command of the chat.

    Attributes:
        name: with its slash.
        argument: how its argument is shown; "" if it takes none, in brackets if it need not be
            given.
        summary: one line for /help.
        run: does it; called with the chat and the argument.
        details: more lines for /help NAME.
    """

    name: str
    argument: str
    summary: str
    run: Callable[[Chat, str], None]
    details: str = ""

    @property
    def usage(self) -> str:
        """The command as it is typed."""
        return f"{self.name} {self.argument}".rstrip()

    @property
    def takes_file(self) -> bool:
        """Whether its argument begins with a file."""
        return "FILE" in self.argument


def run_command(chat: Chat, line: str) -> None:
    """Do what a line says that begins with a slash.

    Raises:
        PyH2OError: there is no such command, or it cannot be done.
    """
    name, argument = (*line.split(maxsplit=1), "")[:2]
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        raise InputError(
            f"unknown command {name}: {_hint(name, COMMANDS)}begin the line with a space to send "
            "it to the model"
        )
    if argument.strip() and not command.argument:
        raise InputError(f"{command.name} stands alone: /help {command.name[1:]} explains it")
    if not argument.strip() and command.argument and command.argument[0] != "[":
        raise InputError(f"{command.name} needs more: {command.usage}")
    command.run(chat, argument.strip())


def help_text() -> str:
    """All commands, one line each, and the keys."""
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{each.usage:<{width}}  {each.summary}" for each in COMMANDS.values()]
    return "\n".join([*lines, KEYS])


def _hint(name: str, known: dict[str, Command]) -> str:
    close = get_close_matches(name.lower(), known, n=1)
    return f"did you mean {close[0]}? " if close else "/help lists the commands; "


def _help(_chat: Chat, argument: str) -> None:
    if not argument:
        terminal.say(help_text())
        return
    name = argument if argument.startswith("/") else f"/{argument}"
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        raise InputError(f"there is no command {name}: {_hint(name, COMMANDS)}".strip(" ;"))
    terminal.say("\n".join(filter(None, [command.usage, command.summary, command.details])))


def _quit(chat: Chat, _argument: str) -> None:
    chat.left = True


def _clear(chat: Chat, _argument: str) -> None:
    chat.clear()


def _continue(chat: Chat, _argument: str) -> None:
    _need_turn(chat)
    last = chat.conversation.turns[-1]
    chat.answer(
        lambda: chat.conversation.go_on(max_tokens=chat.max_tokens),
        "the answer stays as it was",
        n_before=last.end - last.answer_start,
    )


def _regen(chat: Chat, _argument: str) -> None:
    _need_turn(chat)
    chat.answer(
        lambda: chat.conversation.regenerate(max_tokens=chat.max_tokens), "the old answer stays"
    )


def _undo(chat: Chat, _argument: str) -> None:
    _need_turn(chat)
    message = chat.conversation.turns[-1].user
    chat.change(chat.conversation.undo)
    turns = chat.conversation.turns
    left = f"{count(len(turns), 'turn')}, {count(turns[-1].end if turns else 0, 'token')} left"
    terminal.say(f"taken back: {shortened(message)} ({left})")
    say_unread(chat.conversation)


def _edit(chat: Chat, argument: str) -> None:
    _need_turn(chat)
    if not argument:
        if not chat.source.interactive:
            raise InputError("a script has to give the new message: /edit TEXT")
        argument = chat.source.read("edit> ", chat.conversation.turns[-1].user).strip()
    if not argument:
        terminal.say("the message stays as it was")
        return
    chat.answer(
        lambda: chat.conversation.edit(argument, max_tokens=chat.max_tokens),
        "the message stays as it was",
    )


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.set_system(None if argument == EMPTY else argument)
    system = chat.conversation.system
    terminal.say(f"system prompt: {system}" if system else "no system prompt but the model's own")


def _read(chat: Chat, argument: str) -> None:
    file, question = file_and_rest(argument)
    text = text_of(file)
    chat.send(f"{text}\n\n{question}" if question else text)


def _multi(chat: Chat, argument: str) -> None:
    chat.send(chat.source.read_multi(argument))


def _stats(chat: Chat, _argument: str) -> None:
    for label, text in chat.statistics():
        terminal.say(f"{label:<14} {text}")


def _kv(chat: Chat, argument: str) -> None:
    if argument == "all":
        lines = None
    elif argument.isdecimal() and int(argument) > 0:
        lines = int(argument)
    elif argument:
        raise InputError("/kv takes a number of lines, or all")
    else:
        lines = stderr.height - PICTURE_FRAME if stderr.is_terminal else PICTURE_LINES
        lines = max(lines, PICTURE_LINES // 2)
    for note in kv_picture(chat.conversation.llm, stderr, lines):
        terminal.say(note, wrap=True)


def _show_recalled(chat: Chat, _argument: str) -> None:
    llm = chat.conversation.llm
    if not llm.recalls:
        raise InputError("this chat recalls nothing: begin a new one, without --recall 0")
    spans = llm.recalled()
    if not spans:
        terminal.say(
            "nothing was recalled: no answer since the chat was opened has looked at what left "
            "the cache"
        )
    for span in spans:
        text = shortened(span.text)
        terminal.say(f"{span.start:>8,} .. {span.end - 1:<8,} {span.weight:7.3f}  {text}")


def _set(chat: Chat, argument: str) -> None:
    sampling = chat.conversation.sampling
    values = dataclasses.asdict(sampling)
    if argument:
        given, text = (*argument.split(maxsplit=1), "")[:2]
        name = _setting(given, list(values))
        if text:
            try:
                value = type(values[name])(text)
            except ValueError:
                raise SettingsError(f"{name} is {text!r}: give a number") from None
            sampling = dataclasses.replace(sampling, **{name: value})
            chat.change(lambda: setattr(chat.conversation, "sampling", sampling))
        values = {name: getattr(sampling, name)}
    for name, value in values.items():
        terminal.say(f"{name:<18} {value}")


def _setting(given: str, names: list[str]) -> str:
    """The name of a setting, which may be given by its first letters.

    Raises:
        InputError: there is no such setting, or several.
    """
    wanted = given.lower().replace("-", "_")
    matches = [name for name in names if name == wanted] or [
        name for name in names if name.startswith(wanted)
    ]
    if len(matches) == 1:
        return matches[0]
    near = matches or [name for name in names if wanted in name] or get_close_matches(wanted, names)
    hint = f"did you mean {' or '.join(near)}?" if near else "/set shows them all"
    raise InputError(f"there is no setting {given}: {hint}")


def _need_turn(chat: Chat) -> None:
    if not chat.conversation.turns:
        raise InputError("there is no message yet: type one")


_ALL = [
    Command("/help", "[COMMAND]", "this list, or more about one command", _help),
    Command("/quit", "", "leave", _quit, "So do Ctrl-D, /exit and /bye."),
    Command(
        "/new",
        "",
        "begin another conversation under the same system prompt",
        keeping.new,
        "The one so far stays saved under its name.",
    ),
    Command(
        "/clear",
        "",
        "forget all that was said; a conversation that is saved stays under its name",
        _clear,
    ),
    Command(
        "/continue",
        "",
        "go on with an answer that was stopped or cut",
        _continue,
        "It goes on as if it had not been stopped, in the same turn. One that only repeated itself "
        "may do so for a while more.",
    ),
    Command(
        "/regen",
        "",
        "answer the last message anew",
        _regen,
        "The new answer takes the place of the old one, which /answers brings back.",
    ),
    Command(
        "/answers",
        "[N]",
        "list the answers to the last message, or go back to one",
        swiping.answers,
        "Those that /regen has replaced, the newest 20, until something else is said. What is said "
        "next is as if the chosen one had been the answer all the time.",
    ),
    Command(
        "/undo",
        "",
        "take the last message and its answer back",
        _undo,
        "Once more takes back the one before.",
    ),
    Command(
        "/edit",
        "[TEXT]",
        "change the last message and have it answered anew",
        _edit,
        "Without TEXT the message is offered for editing.",
    ),
    Command(
        "/system",
        "[TEXT]",
        "show the system prompt, or set it",
        _system,
        f"All that was said is read again under a new one. {EMPTY} takes it away.",
    ),
    Command(
        "/read",
        "FILE [TEXT]",
        "send the text of a file, and a question after it",
        _read,
        "The file is UTF-8 text of any length. Put quotes around a name with spaces.",
    ),
    Command(
        "/multi",
        "[TEXT]",
        "begin a message of several lines, which /end ends",
        _multi,
        'So does a message between """ and """. Alt-Enter, or a backslash before Enter, begins a '
        "new line, too.",
    ),
    Command(
        "/save",
        "[FILE]",
        "save the conversation, or a copy of it in a file",
        keeping.save,
        "Conversations are saved as they go unless --no-save or a script says otherwise.",
    ),
    Command(
        "/load",
        "NAME|FILE [--reread]",
        "go on with a saved conversation",
        keeping.load,
        "By its name, its number in /sessions, or a file. What is talked about now stays saved "
        "where it is. The text of one that comes from another model or another cache, or has lost "
        "its archive, is read again with --reread; as it was it stays saved as NAME.before.",
    ),
    Command("/sessions", "", "list the conversations that are saved", keeping.sessions),
    Command(
        "/pin",
        "[TEXT]",
        "never forget the newest sentences with these words; show what is pinned",
        pinning.pin,
        "They take the places of heavy hitters. What had left the cache before comes back when the "
        "text is read again, as it is under another /system.",
    ),
    Command(
        "/unpin",
        "[TEXT]",
        "let the pinned passages with these words, or all, be forgotten",
        pinning.unpin,
    ),
    Command("/stats", "", "the conversation and the cache in numbers", _stats),
    Command(
        "/kv",
        "[N|all]",
        "what the cache holds: a picture of the text, heavy hitters marked",
        _kv,
        "In about N lines, or all of it. Every (layer, KV head) pair keeps rows of its own; the "
        "picture shows the tokens that most of them hold, and which passages were recalled.",
    ),
    Command(
        "/recalled",
        "",
        "what the last answer has looked at in the archive",
        _show_recalled,
        "Positions in the text, how much the passage was looked at, and how it begins. "
        "Not with --recall 0 or --no-evict.",
    ),
    Command(
        "/set",
        "[NAME [VALUE]]",
        "show how answers are drawn, or change it",
        _set,
        "The first letters of a name are enough: /set temp 0.5",
    ),
]
COMMANDS = {command.name: command for command in _ALL}
ALIASES = {"/exit": "/quit", "/bye": "/quit", "/?": "/help"}

KEYS = """\
Ctrl-C stops an answer; what was said so far stays in the conversation. Ctrl-D leaves.
Alt-Enter, or a backslash before Enter, begins a new line. TAB completes commands and files.
A line that begins with a space is sent as it is, even if a / follows."""
