"""The slash commands of a chat."""

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
"""An empty text as an argument."""

KEYS = '''\
Ctrl-C stops an answer; the text so far stays in the conversation. Ctrl-D quits.
Alt-Enter, or a backslash before Enter, starts a new line; so does Enter in a message between
""" and """. TAB completes commands and files.
A line that starts with a space is sent to the model, even if a / follows.'''

COMMANDS = Commands()


@COMMANDS.add("/help")
def _help(_chat: Chat, _argument: str) -> None:
    """Show this list."""
    width = max(len(each.usage) for each in COMMANDS.values())
    lines = [f"{each.usage:<{width}}  {each.run.__doc__}" for each in COMMANDS.values()]
    terminal.say("\n".join([*lines, KEYS]))


@COMMANDS.add("/quit")
def _quit(chat: Chat, _argument: str) -> None:
    """Quit, like Ctrl-D."""
    chat.left = True


# -------------------------------------------------------------------------------------------------
# Messages and answers
# -------------------------------------------------------------------------------------------------


def _need_turn(chat: Chat) -> None:
    if not chat.conversation.turns:
        raise InputError("there is no message yet: send one")


@COMMANDS.add("/continue")
def _continue(chat: Chat, _argument: str) -> None:
    """Continue an answer that was stopped or reached --max-tokens."""
    _need_turn(chat)
    last = chat.conversation.turns[-1]
    chat.answer(
        chat.results()
        if chat.conversation.calls
        else lambda: chat.conversation.resume(max_tokens=chat.max_tokens),
        "the answer is unchanged",
        n_before=last.end - last.part_starts[-1],
    )


@COMMANDS.add("/regen")
def _regenerate(chat: Chat, _argument: str) -> None:
    """Sample another answer to the last message; /answers restores the old one."""
    _need_turn(chat)
    chat.answer(
        lambda: chat.conversation.regenerate(max_tokens=chat.max_tokens), "the old answer stays"
    )


@COMMANDS.add("/answers", "[N]")
def _answers(chat: Chat, argument: str) -> None:
    """List the answers to the last message, or restore one."""
    _need_turn(chat)
    found = chat.conversation.answers
    if not argument:
        for number, turn in enumerate(found, start=1):
            mark = "*" if turn == chat.conversation.turns[-1] else " "
            size = count(turn.end - turn.answer_start, "token")
            terminal.say(f"{mark} {number:>2}  {size:>12}  {shortened(turn.answer)}".rstrip())
        return
    if not argument.isdecimal() or not 1 <= int(argument) <= len(found):
        raise InputError(f"unknown answer {shortened(argument)}: /answers lists them")
    attempt = found[int(argument) - 1].attempt
    chat.change(lambda: chat.conversation.choose(attempt))
    terminal.show(chat.conversation.turns[-1].answer)
    terminal.end_line()
    say_unread(chat.conversation, chat.answers.all)


@COMMANDS.add("/reasoning")
def _reasoning(chat: Chat, _argument: str) -> None:
    """Show the reasoning of the last answer."""
    _need_turn(chat)
    last = chat.conversation.turns[-1]
    parts = [*(step.reasoning for step in last.steps), last.reasoning]
    found = "\n\n".join(each.strip() for each in parts if each.strip())
    terminal.say(found or "the answer contains no separate reasoning", style="dim")


@COMMANDS.add("/undo")
def _undo(chat: Chat, _argument: str) -> None:
    """Remove the last message and its answer."""
    _need_turn(chat)
    message = chat.conversation.turns[-1].user
    chat.change(chat.conversation.undo)
    turns = chat.conversation.turns
    left = f"{count(len(turns), 'turn')}, {count(turns[-1].end if turns else 0, 'token')} left"
    terminal.say(f"removed: {shortened(message)} ({left})")
    say_unread(chat.conversation, chat.answers.all)


@COMMANDS.add("/edit", "[TEXT]")
def _edit(chat: Chat, argument: str) -> None:
    """Replace the last message, or edit it interactively, and answer it again."""
    _need_turn(chat)
    if not argument:
        if not chat.source.interactive:
            raise InputError("in a script, /edit needs the new message: /edit TEXT")
        argument = chat.source.read("edit> ", chat.conversation.turns[-1].user).strip()
    if not argument:
        terminal.say("the message is unchanged")
        return
    chat.answer(
        lambda: chat.conversation.edit(argument, max_tokens=chat.max_tokens),
        "the message is unchanged",
    )


@COMMANDS.add("/system", "[TEXT]")
def _system(chat: Chat, argument: str) -> None:
    """Show or set the system prompt; "" removes it."""
    if argument:
        chat.set_system(None if argument == EMPTY else argument)
    system = chat.conversation.system
    terminal.say(f"system prompt: {system}" if system else "the template's default system prompt")


@COMMANDS.add("/note", "[TEXT]")
def _note(chat: Chat, argument: str) -> None:
    """Show or set the author's note; "" removes it."""
    if argument:
        note = "" if argument == EMPTY else argument
        chat.change(lambda: setattr(chat.conversation, "note", note))
    note = chat.conversation.note
    terminal.say(f"inserted every few messages: {note}" if note else "no note: /note TEXT sets one")


@COMMANDS.add("/tools")
def _tools(chat: Chat, _argument: str) -> None:
    """List MCP servers and the tools that the model may call."""
    servers = chat.tools.servers
    if servers is None:
        raise InputError("this chat has no MCP servers: start it with --mcp FILE")
    tools = servers.tools()
    for server in servers.servers:
        terminal.say(f"{server.name}: {server.trouble or count(len(server.tools), 'tool')}")
        for name, (owner, tool) in tools.items():
            if owner is server:
                allowed = " (allowed)" if name in chat.tools.allowed else ""
                terminal.say(f"  {name}{allowed}  {shortened(tool.description)}".rstrip())


COMMANDS.update(FILE_COMMANDS)


# -------------------------------------------------------------------------------------------------
# Cache and sampling
# -------------------------------------------------------------------------------------------------


@COMMANDS.add("/pin", "[TEXT]")
def _pin(chat: Chat, argument: str) -> None:
    """Pin the last sentences with these words; list pinned passages."""
    # Imported here because it loads llama.cpp, which would delay `--help`.
    from pyh2o.sessions.passages import pin_sentences, pinned_passages

    if argument:
        chat.change(lambda: pin_sentences(chat.conversation, argument))
    passages = pinned_passages(chat.conversation)
    if not passages:
        terminal.say("nothing is pinned: /pin TEXT pins the last sentences with these words")
    for passage in passages:
        held = "" if passage.held > 0.995 else f" ({passage.held:.0%} of its rows are cached)"
        size = count(passage.end - passage.start, "token")
        terminal.say(f"pinned, {size}{held}: {shortened(passage.text)}")


@COMMANDS.add("/unpin", "[TEXT]")
def _unpin(chat: Chat, argument: str) -> None:
    """Unpin the passages with these words, or all."""
    # Imported here for the same reason as above.
    from pyh2o.sessions.passages import unpin_passages

    chat.change(lambda: unpin_passages(chat.conversation, argument or None))
    left = len(chat.conversation.pins)
    terminal.say(f"still pinned: {count(left, 'passage')}" if left else "nothing is pinned")


@COMMANDS.add("/stats")
def _stats(chat: Chat, _argument: str) -> None:
    """Show statistics of the conversation and the cache."""
    for label, text in statistics(chat.conversation, chat.answers.all):
        terminal.say(f"{label:<14} {text}")


@COMMANDS.add("/kv", "[all]", words=lambda _: ["all"])
def _kv(chat: Chat, argument: str) -> None:
    """Show which tokens and passages the cache holds."""
    if argument not in ("", "all"):
        raise InputError("/kv shows the passages with most rows, /kv all shows all tokens")
    for note in kv_picture(chat.conversation.llm, stderr.width, shows_all=argument == "all"):
        terminal.say(note)


@COMMANDS.add("/recalled")
def _recalled(chat: Chat, _argument: str) -> None:
    """Show what the last answer recalled from the archive: positions, weight and text."""
    llm = chat.conversation.llm
    if not llm.model.recalls:
        raise InputError("this chat has no recall: start a new one without --recall 0")
    spans = llm.recalled()
    if not spans:
        terminal.say("no answer has recalled evicted rows since the chat was opened")
    for span in spans:
        text = shortened(span.text)
        terminal.say(f"{span.start:>8,} .. {span.end - 1:<8,} {span.weight:7.3f}  {text}")


@COMMANDS.add("/set", "[NAME [VALUE]]", words=lambda _: vars(Sampling()))
def _set(chat: Chat, argument: str) -> None:
    """Show or change sampling settings, for example: /set temp 0.5"""
    sampling = chat.conversation.sampling
    values = dataclasses.asdict(sampling)
    if argument:
        given, text = (*argument.split(maxsplit=1), "")[:2]
        wanted = given.lower().replace("-", "_")
        matches = [name for name in values if name.startswith(wanted)]
        if len(matches) != 1:
            raise InputError(f"unknown setting {given}: /set shows all settings")
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
