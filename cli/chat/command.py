"""`pyh2o chat`: a conversation in a cache of fixed size."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated

import typer

from pyh2o.cache.settings import EvictionSettings
from pyh2o.sessions.saved import SavedChat, last_chat
from pyh2o.writing.cache_copies import DEFAULT_MIB

from .. import loading
from ..errors import EXIT_ERROR
from ..options import CACHE, MaxTokens, Mmproj, RunOptions, System, takes_run_options
from ..session_options import sampling_given, saved_options, typed_options, with_limit
from ..shell_completion import complete_session
from ..terminal.progress import Bars
from .answers import Answers
from .autosave import Autosave
from .commands import COMMANDS
from .input import ScriptSource, Source
from .loop import Chat
from .opening import open_conversation, say_last_exchange
from .web import chat_on_page, refuse_what_the_page_lacks

_saving_option = partial(typer.Option, rich_help_panel="Saving")
# The archive of a chat that is saved is a file.
UNLIMITED = RunOptions(eviction=EvictionSettings(recall_mib=None))


@takes_run_options
def chat(
    context: typer.Context,
    *,
    options: RunOptions = UNLIMITED,
    system: System = None,
    max_tokens: MaxTokens = None,
    mmproj: Mmproj = None,
    go_on: Annotated[
        bool, _saving_option("--continue", "-c", help="Go on with the last conversation.")
    ] = False,
    session: Annotated[
        str | None,
        _saving_option(
            help="Go on with the conversation of this name, or begin it. One that is saved keeps "
            "its model and its cache; the system prompt and the sampling can be changed.",
            autocompletion=complete_session,
            show_default="a new one, named by the time",
        ),
    ] = None,
    fair_turns: Annotated[
        bool,
        typer.Option(
            "--fair-turns",
            help="Give each turn its share of the heavy rows, so that no turn is forgotten whole.",
            rich_help_panel=CACHE,
        ),
    ] = False,
    copies_mib: Annotated[
        int,
        typer.Option(
            min=0,
            help="Most MiB of memory for copies of the cache, so that /regen, /undo and /edit need "
            "not read again; 0 keeps none.",
            rich_help_panel=CACHE,
        ),
    ] = DEFAULT_MIB,
    reread: Annotated[
        bool,
        _saving_option(
            "--reread",
            help="Read the text of a session again, as one has to be that was made with another "
            "model or another cache, or has lost its archive; as it was it stays saved as "
            "NAME.before.",
        ),
    ] = False,
    no_save: Annotated[
        bool, _saving_option("--no-save", help="Leave nothing on the disk.")
    ] = False,
    web: Annotated[
        bool,
        typer.Option("--web", help="Chat in the browser, on a page that only this machine sees."),
    ] = False,
) -> None:
    """Talk with a model; the cache never grows beyond its budget and slack.

    Conversations are saved as they go; `pyh2o sessions` lists them. Standard input that is not a
    terminal is answered line by line (pyh2o chat < script.txt), and saved with --session only.
    With --web all of it happens on a page, under http://127.0.0.1:8000/ or, where that port is
    taken, a free one.
    """
    if go_on and session is not None:
        raise typer.BadParameter("give either --continue or --session NAME")
    options = replace(options, mmproj=mmproj)
    opened = last_chat() if go_on else None if session is None else SavedChat(session)
    given = typed_options(context)
    if web:
        refuse_what_the_page_lacks(context, given | ({"no_save"} if no_save else set()))
        chat_on_page(options, given, opened)
        return
    source = open_source(keep_history=not no_save)
    saving = not no_save and (source.interactive or opened is not None)
    with closing(Autosave(saving, opened)) as autosave:
        saved = opened.path if opened is not None and opened.path.exists() else None
        if saved is not None:
            # Imported here, as below, because it loads llama.cpp, which `--help` must not wait for.
            from pyh2o.sessions.headers import SavedConversation, read_header

            header = asdict(read_header(saved, SavedConversation))
            options = saved_options(options, given, header, reread=reread)
        if not saving:
            options = with_limit(options)
        answers = Answers(Bars(hidden=options.verbose))
        with (
            closing(loading.load_llama(options, answers)) as llm,
            closing(autosave),  # before the model goes
        ):
            from pyh2o.sessions.conversation import Conversation

            conversation = Conversation(
                llm,
                system=None if saved else system,
                sampling=options.sampling,
                fair_turns=fair_turns,
                copies_mib=copies_mib,
            )
            talk = Chat(
                conversation,
                COMMANDS,
                source,
                answers,
                autosave,
                max_tokens=max_tokens or llm.n_ctx(),
            )
            if saved is not None:
                open_conversation(talk, saved, reread=reread, cure=" (--reread)")
                answers.interrupts.check()  # Ctrl-C was kept off meanwhile
                say_last_exchange(talk, is_reread=reread)
                given_sampling = sampling_given(options, given)
                talk.conversation.sampling = replace(talk.conversation.sampling, **given_sampling)
                if system is not None and system != talk.conversation.system:
                    talk.set_system(system)
            talk.greet()
            talk.run()
        is_saved = autosave.settle()
    if not is_saved or (talk.refused and not source.interactive):
        raise typer.Exit(EXIT_ERROR)


def open_source(*, keep_history: bool) -> Source:
    """Standard input as it is: with a person at it, or not."""
    if not sys.stdin.isatty() or not (sys.stdout.isatty() or sys.stderr.isatty()):
        return ScriptSource(sys.stdin.buffer)
    # Imported here because it takes a moment that a script need not wait for.
    from .terminal_input import TerminalSource, history_file

    return TerminalSource(COMMANDS, history_file() if keep_history else None)
