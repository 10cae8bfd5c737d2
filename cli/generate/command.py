"""`pyh2o generate`: write a story, and go on with it later."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from .. import loading
from ..errors import InputError, reported_errors
from ..options import RunOptions, takes_run_options
from ..session_options import options_of_header, refuse_what_is_fixed, sampling_given, typed_options
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from ..terminal.wording import count
from .new_story_file import NewStoryFile
from .plan import Plan
from .prompt import checked_prompt, read_prompt
from .resumed_story_file import ResumedStoryFile
from .story_file import StoryFile
from .story_run import StoryRun, end_of

if TYPE_CHECKING:
    from pyh2o.sessions.story import Story

STORY_FILE = "Story file"
# Options that change how fast a story is written: no checkpoint has them.
SPEED_OPTIONS = ("gpu_layers", "threads", "threads_batch")


@dataclass(frozen=True)
class Task:
    """What to write: None is what the story had, or the default."""

    prompt: str | None
    max_tokens: int | None
    until: list[str] | None
    loop_guard: bool | None
    ignore_eos: bool | None
    checkpoint_every: int | None


@takes_run_options
def generate(
    context: typer.Context,
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
            min=0,
            help="Most tokens of the story in all; --resume remembers it. 0 is no limit.",
            show_default="until the model stops",
        ),
    ] = None,
    until: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Stop before this text; may be given again. '' is none."),
    ] = None,
    loop_guard: Annotated[
        bool | None,
        typer.Option(
            "--loop-guard/--no-loop-guard",
            help="Break loops, and stop where there is no end of them.",
            show_default="on",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Do not let the model end its text.",
            show_default="no-ignore-eos",
        ),
    ] = None,
    echo: Annotated[
        bool, typer.Option("--echo/--no-echo", help="Begin the text with the prompt.")
    ] = True,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File for the text, which grows as it is written. FILE.h2o is its checkpoint, and "
            "FILE.jsonl has a line for each.",
            show_default="standard output",
            rich_help_panel=STORY_FILE,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace an existing file.", rich_help_panel=STORY_FILE),
    ] = False,
    checkpoint: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens between two checkpoints; --resume remembers it.",
            show_default=str(Plan().checkpoint_every),
            rich_help_panel=STORY_FILE,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the story in --output at the exact token, also after a crash. A file "
            "that was edited is read again.",
            rich_help_panel=STORY_FILE,
        ),
    ] = False,
) -> None:
    """Go on with a text: a story of any length in a cache of fixed size.

    Only the text goes to standard output or to the file. Ctrl-C ends it and keeps what is there;
    --resume goes on with what is in a file.
    """
    given = typed_options(context)
    _check_usage(prompt, prompt_file, output, force=force, resume=resume)
    if resume and "echo" in given:
        raise typer.BadParameter("a story keeps its beginning: leave --echo out with --resume")
    with reported_errors():
        text = None if prompt is None else checked_prompt(prompt)
        if prompt_file is not None:
            text = read_prompt(prompt_file)
        task = Task(text, max_tokens, until, loop_guard, ignore_eos, checkpoint)
        if resume:
            go_on(options, given, task, ResumedStoryFile(cast(Path, output)))
        else:
            file = None if output is None else NewStoryFile(output, replace=force)
            if (
                file
                and not echo
                and prompt_file
                and prompt_file.expanduser().resolve() == file.path
            ):
                raise InputError(
                    f"--no-echo would lose the prompt in {output}: give another --output"
                )
            begin(options, given, task, file, echo=echo)


def _check_usage(
    prompt: str | None,
    prompt_file: Path | None,
    output: Path | None,
    *,
    force: bool,
    resume: bool,
) -> None:
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("give either --prompt TEXT or --prompt-file FILE")
    if prompt is None and prompt_file is None and not resume:
        raise typer.BadParameter("give --prompt TEXT or --prompt-file FILE, or --resume")
    if resume and output is None:
        raise typer.BadParameter("--resume needs --output FILE, the story to go on with")
    if resume and force:
        raise typer.BadParameter("give either --resume or --force")


def begin(
    options: RunOptions, given: set[str], task: Task, file: NewStoryFile | None, *, echo: bool
) -> None:
    """Load the model and write a new story; `given` are the options that were typed.

    Raises:
        PyH2OError: the library refused the model, the settings or the prompt.
        typer.Exit: Ctrl-C was pressed; what was written stays.
    """
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.story import Story

    run = StoryRun(Bars(hidden=options.verbose), how_to_go_on(file, options, given))
    with closing(loading.load_llama(options, run.bars, run.on_read)) as llm:
        story = Story(
            llm,
            cast(str, task.prompt),
            sampling=options.sampling,
            until=task.until or (),
            echo=echo,
            loop_guard=task.loop_guard is not False,
            ignore_eos=task.ignore_eos is True,
            on_loop=run.on_loop,
        )
        run.write(story, file, Plan().changed(task.max_tokens, task.checkpoint_every))


def go_on(options: RunOptions, given: set[str], task: Task, file: ResumedStoryFile) -> None:
    """Load the model and go on with a story; `given` are the options that were typed.

    Raises:
        PyH2OError: the story does not fit the options, or its file cannot be read.
        typer.Exit: Ctrl-C was pressed; what was written stays.
    """
    from pyh2o.sessions.saved_story import StoryHeader
    from pyh2o.sessions.session_file import read_session
    from pyh2o.sessions.story import KIND, Story

    session = read_session(file.checkpoint, KIND)
    header = asdict(StoryHeader.of(session))
    refuse_what_is_fixed(given, header, "length and ends")
    options = options_of_header(options, given, header)
    run = StoryRun(Bars(hidden=options.verbose), how_to_go_on(file, options, given))
    with closing(loading.load_llama(options, run.bars, run.on_read)) as llm:
        story = Story.resume(
            session,
            llm,
            until=task.until,
            loop_guard=task.loop_guard,
            ignore_eos=task.ignore_eos,
            on_loop=run.on_loop,
            on_recompute=say_recompute,
        )
        if task.prompt is not None and not story.begins_with(task.prompt):
            raise InputError(
                f"the story in {file.path} has another prompt: leave the prompt out to go on with "
                "it, or give another --output"
            )
        run.restore_archive(story)
        plan = Plan.of(story.notes).changed(task.max_tokens, task.checkpoint_every)
        _say_own_sampling(story, sampling_given(options, given))
        _read_edited(story, file)
        run.write(story, file, plan)


def say_recompute(tokens: int) -> None:
    """Say that text is read once more, and what that may change."""
    terminal.say(
        f"reading {count(tokens, 'token')} again: the saved cache does not fit, and from here the "
        "story may go on otherwise than it would have"
    )


def how_to_go_on(file: StoryFile | None, options: RunOptions, given: Collection[str]) -> str:
    """The command line that goes on with a story, or "" if nothing can."""
    if file is None or file.special:
        return ""
    words = ["pyh2o", "generate", "--resume", "--output", str(file.name)]
    for name in SPEED_OPTIONS:
        if name in given:
            words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return shlex.join(words)


def _read_edited(story: Story, file: ResumedStoryFile) -> None:
    """Take over what somebody has made of the text since it was written."""
    edited = file.expect(story.text(), end_of(story))
    if edited is not None:
        story.edit(edited)
        tokens = count(len(story.tokens), "token")
        terminal.say(f"{file.name} was edited: it is read again, with {tokens}")


def _say_own_sampling(story: Story, given: dict[str, float]) -> None:
    """A story keeps its sampling; say so to who typed another."""
    own = {name: getattr(story.sampling, name) for name in given}
    others = [f"{name} {value}" for name, value in own.items() if value != given[name]]
    if others:
        terminal.say(f"the story goes on with its own sampling: {', '.join(others)}")
