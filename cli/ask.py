"""`pyh2o ask`: one question, and its answer."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from pyh2o.writing.finish import FINISH_INTERRUPTED

from . import loading
from .chat.answers import Answers, footer, why_short
from .errors import InputError
from .options import MaxTokens, RunOptions, System, takes_run_options
from .terminal.progress import Bars
from .terminal.terminal import terminal
from .text_files import STDIN, text_of


@takes_run_options
def ask(
    question: Annotated[
        str | None, typer.Argument(help="The question.", show_default="the text alone")
    ] = None,
    *,
    options: RunOptions,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="A UTF-8 text that the question is about; may be given again. - is standard "
            "input.",
            show_default="standard input, unless it is a terminal",
        ),
    ] = None,
    system: System = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Ask one question: cat notes.txt | pyh2o ask "What is this about?"

    All of standard input, or the files of --file, are the text that the question is about: they
    come first, of any length, and the question behind them. Only the answer goes to standard
    output, and nothing is saved.
    """
    message = _message(files, question)
    answers = Answers(Bars(hidden=options.verbose))
    with closing(loading.load_llama(options, answers, store_mib=0)) as llm:
        # Imported here because it loads llama.cpp, which `--help` must not wait for.
        from pyh2o.sessions.conversation import Conversation

        conversation = Conversation(llm, system=system, sampling=options.sampling)
        most = max_tokens or llm.n_ctx()
        answer = answers.stream(conversation, lambda: conversation.say(message, max_tokens=most))
        terminal.say(footer(answer, llm.kv), style="dim")
        if end := why_short(answer, llm.kv, most):
            terminal.say(end, style="yellow")
        if llm.text.archive_trouble:
            terminal.say(f"warning: {llm.text.archive_trouble}", style="yellow")
    if answer.finish == FINISH_INTERRUPTED:
        raise KeyboardInterrupt


def _message(files: list[Path] | None, question: str | None) -> str:
    """What is sent: the texts and then the question, with a blank line between them."""
    if files is None:
        files = [] if sys.stdin.isatty() else [STDIN]
    parts = [part for part in (*map(text_of, files), question or "") if part.strip()]
    if not parts:
        raise InputError(
            'there is nothing to ask: give a question (pyh2o ask "Why?"), a text on standard '
            "input, or both"
        )
    return "\n\n".join(parts)
