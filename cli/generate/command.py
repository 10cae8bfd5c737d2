"""`pyh2o generate`: write a story, and go on with it later."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from pyh2o.writing.thinking import Thinking

from .. import loading
from ..errors import InputError
from ..options import NoThinking, ReasoningBudget, RunOptions, takes_run_options
from ..session_options import sampling_given, saved_options, typed_options
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from ..terminal.wording import count
from .beginning import Beginning, read_beginning
from .story_file import NewStoryFile, ResumedStoryFile, StoryFile
from .story_run import Plan, StoryRun, end_of

if TYPE_CHECKING:
    from pyh2o.sessions.story import Story

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
            "--prompt-file",
            "-f",
            help="A UTF-8 file with that text, or a save of koboldcpp's; - is standard input.",
        ),
    ] = None,
    instruct: Annotated[
        bool,
        typer.Option(
            "--instruct",
            help="The prompt says what to write: the model gets it as a message, and the text is "
            "the answer.",
        ),
    ] = False,
    reasoning_budget: ReasoningBudget = None,
    no_thinking: NoThinking = False,
    memory: Annotated[
        Path | None,
        typer.Option(
            help="A UTF-8 file with what the model is told first: never evicted, and no part of "
            "the text. --resume remembers it.",
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
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("give either --prompt TEXT or --prompt-file FILE")
    if resume:
        _check_resumption(given, output)
    elif prompt is None and prompt_file is None:
        raise typer.BadParameter("give --prompt TEXT or --prompt-file FILE, or --resume")
    elif reread:
        raise typer.BadParameter("--reread is for a story that goes on: --resume")
    if instruct and (memory is not None or "echo" in given):
        raise typer.BadParameter("--instruct has neither --memory nor --echo: the prompt says all")
    if not instruct and (reasoning_budget is not None or no_thinking):
        raise typer.BadParameter("only what --instruct asks for has thoughts: give that, too")
    thinking = Thinking(False if no_thinking else None, reasoning_budget)
    beginning = read_beginning(prompt, prompt_file, memory=memory, instruct=instruct)
    plan = Plan()
    file: StoryFile | None = None
    if resume:
        # Imported here, as below, because it loads llama.cpp, which `--help` must not wait for.
        from pyh2o.sessions.headers import SavedStory, read_header

        file = ResumedStoryFile(cast(Path, output))
        header = asdict(read_header(file.checkpoint, SavedStory))
        options = saved_options(options, given, header, reread=reread, changes="length and ends")
    elif output is not None:
        file = NewStoryFile(output)
    run = StoryRun(Bars(hidden=options.verbose), file)
    # A story only continues, so it needs no snapshots.
    with closing(loading.load_llama(options, run, store_mib=0)) as llm:
        from pyh2o.sessions.story import Story

        if isinstance(file, ResumedStoryFile):
            story = Story.load(
                file.checkpoint,
                llm,
                reread=reread,
                until=until,
                loop_guard=loop_guard,
                ignore_eos=ignore_eos,
            )
            plan = Plan.of(story.notes)
            if len(story.unread) > 1 and not reread:
                terminal.say(
                    f"reading {count(len(story.unread), 'token')} again: the saved cache does not "
                    "fit, and the story may go on otherwise than it would have"
                )
            _check_resumed(story, file, beginning, sampling_given(options, given))
        else:
            assert beginning is not None
            first, stops = beginning.prompt(llm.text.model, thinking)
            story = Story(
                llm,
                first,
                sampling=options.sampling,
                until=[*(until or ()), *stops],
                echo=echo and not instruct,
                memory=beginning.memory,
                loop_guard=loop_guard is not False,
                ignore_eos=ignore_eos is True,
                thinking=thinking,
            )
        run.write(story, plan.changed(max_tokens, checkpoint))


def _check_resumption(given: set[str], output: Path | None) -> None:
    if output is None:
        raise typer.BadParameter("--resume needs --output FILE, the story to go on with")
    if "echo" in given:
        raise typer.BadParameter("a story keeps its beginning: leave --echo out with --resume")
    if "memory" in given:
        raise typer.BadParameter("a story keeps its memory: leave --memory out with --resume")
    if given & {"reasoning_budget", "no_thinking"}:
        raise typer.BadParameter(
            "a story keeps what was said of thoughts: leave that out with --resume"
        )


def _check_resumed(
    story: Story,
    file: ResumedStoryFile,
    beginning: Beginning | None,
    sampling: Mapping[str, float],
) -> None:
    """Take over what somebody has made of the file, and say what is other than it was typed.

    Args:
        story: as its checkpoint has it.
        file: of the story.
        beginning: that was typed, if any.
        sampling: what was typed of it.
    """
    if beginning is not None and not story.begins_with(
        beginning.prompt(story.llm.model, story.thinking)[0]
    ):
        raise InputError(
            f"the story in {file.path} has another prompt: leave the prompt out to go on with "
            "it, or give another --output"
        )
    if story.llm.archive_trouble:
        terminal.say(f"warning: {story.llm.archive_trouble}", style="yellow")
    own = {name: getattr(story.sampling, name) for name in sampling}
    others = [f"{name} {value}" for name, value in own.items() if value != sampling[name]]
    if others:
        terminal.say(f"the story goes on with its own sampling: {', '.join(others)}")
    edited = file.expect(story.text(), end_of(story))
    if edited is not None:
        story.edit(edited)
        tokens = count(max(1, len(story.tokens) - story.llm.n_tokens), "token")
        terminal.say(f"{file.name} was edited: reading {tokens} from where it differs")
