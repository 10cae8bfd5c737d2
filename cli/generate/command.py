"""`pyh2o generate`: write a story, and go on with it later."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer

from pyh2o.system.home import expanded

from .. import loading
from ..errors import InputError, reported_errors
from ..options import RunOptions, takes_run_options
from ..session_options import options_of_header, refuse_what_is_fixed, sampling_given, typed_options
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from .many import Many, begin_many, go_on_many
from .new_story_file import NewStoryFile
from .plan import Plan
from .prompt import checked_prompt, read_prompt
from .resumed_story_file import ResumedStoryFile
from .story_file import StoryFile
from .story_run import StoryRun
from .task import Task, own_sampling_note, read_edited, recompute_note, resume_command

STORY_FILE = "Story file"


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
    n_stories: Annotated[
        int | None,
        typer.Option(
            "--count",
            min=1,
            help="Write so many stories at once, with the seeds SEED, SEED + 1 and so on: FILE.txt "
            "becomes FILE-01.txt, FILE-02.txt and so on.",
            show_default="one, in FILE itself",
            rich_help_panel=STORY_FILE,
        ),
    ] = None,
    texts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Stories of --count that are written at once, each with a cache; others wait.",
            show_default="all",
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
    _check_count(n_stories, texts, output)
    if resume and "echo" in given:
        raise typer.BadParameter("a story keeps its beginning: leave --echo out with --resume")
    with reported_errors():
        text = None if prompt is None else checked_prompt(prompt)
        if prompt_file is not None:
            text = read_prompt(prompt_file)
        task = Task(text, max_tokens, until, loop_guard, ignore_eos, checkpoint)
        if n_stories is not None:
            many = Many(cast(Path, output), n_stories, texts)
            if resume:
                go_on_many(options, given, task, many)
            else:
                files = [NewStoryFile(path, replace=force) for path in many.paths]
                _check_prompt_stays(files, prompt_file, echo=echo)
                loading.check_model_stays(options, [file.path for file in files])
                begin_many(options, given, task, many, files, echo=echo)
        elif resume:
            go_on(options, given, task, ResumedStoryFile(cast(Path, output)))
        else:
            file = None if output is None else NewStoryFile(output, replace=force)
            _check_prompt_stays([file] if file else [], prompt_file, echo=echo)
            loading.check_model_stays(options, [file.path] if file else [])
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


def _check_count(n_stories: int | None, texts: int | None, output: Path | None) -> None:
    if n_stories is not None and output is None:
        raise typer.BadParameter("--count needs --output FILE, for the names of the stories")
    if texts is not None and n_stories is None:
        raise typer.BadParameter("--texts is for the stories of --count")


def _check_prompt_stays(
    files: Sequence[NewStoryFile], prompt_file: Path | None, *, echo: bool
) -> None:
    """Refuse to replace the file of the prompt by a story that does not begin with it."""
    if echo or prompt_file is None:
        return
    for file in files:
        if expanded(prompt_file).resolve() == file.path:
            raise InputError(
                f"--no-echo would lose the prompt in {file.name}: give another --output"
            )


def begin(
    options: RunOptions, given: set[str], task: Task, file: NewStoryFile | None, *, echo: bool
) -> None:
    """Load the model and write a new story; `given` are the options that were typed.

    Raises:
        PyH2OError: the library refused the model, the settings or the prompt.
        typer.Exit: Ctrl-C was pressed; what was written stays.
    """
    run = StoryRun(Bars(hidden=options.verbose), how_to_go_on(file, options, given))
    with closing(loading.load_llama(options, run.bars, run)) as llm:
        story = task.new_story(llm, options.sampling, run.on_loop, echo=echo)
        run.write(story, file, Plan().changed(task.max_tokens, task.checkpoint_every))


def go_on(options: RunOptions, given: set[str], task: Task, file: ResumedStoryFile) -> None:
    """Load the model and go on with a story; `given` are the options that were typed.

    Raises:
        PyH2OError: the story does not fit the options, or its file cannot be read.
        typer.Exit: Ctrl-C was pressed; what was written stays.
    """
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.saved_story import KIND, StoryHeader
    from pyh2o.sessions.session_file import read_session

    session = read_session(file.checkpoint, KIND)
    header = asdict(StoryHeader.of(session))
    refuse_what_is_fixed(given, header, "length and ends")
    options = options_of_header(options, given, header)
    run = StoryRun(Bars(hidden=options.verbose), how_to_go_on(file, options, given))
    with closing(loading.load_llama(options, run.bars, run)) as llm:
        story = task.resumed_story(
            session, llm, file, on_loop=run.on_loop, on_recompute=say_recompute
        )
        run.restore_archive(story)
        plan = Plan.of(story.notes).changed(task.max_tokens, task.checkpoint_every)
        for note in (
            own_sampling_note(story, sampling_given(options, given)),
            read_edited(story, file, str(file.name)),
        ):
            if note:
                terminal.say(note)
        run.write(story, file, plan)


def say_recompute(tokens: int) -> None:
    """Say that text is read once more, and what that may change."""
    terminal.say(recompute_note(tokens))


def how_to_go_on(file: StoryFile | None, options: RunOptions, given: Collection[str]) -> str:
    """The command line that goes on with a story, or "" if nothing can."""
    return "" if file is None or file.special else resume_command(file.name, options, given)
