"""`pyh2o chat`: a conversation in a cache of fixed size."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pyh2o.errors import SessionError, SessionOpenError
from pyh2o.limits import DEFAULT_STORE_MIB, Limits
from pyh2o.sessions.chats import chats_folder, locked, open_chats
from pyh2o.sessions.messages import CONVERSATION
from pyh2o.system.home import expanded
from pyh2o.writing.thinking import Thinking

from .. import loading
from ..errors import EXIT_ERROR
from ..options import (
    CACHE,
    MaxTokens,
    Mmproj,
    NoThinking,
    ReasoningBudget,
    RunOptions,
    System,
    takes_run_options,
)
from ..session_options import sampling_given, saved_options, typed_options
from ..shell_completion import complete_session
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from .answers import Answers
from .autosave import Autosave
from .commands import COMMANDS
from .input import ScriptSource, Source
from .loop import Chat
from .opening import open_conversation, say_last_exchange
from .role import read_role
from .tools import ChatTools
from .web import chat_on_page, refuse_what_the_page_lacks

_role_option = partial(typer.Option, rich_help_panel="Character")
_saving_option = partial(typer.Option, rich_help_panel="Saving")
_tools_option = partial(typer.Option, rich_help_panel="Tools")


@takes_run_options
def chat(
    context: typer.Context,
    *,
    options: RunOptions,
    system: System = None,
    card: Annotated[
        Path | None,
        _role_option(
            help="Character card (PNG or JSON) that the model plays. --system replaces the "
            "default instruction before the card."
        ),
    ] = None,
    user: Annotated[str, _role_option(help="Your name in a card.")] = "User",
    lorebook: Annotated[
        list[Path] | None,
        _role_option(
            help="Lorebook or world info (JSON), whose entries are inserted when a key matches; "
            "may be given several times. Saved with the session."
        ),
    ] = None,
    max_tokens: MaxTokens = None,
    reasoning_budget: ReasoningBudget = None,
    no_thinking: NoThinking = False,
    mmproj: Mmproj = None,
    resume: Annotated[
        bool, _saving_option("--continue", "-c", help="Resume the last conversation.")
    ] = False,
    session: Annotated[
        str | None,
        _saving_option(
            help="Resume the conversation of this name, or start it. A saved conversation keeps "
            "its model and cache settings; system prompt and sampling can be changed.",
            autocompletion=complete_session,
            show_default="a new one, named by its first words",
        ),
    ] = None,
    fair_turns: Annotated[
        bool,
        typer.Option(
            "--fair-turns",
            help="Give each turn a share of the heavy rows, so that no turn is evicted entirely.",
            rich_help_panel=CACHE,
        ),
    ] = False,
    store_mib: Annotated[
        int,
        typer.Option(
            min=0,
            help="Maximum MiB of snapshots of the cache, which save /regen, /undo and /edit from "
            "reading text again; 0 for none.",
            rich_help_panel=CACHE,
        ),
    ] = DEFAULT_STORE_MIB,
    no_save: Annotated[bool, _saving_option("--no-save", help="Write nothing to disk.")] = False,
    mcp: Annotated[
        Path | None,
        _tools_option(
            metavar="FILE",
            help="MCP servers whose tools the model may call, in the usual JSON form "
            '{"mcpServers": {NAME: {"command": ..., "args": [...]}}}. You are asked before each '
            "call.",
        ),
    ] = None,
    allow_tool: Annotated[
        list[str] | None,
        _tools_option(
            metavar="NAME",
            help="Run this tool without asking, as needed in scripts; may be given several times.",
        ),
    ] = None,
    web: Annotated[
        bool,
        typer.Option("--web", help="Chat in the browser, on a page only for this machine."),
    ] = False,
) -> None:
    """Chat with a model in a cache of fixed size.

    Conversations are saved after each turn; `pyh2o sessions` lists them. Standard input that is not
    a terminal is answered line by line (pyh2o chat < script.txt), and saved only with --session.
    With --web the chat is a page at http://127.0.0.1:8000/, or on a free port if that is taken.
    """
    if resume and session is not None:
        raise typer.BadParameter("give either --continue or --session NAME")
    options = replace(options, mmproj=mmproj)
    opened = session
    if resume:
        opened = _last_chat(saving=not no_save)
    given = typed_options(context)
    if web:
        refuse_what_the_page_lacks(context, given | ({"no_save"} if no_save else set()))
        limits = Limits(reasoning_budget=reasoning_budget, thinks=not no_thinking)
        chat_on_page(options, given, opened, limits, store_mib)
        return
    thinking = Thinking(False if no_thinking else None, reasoning_budget)
    role = read_role(card, lorebook or (), user=user, system=system)
    source = open_source(keep_history=not no_save)
    saving = not no_save and (source.interactive or opened is not None)
    with closing(Autosave(saving, opened or "")) as autosave:
        saved = autosave.text
        if saved is not None and autosave.database is not None:
            options = saved_options(options, given, autosave.database.info(saved).settings)
        answers = Answers(Bars(hidden=options.verbose))
        with (
            open_tools(mcp, allow_tool or (), source, answers.bars) as tools,
            closing(loading.load_llama(options, answers, store_mib=store_mib)) as llm,
            closing(autosave),  # before the model is freed
        ):
            # Imported here because it loads llama.cpp, which would delay `--help`.
            from pyh2o.sessions.conversation import Conversation

            known = tools.known()
            conversation = Conversation(
                llm,
                system=None if saved else role.system,
                tools=() if saved else known,
                thinking=Thinking() if saved else thinking,
                sampling=options.sampling,
                fair_turns=fair_turns,
            )
            talk = Chat(
                conversation,
                COMMANDS,
                source,
                answers,
                autosave,
                tools,
                max_tokens=max_tokens or llm.n_ctx(),
            )
            if saved is not None:
                open_conversation(talk, saved)
                answers.interrupts.check()  # Ctrl-C was deferred meanwhile
                say_last_exchange(talk)
                given_sampling = sampling_given(options, given)
                talk.conversation.sampling = replace(talk.conversation.sampling, **given_sampling)
                role.resume(talk)
                if given & {"reasoning_budget", "no_thinking"}:
                    talk.set_thinking(thinking)
                if any(tool not in talk.conversation.tools for tool in known):
                    talk.set_tools(known)
            talk.greet()
            if saved is None:
                role.start(talk)
            talk.run()
            if talk.conversation.place is not None:
                autosave.save(talk.conversation, leaving=True)
        is_saved = autosave.settle()
    if not is_saved or (talk.refused and not source.interactive):
        raise typer.Exit(EXIT_ERROR)


def _last_chat(*, saving: bool) -> str:
    """Return the last changed conversation; if it is to be saved, preferably one not open."""
    with open_chats() as database:
        chats = [text for text in database.texts() if text.kind == CONVERSATION]
        for chat in chats:
            with suppress(SessionOpenError):
                if saving:
                    with locked(database, chat.id):
                        pass
                if chat != chats[0]:
                    terminal.say(
                        f"session {chats[0].title} is open elsewhere, for example on the page: "
                        f"this is {chat.title}"
                    )
                return chat.title
    if not chats:
        raise SessionError(
            f"no conversation is saved in {chats_folder()}: start one without --continue"
        )
    return chats[0].title


@contextmanager
def open_tools(
    path: Path | None, allowed: Collection[str], source: Source, bars: Bars
) -> Iterator[ChatTools]:
    """Yield the tools of a file of MCP servers, which start while the model is loaded."""
    if path is None:
        yield ChatTools(None, allowed, source, bars)
        return
    from pyh2o.sessions.mcp_servers import McpServers

    with closing(McpServers(expanded(str(path)))) as servers:
        yield ChatTools(servers, allowed, source, bars)


def open_source(*, keep_history: bool) -> Source:
    """Return standard input as a source: a terminal or a script."""
    if not sys.stdin.isatty() or not (sys.stdout.isatty() or sys.stderr.isatty()):
        return ScriptSource(sys.stdin.buffer)
    # Imported here because it would delay scripts.
    from .terminal_input import TerminalSource, history_file

    return TerminalSource(COMMANDS, history_file() if keep_history else None)
