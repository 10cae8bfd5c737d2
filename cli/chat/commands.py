"""The commands that begin with a slash in a chat."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from pyh2o.errors import SettingsError
from pyh2o.writing.sampling import Sampling

from ..errors import InputError
from ..terminal.terminal import stderr, terminal
from ..terminal.wording import count, shortened
from .answers import say_unread, statistics
from .command_table import Commands
from .file_commands import FILE_COMMANDS
from .kv_picture import kv_picture

if TYPE_CHECKING:
    from .loop import Chat

EMPTY = '""'
"""How an empty text is written."""

KEYS = '''\
Ctrl-C stops an answer; what was said so far stays in the conversation. Ctrl-D leaves.
Alt-Enter, or a backslash before Enter, begins a new line; so does Enter in a message between
""" and """. TAB completes commands and files.
A line that begins with a space is sent as it is, even if a / follows.'''

COMMANDS = Commands()


@COMMANDS.add("/help")
def _help(_chat: Chat, _argument: str) -> None:
    """This list."""
    width = max(len(each.usage) for each in COMMANDS.values())
    lines = [f"{each.usage:<{width}}  {each.run.__doc__}" for each in COMMANDS.values()]
    terminal.say("\n".join([*lines, KEYS]))


@COMMANDS.add("/quit")
def _quit(chat: Chat, _argument: str) -> None:
    """Leave; so does Ctrl-D."""
    chat.left = True


# -------------------------------------------------------------------------------------------------
# Messages and answers
# -------------------------------------------------------------------------------------------------


def _need_turn(chat: Chat) -> None:
    if not chat.conversation.turns:
        raise InputError("there is no message yet: type one")


@COMMANDS.add("/continue")
def _continue(chat: Chat, _argument: str) -> None:
    """Go on with an answer that was stopped or cut."""
    _need_turn(chat)
    last = chat.conversation.turns[-1]
    chat.answer(
        chat.results()
        if chat.conversation.calls
        else lambda: chat.conversation.go_on(max_tokens=chat.max_tokens),
        "the answer stays as it was",
        n_before=last.end - last.part_starts[-1],
    )


@COMMANDS.add("/regen")
def _regenerate(chat: Chat, _argument: str) -> None:
    """Answer the last message anew; /answers brings the old answer back."""
    _need_turn(chat)
    chat.answer(
        lambda: chat.conversation.regenerate(max_tokens=chat.max_tokens), "the old answer stays"
    )


@COMMANDS.add("/answers", "[N]")
def _answers(chat: Chat, argument: str) -> None:
    """List the answers to the last message, or go back to one."""
    _need_turn(chat)
    found = chat.conversation.answers
    if not argument:
        for number, turn in enumerate(found, start=1):
            mark = "*" if turn == chat.conversation.turns[-1] else " "
            size = count(turn.end - turn.answer_start, "token")
            terminal.say(f"{mark} {number:>2}  {size:>12}  {shortened(turn.answer)}".rstrip())
        return
    if not argument.isdecimal() or not 1 <= int(argument) <= len(found):
        raise InputError(f"there is no answer {shortened(argument)}: /answers lists them")
    attempt = found[int(argument) - 1].attempt
    chat.change(lambda: chat.conversation.choose(attempt))
    terminal.show(chat.conversation.turns[-1].answer)
    terminal.end_line()
    say_unread(chat.conversation)


@COMMANDS.add("/thoughts")
def _thoughts(chat: Chat, _argument: str) -> None:
    """What the model has thought before its last answer."""
    _need_turn(chat)
    last = chat.conversation.turns[-1]
    thoughts = [*(step.thoughts for step in last.steps), last.thoughts]
    found = "\n\n".join(each.strip() for each in thoughts if each.strip())
    terminal.say(found or "it has thought nothing that is told apart", style="dim")


@COMMANDS.add("/undo")
def _undo(chat: Chat, _argument: str) -> None:
    """Take the last message and its answer back."""
    _need_turn(chat)
    message = chat.conversation.turns[-1].user
    chat.change(chat.conversation.undo)
    turns = chat.conversation.turns
    left = f"{count(len(turns), 'turn')}, {count(turns[-1].end if turns else 0, 'token')} left"
    terminal.say(f"taken back: {shortened(message)} ({left})")
    say_unread(chat.conversation)


@COMMANDS.add("/edit", "[TEXT]")
def _edit(chat: Chat, argument: str) -> None:
    """Change the last message, or edit it here, and have it answered anew."""
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


@COMMANDS.add("/system", "[TEXT]")
def _system(chat: Chat, argument: str) -> None:
    """Show the system prompt, or set it; "" takes it away."""
    if argument:
        chat.set_system(None if argument == EMPTY else argument)
    system = chat.conversation.system
    terminal.say(f"system prompt: {system}" if system else "no system prompt but the model's own")


@COMMANDS.add("/note", "[TEXT]")
def _note(chat: Chat, argument: str) -> None:
    """Show the author's note, or set it; "" takes it away."""
    if argument:
        note = "" if argument == EMPTY else argument
        chat.change(lambda: setattr(chat.conversation, "note", note))
    note = chat.conversation.note
    terminal.say(
        f"told with every few messages: {note}" if note else "no note: /note TEXT sets one"
    )


@COMMANDS.add("/tools")
def _tools(chat: Chat, _argument: str) -> None:
    """List the MCP servers, and the tools that the model may call."""
    servers = chat.tools.servers
    if servers is None:
        raise InputError("this chat has no MCP servers: begin it with --mcp FILE")
    tools = servers.tools()
    for server in servers.servers:
        terminal.say(f"{server.name}: {server.trouble or count(len(server.tools), 'tool')}")
        for name, (owner, tool) in tools.items():
            if owner is server:
                unasked = " (runs unasked)" if name in chat.tools.allowed else ""
                terminal.say(f"  {name}{unasked}  {shortened(tool.description)}".rstrip())


COMMANDS.update(FILE_COMMANDS)


# -------------------------------------------------------------------------------------------------
# The cache, and how answers are drawn
# -------------------------------------------------------------------------------------------------


@COMMANDS.add("/pin", "[TEXT]")
def _pin(chat: Chat, argument: str) -> None:
    """Never forget the newest sentences with these words; show what is pinned."""
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.passages import pin_sentences, pinned_passages

    if argument:
        chat.change(lambda: pin_sentences(chat.conversation, argument))
    passages = pinned_passages(chat.conversation)
    if not passages:
        terminal.say("nothing is pinned: /pin TEXT keeps the newest passage with these words")
    for passage in passages:
        held = "" if passage.held > 0.995 else f" ({passage.held:.0%} of it is still there)"
        size = count(passage.end - passage.start, "token")
        terminal.say(f"pinned, {size}{held}: {shortened(passage.text)}")


@COMMANDS.add("/unpin", "[TEXT]")
def _unpin(chat: Chat, argument: str) -> None:
    """Let the pinned passages with these words, or all, be forgotten."""
    # Imported here for the same reason as above.
    from pyh2o.sessions.passages import unpin_passages

    chat.change(lambda: unpin_passages(chat.conversation, argument or None))
    left = len(chat.conversation.pins)
    terminal.say(
        f"still pinned: {count(left, 'passage')}" if left else "nothing is pinned any more"
    )


@COMMANDS.add("/stats")
def _stats(chat: Chat, _argument: str) -> None:
    """The conversation and the cache in numbers."""
    for label, text in statistics(chat.conversation, chat.answers.all):
        terminal.say(f"{label:<14} {text}")


@COMMANDS.add("/kv", "[all]", words=lambda _: ["all"])
def _kv(chat: Chat, argument: str) -> None:
    """What the cache holds: a picture of the text, and what of it most is held."""
    if argument not in ("", "all"):
        raise InputError("/kv shows the passages held best, and /kv all all tokens")
    for note in kv_picture(chat.conversation.llm, stderr.width, shows_all=argument == "all"):
        terminal.say(note)


@COMMANDS.add("/recalled")
def _recalled(chat: Chat, _argument: str) -> None:
    """What the last answer has looked at in the archive: positions, weight and text."""
    llm = chat.conversation.llm
    if not llm.model.recalls:
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


@COMMANDS.add("/set", "[NAME [VALUE]]", words=lambda _: vars(Sampling()))
def _set(chat: Chat, argument: str) -> None:
    """Show how answers are drawn, or change it, as in: /set temp 0.5"""
    sampling = chat.conversation.sampling
    values = dataclasses.asdict(sampling)
    if argument:
        given, text = (*argument.split(maxsplit=1), "")[:2]
        wanted = given.lower().replace("-", "_")
        matches = [name for name in values if name.startswith(wanted)]
        if len(matches) != 1:
            raise InputError(f"there is no setting {given}: /set shows them all")
        name = matches[0]
        if text:
            is_list = isinstance(values[name], tuple)
            try:
                value = json.loads(text) if is_list else type(values[name])(text)
            except ValueError:
                wanted = 'a list such as ["\\n", ":"]' if is_list else "a number"
                raise SettingsError(f"{name} is {text!r}: give {wanted}") from None
            sampling = dataclasses.replace(sampling, **{name: value})
            chat.change(lambda: setattr(chat.conversation, "sampling", sampling))
        values = {name: getattr(sampling, name)}
    for name, value in values.items():
        terminal.say(f"{name:<21} {json.dumps(value)}")
