"""`pyh2o chat`: a conversation in a cache of fixed size."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from pyh2o.cache.settings import EvictionSettings
from pyh2o.sessions.saved import SavedChat, last_chat
from pyh2o.text.cache_copies import DEFAULT_MIB

from .. import loading
from ..errors import EXIT_ERROR, reported_errors
from ..options import CACHE, Plain, RunOptions, takes_run_options
from ..session_options import sampling_given, typed_options
from ..shell_completion import complete_session
from ..terminal.progress import Bars
from ..terminal.terminal import stdout
from .answers import Answers
from .autosave import Autosave
from .input import open_source
from .loop import Chat
from .opening import begin, open_saved, saved_options, with_limit
from .web import chat_on_page, refuse_what_the_page_lacks

SAVING = "Saving"
# The archive of a chat that is saved is a file.
UNLIMITED = RunOptions(eviction=EvictionSettings(recall_mib=None))


@takes_run_options
def chat(
    context: typer.Context,
    *,
    options: RunOptions = UNLIMITED,
    system: Annotated[
        str | None,
        typer.Option(
            "--system",
            "-s",
            help="System prompt: what the model is told before the conversation. It is never "
            "evicted.",
            show_default="the model's own",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            min=1,
            help="Most tokens of an answer, against models that never stop.",
            show_default="as many as the window has",
        ),
    ] = None,
    plain: Plain = False,
    go_on: Annotated[
        bool,
        typer.Option(
            "--continue", "-c", help="Go on with the last conversation.", rich_help_panel=SAVING
        ),
    ] = False,
    session: Annotated[
        str | None,
        typer.Option(
            help="Go on with the conversation of this name, or begin it. One that is saved keeps "
            "its model and its cache; the system prompt and the sampling can be changed.",
            autocompletion=complete_session,
            show_default="a new one, named by the time",
            rich_help_panel=SAVING,
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
        typer.Option(
            "--reread",
            help="Read the text of a session again: under another model or another cache, or to "
            "build a lost archive anew; as it was it stays saved as NAME.before.",
            rich_help_panel=SAVING,
        ),
    ] = False,
    no_save: Annotated[
        bool,
        typer.Option("--no-save", help="Leave nothing on the disk.", rich_help_panel=SAVING),
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
    with reported_errors():
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
                header = _header(saved)
                options = saved_options(options, given, header, reread=reread)
            if not saving:
                options = with_limit(options)
            bars = Bars(hidden=options.verbose)
            answers = Answers(bars)
            with (
                closing(loading.load_llama(options, bars, answers)) as llm,
                autosave.settled(),  # before the model goes
            ):
                talk = Chat(
                    begin(llm, options, system, fair_turns, copies_mib)
                    if opened is None or saved is None
                    else open_saved(
                        llm,
                        opened,
                        autosave,
                        source,
                        reread=reread,
                        fair_turns=fair_turns,
                        copies_mib=copies_mib,
                    ),
                    source,
                    answers,
                    autosave,
                    max_tokens=max_tokens or llm.n_ctx(),
                    markdown=stdout.is_terminal and not plain,
                )
                if saved is not None:
                    talk.leave_archive_alone()
                    talk.say_last_exchange()
                    talk.adapt(sampling_given(options, given), system)
                talk.greet()
                talk.run()
            is_saved = autosave.settle()
        if not is_saved or (talk.refused and not source.interactive):
            raise typer.Exit(EXIT_ERROR)


def _header(saved: Path) -> dict[str, Any]:
    # Imported here, like the conversation, because it loads llama.cpp: `--help` must not wait.
    from pyh2o.sessions.saved_conversation import read_saved_conversation

    return asdict(read_saved_conversation(saved))
