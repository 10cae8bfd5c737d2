"""`pyh2o generate`: write a story, and resume it later."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
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
from .prompt import StoryPrompt, read_prompt
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
        str | None, typer.Option("--prompt", "-p", help="The text to continue.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file",
            "-f",
            help="UTF-8 file with that text, or a save of koboldcpp; - is standard input.",
        ),
    ] = None,
    instruct: Annotated[
        bool,
        typer.Option(
            "--instruct",
            help="Send the prompt as a message, and write the answer, instead of continuing the "
            "prompt.",
        ),
    ] = False,
    reasoning_budget: ReasoningBudget = None,
    no_thinking: NoThinking = False,
    memory: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 file with text to put before the prompt, such as world info. It is never "
            "evicted, and not part of the output. --resume keeps it.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            min=0,
            help="Maximum tokens of the whole story; 0 is no limit. --resume keeps it.",
            show_default="until the model stops",
        ),
    ] = None,
    until: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Stop before this text; may be given several times. '' for none."
        ),
    ] = None,
    loop_guard: Annotated[
        bool | None,
        typer.Option(
            "--loop-guard/--no-loop-guard",
            help="Break repetition loops, and stop if the model keeps repeating itself.",
            show_default="on",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Continue when the model ends its text.",
            show_default="no-ignore-eos",
        ),
    ] = None,
    echo: Annotated[
        bool, typer.Option("--echo/--no-echo", help="Start the output with the prompt.")
    ] = True,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File for the text, written token by token. FILE.h2o is its checkpoint, and "
            "FILE.jsonl has a line of statistics per checkpoint.",
            show_default="standard output",
            rich_help_panel=STORY_FILE,
        ),
    ] = None,
    checkpoint: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens between two checkpoints. --resume keeps it.",
            show_default=str(Plan().checkpoint_every),
            rich_help_panel=STORY_FILE,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume the story in --output at the exact token, also after a crash. If the file "
            "was edited, it is read again from the edit.",
            rich_help_panel=STORY_FILE,
        ),
    ] = False,
) -> None:
    """Continue a text to a story of any length, in a cache of fixed size.

    Only the text is written to standard output or the file. Ctrl-C stops and keeps the text;
    --resume resumes a text in a file. `pyh2o batch` writes many texts at the same time.
    """
    given = typed_options(context)
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("give either --prompt TEXT or --prompt-file FILE")
    if resume:
        _check_resumption(given, output)
    elif prompt is None and prompt_file is None:
        raise typer.BadParameter("give --prompt TEXT or --prompt-file FILE, or --resume")
    if instruct and (memory is not None or "echo" in given):
        raise typer.BadParameter("--instruct cannot be combined with --memory or --echo")
    if not instruct and (reasoning_budget is not None or no_thinking):
        raise typer.BadParameter("--reasoning-budget and --no-thinking require --instruct")
    thinking = Thinking(False if no_thinking else None, reasoning_budget)
    given_prompt = read_prompt(prompt, prompt_file, memory=memory, instruct=instruct)
    plan = Plan()
    file: StoryFile | None = None
    if resume:
        # imported here, as below, because it loads llama.cpp, which would delay `--help`
        from pyh2o.sessions.text_session import read_file

        file = ResumedStoryFile(cast(Path, output))
        settings = read_file(file.checkpoint)[0].info.settings
        options = saved_options(options, given, settings, changes="length and ends")
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
                until=until,
                loop_guard=loop_guard,
                ignore_eos=ignore_eos,
            )
            plan = Plan.of(story.notes)
            if story.reread_reason:
                terminal.say(
                    f"reading {count(len(story.unread), 'token')} again, so the story may continue "
                    f"differently: {story.reread_reason}"
                )
            _check_resumed(story, file, given_prompt, sampling_given(options, given))
        else:
            assert given_prompt is not None
            first, stops = given_prompt.for_model(llm.text.model, thinking)
            story = Story(
                llm,
                first,
                sampling=options.sampling,
                until=[*(until or ()), *stops],
                echo=echo and not instruct,
                memory=given_prompt.memory,
                loop_guard=loop_guard is not False,
                ignore_eos=ignore_eos is True,
                thinking=thinking,
            )
        run.write(story, plan.changed(max_tokens, checkpoint))


def _check_resumption(given: set[str], output: Path | None) -> None:
    if output is None:
        raise typer.BadParameter("--resume requires --output FILE, the story to resume")
    if "echo" in given:
        raise typer.BadParameter("--echo cannot be changed with --resume: remove it")
    if "memory" in given:
        raise typer.BadParameter("--memory cannot be changed with --resume: remove it")
    if given & {"reasoning_budget", "no_thinking"}:
        raise typer.BadParameter(
            "--reasoning-budget and --no-thinking cannot be changed with --resume: remove them"
        )


def _check_resumed(
    story: Story,
    file: ResumedStoryFile,
    given_prompt: StoryPrompt | None,
    sampling: Mapping[str, float],
) -> None:
    """Apply edits of the file to the story, and report typed settings that it ignores.

    Args:
        story: story from the checkpoint.
        file: its file.
        given_prompt: typed prompt, if any.
        sampling: typed sampling settings.
    """
    if given_prompt is not None and not story.begins_with(
        given_prompt.for_model(story.llm.model, story.thinking)[0]
    ):
        raise InputError(
            f"the story in {file.path} has another prompt: remove the prompt to resume it, or give "
            "another --output"
        )
    if story.llm.archive_trouble:
        terminal.say(f"warning: {story.llm.archive_trouble}", style="yellow")
    own = {name: getattr(story.sampling, name) for name in sampling}
    others = [f"{name} {value}" for name, value in own.items() if value != sampling[name]]
    if others:
        terminal.say(f"the story keeps its own sampling: {', '.join(others)}")
    edited = file.expect(story.text(), end_of(story))
    if edited is not None:
        story.edit(edited)
        tokens = count(max(1, len(story.tokens) - story.llm.n_tokens), "token")
        terminal.say(f"{file.name} was edited: reading {tokens} from where it differs")
