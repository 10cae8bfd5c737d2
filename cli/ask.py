"""`pyh2o ask`: answer one question."""

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
        str | None, typer.Argument(help="The question.", show_default="only the text")
    ] = None,
    *,
    options: RunOptions,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="UTF-8 file that the question is about; may be given several times. - is standard "
            "input.",
            show_default="standard input, unless it is a terminal",
        ),
    ] = None,
    system: System = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Ask one question: cat notes.txt | pyh2o ask "What is this about?"

    The text is standard input or the files of --file, of any length, with the question after it.
    Only the answer is written to standard output. Nothing is saved.
    """
    message = _message(files, question)
    answers = Answers(Bars(hidden=options.verbose))
    with closing(loading.load_llama(options, answers, store_mib=0)) as llm:
        from pyh2o.sessions.conversation import Conversation

        conversation = Conversation(llm, system=system, sampling=options.sampling)
        most = max_tokens or llm.n_ctx()
        answer = answers.stream(conversation, lambda: conversation.say(message, max_tokens=most))
        terminal.say(footer(answer, llm.kv), style="dim")
        if end := why_short(answer, llm.kv, most):
            terminal.say(end, style="yellow")
    if answer.finish == FINISH_INTERRUPTED:
        raise KeyboardInterrupt


def _message(files: list[Path] | None, question: str | None) -> str:
    """Return the texts and the question, separated by blank lines."""
    if files is None:
        files = [] if sys.stdin.isatty() else [STDIN]
    parts = [part for part in (*map(text_of, files), question or "") if part.strip()]
    if not parts:
        raise InputError(
            'no question: give one (pyh2o ask "Why?"), a text on standard input, or both'
        )
    return "\n\n".join(parts)
