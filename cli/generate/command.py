"""`pyh2o generate`: write a story, and go on with it later."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from pyh2o.system.home import expanded

from .. import loading
from ..errors import InputError, reported_errors
from ..options import RunOptions, takes_run_options
from ..session_options import options_of_header, refuse_what_is_fixed, sampling_given, typed_options
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from ..terminal.wording import count
from ..text_files import decoded
from .story_file import NewStoryFile, ResumedStoryFile, StoryFile
from .story_run import Plan, StoryRun, end_of

if TYPE_CHECKING:
    from pyh2o.sessions.story import Story

STDIN = Path("-")
# Options that change how fast a story is written: no checkpoint has them.
SPEED_OPTIONS = ("gpu_layers", "rpc", "threads", "threads_batch")
# A run only goes on: its text never goes back to where a copy of the cache would be of use.
NO_COPIES = 0
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
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the story in --output at the exact token, also after a crash. A file "
            "that was edited is read again.",
            rich_help_panel=STORY_FILE,
        ),
    ] = False,
    reread: Annotated[
        bool,
        typer.Option(
            "--reread",
            help="With --resume: read the text again from its start, under another model or "
            "another cache, or to build a lost archive anew.",
            rich_help_panel=STORY_FILE,
        ),
    ] = False,
) -> None:
    """Go on with a text: a story of any length in a cache of fixed size.

    Only the text goes to standard output or to the file. Ctrl-C ends it and keeps what is there;
    --resume goes on with what is in a file. `pyh2o batch` writes many texts at once.
    """
    given = typed_options(context)
    _check_usage(prompt, prompt_file, output, force=force, resume=resume)
    if resume and "echo" in given:
        raise typer.BadParameter("a story keeps its beginning: leave --echo out with --resume")
    if reread and not resume:
        raise typer.BadParameter("--reread is for a story that goes on: --resume")
    with reported_errors():
        text = None if prompt is None else _checked_prompt(prompt)
        if prompt_file is not None:
            text = _read_prompt(prompt_file)
        task = Task(text, max_tokens, until, loop_guard, ignore_eos, checkpoint)
        if resume:
            go_on(options, given, task, ResumedStoryFile(cast(Path, output)), reread=reread)
            return
        file = None if output is None else NewStoryFile(output, replace=force)
        is_prompt = file and prompt_file and expanded(prompt_file).resolve() == file.path
        if file is not None and is_prompt and not echo:
            raise InputError(
                f"--no-echo would lose the prompt in {file.name}: give another --output"
            )
        loading.check_model_stays(options, [file.path] if file else [])
        begin(options, given, task, file, echo=echo)


@dataclass(frozen=True)
class Task:
    """What to write: None is what the story had, or the default."""

    prompt: str | None
    max_tokens: int | None
    until: list[str] | None
    loop_guard: bool | None
    ignore_eos: bool | None
    checkpoint_every: int | None


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


def _read_prompt(file: Path) -> str:
    """The text of a prompt file, without its last line break, which editors add.

    Raises:
        InputError: a file that is not there, cannot be read, is not UTF-8 or is empty.
    """
    name = "standard input" if file == STDIN else str(file)
    try:
        data = sys.stdin.buffer.read() if file == STDIN else expanded(file).read_bytes()
    except FileNotFoundError:
        raise InputError(f"there is no prompt file {name}") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a folder: give --prompt-file a text file") from None
    except OSError as error:  # reading, unlike opening, does not say which file
        raise InputError(f"cannot read {name}: {error.strerror}") from None
    return _checked_prompt(decoded(data, name).removesuffix("\n"))


def _checked_prompt(prompt: str) -> str:
    """The prompt, if there is something to go on with.

    Raises:
        InputError: it is empty, or no text.
    """
    if not prompt:
        raise InputError("the prompt is empty: give the model at least one word to go on with")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("the prompt is not UTF-8 text") from None
    return prompt


def begin(
    options: RunOptions, given: set[str], task: Task, file: NewStoryFile | None, *, echo: bool
) -> None:
    """Load the model and write a new story; `given` are the options that were typed.

    Raises:
        PyH2OError: the library refused the model, the settings or the prompt.
        typer.Exit: Ctrl-C was pressed; what was written stays.
    """
    run = StoryRun(Bars(hidden=options.verbose), file, _how_to_go_on(file, options, given))
    with closing(loading.load_llama(options, run.bars, run)) as llm:
        # Imported here, as below, because it loads llama.cpp, which `--help` must not wait for.
        from pyh2o.sessions.story import Story

        story = Story(
            llm,
            cast(str, task.prompt),
            sampling=options.sampling,
            until=task.until or (),
            echo=echo,
            loop_guard=task.loop_guard is not False,
            ignore_eos=task.ignore_eos is True,
            on_loop=run.on_loop,
            copies_mib=NO_COPIES,
        )
        run.write(story, Plan().changed(task.max_tokens, task.checkpoint_every))


def go_on(
    options: RunOptions, given: set[str], task: Task, file: ResumedStoryFile, *, reread: bool
) -> None:
    """Load the model and go on with a story; `given` are the options that were typed.

    Raises:
        PyH2OError: the story does not fit the options, or its file cannot be read.
        typer.Exit: Ctrl-C was pressed; what was written stays.
    """
    from pyh2o.sessions.headers import SavedStory, read_header

    header = asdict(read_header(file.checkpoint, SavedStory))
    if not reread:
        refuse_what_is_fixed(given, header, "length and ends")
    options = options_of_header(options, given, header)
    run = StoryRun(Bars(hidden=options.verbose), file, _how_to_go_on(file, options, given))
    with closing(loading.load_llama(options, run.bars, run)) as llm:
        from pyh2o.sessions.story import Story

        story = Story.load(
            file.checkpoint,
            llm,
            reread=reread,
            until=task.until,
            loop_guard=task.loop_guard,
            ignore_eos=task.ignore_eos,
            on_loop=run.on_loop,
            on_recompute=None if reread else _say_recompute,
            copies_mib=NO_COPIES,
        )
        if task.prompt is not None and not story.begins_with(task.prompt):
            raise InputError(
                f"the story in {file.path} has another prompt: leave the prompt out to go on with "
                "it, or give another --output"
            )
        plan = Plan.of(story.notes).changed(task.max_tokens, task.checkpoint_every)
        if llm.archive_trouble:
            terminal.say(f"warning: {llm.archive_trouble}", style="yellow")
        _say_own_sampling(story, sampling_given(options, given))
        edited = file.expect(story.text(), end_of(story))
        if edited is not None:
            story.edit(edited)
            n_unread = max(1, len(story.tokens) - llm.n_tokens)
            tokens = count(n_unread, "token")
            terminal.say(f"{file.name} was edited: reading {tokens} from where it differs")
        run.write(story, plan)


def _say_recompute(tokens: int) -> None:
    """Say that text is read once more, and what that may change."""
    terminal.say(
        f"reading {count(tokens, 'token')} again: the saved cache does not fit, and from here the "
        "story may go on otherwise than it would have"
    )


def _say_own_sampling(story: Story, given: Mapping[str, float]) -> None:
    """Say that a story keeps its sampling, if another one was typed."""
    own = {name: getattr(story.sampling, name) for name in given}
    others = [f"{name} {value}" for name, value in own.items() if value != given[name]]
    if others:
        terminal.say(f"the story goes on with its own sampling: {', '.join(others)}")


def _how_to_go_on(file: StoryFile | None, options: RunOptions, given: Collection[str]) -> str:
    """The command line that goes on with a story, or "" if nothing can."""
    if file is None or file.special:
        return ""
    speed = []
    for name in SPEED_OPTIONS:
        if name in given:
            value = getattr(options, name)
            typed = ",".join(value) if isinstance(value, list) else str(value)
            speed += [f"--{name.replace('_', '-')}", typed]
    return shlex.join(["pyh2o", "generate", "--resume", "--output", str(file.name), *speed])
