"""`pyh2o chat`: a conversation in a cache of fixed size."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pyh2o.errors import PyH2OError

from . import loading
from .answers import INTERRUPTED, Answer, Answers, chat_pieces, why_ended
from .errors import InputError, reported_errors, say_error
from .options import RunOptions, takes_run_options
from .progress import Bars
from .terminal import terminal

if TYPE_CHECKING:
    from pyh2o.llama import Llama

PROMPT = "> "

HELP = """\
/help   this list
/stats  what the KV cache holds
/quit   leave (so does Ctrl-D)
Ctrl-C stops an answer; what was said so far stays in the conversation.
A line that begins with a space is sent as it is, even if a / follows."""


@takes_run_options
def chat(
    *,
    options: RunOptions,
    system: Annotated[
        str | None,
        typer.Option(
            "--system",
            "-s",
            help="System prompt: what the model is told before the conversation.",
            show_default="the model's own",
        ),
    ] = None,
) -> None:
    """Talk with a model; the cache never grows beyond its budget and slack.

    Standard input that is not a terminal is answered line by line: pyh2o chat < script.txt
    """
    with reported_errors():
        bars = Bars(hidden=options.verbose)
        answers = Answers(bars)
        with closing(loading.load_llama(options, bars, answers.on_read)) as llm:
            Chat(llm, answers, options, system).run()


class Chat:
    """A conversation: its messages and the commands of the person."""

    def __init__(
        self, llm: Llama, answers: Answers, options: RunOptions, system: str | None
    ) -> None:
        self._llm = llm
        self._answers = answers
        self._sampling = options.sampling()
        self._seed = options.chosen_seed()
        self._messages: list[dict[str, str]] = []
        if system:
            self._messages.append({"role": "system", "content": system})
        self._at_terminal = sys.stdin.isatty()
        self._commands: dict[str, Callable[[], None]] = {"/help": self._help, "/stats": self._stats}

    def run(self) -> None:
        """Answer line after line until /quit or the end of the input.

        Raises:
            PyH2OError: the library refused a message of a script.
            KeyboardInterrupt: Ctrl-C while a script is answered.
        """
        if self._at_terminal:
            terminal.say(f"{_cache_line(self._llm)}\n/help lists the commands", style="dim")
        for line in terminal_lines() if self._at_terminal else script_lines():
            if line.rstrip() == "/quit":
                return
            if line.startswith("/"):
                self._command(line.rstrip())
            elif line.strip():
                self._reply(line.strip())

    def _command(self, line: str) -> None:
        command = self._commands.get(line)
        if command is None:
            name = line.split(maxsplit=1)[0]
            terminal.say(
                f"unknown command {name}: /help lists the commands; begin the line with a space to "
                "send it to the model"
            )
        else:
            command()

    def _help(self) -> None:
        terminal.say(HELP)

    def _stats(self) -> None:
        kv = self._llm.kv
        for entry in fields(kv):
            label = entry.name.replace("_", " ")
            terminal.say(f"{label:<20} {_shown(getattr(kv, entry.name)):>14}")

    def _reply(self, message: str) -> None:
        """Answer a message, and keep both in the conversation unless there is no answer."""
        self._messages.append({"role": "user", "content": message})
        try:
            answer = self._answers.run(self._llm, chat_pieces(self._chunks()), terminal.write)
        except PyH2OError as error:
            self._messages.pop()
            if not self._at_terminal:
                raise
            say_error(error)
            return
        if answer.text:
            self._messages.append({"role": "assistant", "content": answer.text})
        else:
            self._messages.pop()
        terminal.end_line()
        self._say_footer(answer)
        if answer.finish == INTERRUPTED and not self._at_terminal:
            raise KeyboardInterrupt

    def _chunks(self) -> Iterator[dict[str, Any]]:
        turn = sum(message["role"] == "user" for message in self._messages) - 1
        try:
            chunks = self._llm.create_chat_completion(
                messages=cast(Any, self._messages),
                stream=True,
                max_tokens=None,
                seed=self._seed + turn,  # a question asked again need not be answered alike
                **self._sampling,
            )
        except PyH2OError:
            raise
        except ValueError as error:
            # Some templates refuse a system prompt, and say so with ValueError.
            raise InputError(f"the model's chat template refuses this: {error}") from None
        return cast(Iterator[dict[str, Any]], chunks)

    def _say_footer(self, answer: Answer) -> None:
        terminal.say(f"{answer.writing()} · {self._llm.kv.summary()}", style="dim")
        if answer.finish == INTERRUPTED:
            kept = "what was said so far stays" if answer.text else "your message was taken back"
            terminal.say(f"stopped by Ctrl-C: {kept}")
        elif answer.finish != "stop":
            why = why_ended(answer, self._llm.kv)
            terminal.say(
                f"the answer ends here: {why}; all text is kept, but start a new chat to go on",
                style="yellow",
            )


def terminal_lines() -> Iterator[str]:
    """Lines typed by a person, until Ctrl-D; Ctrl-C drops the line."""
    # Importing readline gives input() a history and arrow keys, where the system has it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            yield _typed_line()
        except EOFError:
            terminal.say("")
            return
        except KeyboardInterrupt:
            terminal.say("\n/quit or Ctrl-D leaves")


def _typed_line() -> str:
    if sys.stdout.isatty():
        return input(PROMPT)
    # input() would write its prompt into the text.
    sys.stderr.write(PROMPT)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def script_lines() -> Iterator[str]:
    """Lines of standard input.

    Raises:
        InputError: a line that is not UTF-8.
    """
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise InputError(f"line {number} of standard input is not UTF-8 text") from None


def _shown(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}"


def _cache_line(llm: Llama) -> str:
    kv = llm.kv
    if not kv.evicting:
        return f"window {kv.window:,} tokens, full cache"
    return f"window {kv.window:,} tokens, budget {kv.budget:,} ({kv.parts()})"
