"""`pyh2o generate`: go on with a text until the model stops."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from pyh2o.statistics import KVStatistics

from . import loading
from .answers import INTERRUPTED, Answer, Answers, completion_pieces, why_ended
from .errors import EXIT_INTERRUPTED, InputError, reported_errors
from .options import RunOptions, takes_run_options
from .output import StoryFile
from .progress import Bars
from .terminal import terminal

STDIN = Path("-")


@takes_run_options
def generate(
    *,
    options: RunOptions,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The text to go on with.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file", "-f", help="A UTF-8 file with that text; - is standard input."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            min=1,
            help="Most tokens to write.",
            show_default="until the model stops or its trained context ends",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File for the text, which grows as it is written.",
            show_default="standard output",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing --output.")] = False,
    echo: Annotated[
        bool, typer.Option("--echo/--no-echo", help="Begin the text with the prompt.")
    ] = True,
) -> None:
    """Go on with a text: a story of any length in a cache of fixed size.

    Only the text goes to standard output or to the file. Ctrl-C ends it and keeps what is there.
    """
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give either --prompt TEXT or --prompt-file FILE")
    with reported_errors():
        text = _checked(prompt) if prompt is not None else read_prompt(cast(Path, prompt_file))
        story = None if output is None else StoryFile(output, replace=force)
        if story and not echo and prompt_file and prompt_file.expanduser().resolve() == story.path:
            raise InputError(f"--no-echo would lose the prompt in {output}: give another --output")
        write_story(options, text, text if echo else "", max_tokens, story)


def read_prompt(file: Path) -> str:
    """The text of a prompt file, without its last line break, which editors add.

    Raises:
        InputError: a file that is not there, cannot be read, is not UTF-8 or is empty.
    """
    name = "standard input" if file == STDIN else str(file)
    try:
        data = sys.stdin.buffer.read() if file == STDIN else file.expanduser().read_bytes()
    except FileNotFoundError:
        raise InputError(f"there is no prompt file {name}") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a folder: give --prompt-file a text file") from None
    try:
        # utf-8-sig also takes the mark that some editors put at the start of a file.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from None
    return _checked(text.replace("\r\n", "\n").removesuffix("\n"))


def _checked(prompt: str) -> str:
    if not prompt:
        raise InputError("the prompt is empty: give the model at least one word to go on with")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("the prompt is not UTF-8 text") from None
    return prompt


def write_story(
    options: RunOptions,
    prompt: str,
    opening: str,
    max_tokens: int | None,
    story: StoryFile | None,
) -> None:
    """Load the model and write the opening and what follows the prompt.

    Raises:
        PyH2OError: the library refused the model, the settings or the prompt.
        typer.Exit: Ctrl-C was pressed; what was written stays.
    """
    bars = Bars(hidden=options.verbose)
    answers = Answers(bars)
    seed = options.chosen_seed()
    with closing(loading.load_llama(options, bars, answers.on_read)) as llm:
        chunks = cast(
            Iterator[dict[str, Any]],
            llm.create_completion(
                prompt, max_tokens=max_tokens, stream=True, seed=seed, **options.sampling()
            ),
        )
        sink = StorySink(opening, story, bars)
        with kept(story):
            answer = answers.run(llm, completion_pieces(chunks), sink.write)
            if answer.finish != INTERRUPTED:
                sink.finish()
                if story is not None:
                    story.complete()
        if story is not None and story.written:
            terminal.say(f"the text is in {story.path}")
        terminal.say(report(answer, seed, llm.kv))
    if answer.finish == INTERRUPTED:
        raise typer.Exit(EXIT_INTERRUPTED)


class StorySink:
    """Where the text goes; the opening comes just before the first piece, when reading is over."""

    def __init__(self, opening: str, story: StoryFile | None, bars: Bars) -> None:
        self._opening = opening
        self._write = terminal.write if story is None else story.write
        self._bars = bars if story is not None else None
        self._characters = 0
        self._last = ""

    def write(self, text: str) -> None:
        """Write a piece of the text; the growth of a file is shown on a terminal."""
        self._put(self._opening + text)
        self._opening = ""
        if self._bars is not None:
            self._bars.writing(self._characters)

    def finish(self) -> None:
        """End the text like any text file, even if the model had nothing to add to the opening.

        `read_prompt` takes that line break off again when the text is gone on with.
        """
        self._put(self._opening)
        if self._last and not self._last.endswith("\n"):
            self._put("\n")

    def _put(self, text: str) -> None:
        self._write(text)
        self._characters += len(text)
        self._last = text or self._last


@contextmanager
def kept(story: StoryFile | None) -> Iterator[None]:
    """Hold the story's file open, and say where the file it replaces is if it is still needed."""
    if story is None:
        yield
        return
    try:
        with story:
            yield
    finally:
        if story.aside is not None:
            terminal.say(f"the earlier {story.path.name} is kept as {story.aside}")


def report(answer: Answer, seed: int, kv: KVStatistics) -> str:
    """One line for a person: what was read and written, why it ended and what the cache holds."""
    why = why_ended(answer, kv)
    return f"{answer.reading()} · {answer.writing()} · {why} · seed {seed} · {kv.summary()}"
