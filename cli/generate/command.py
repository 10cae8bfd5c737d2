"""`pyh2o generate`: write a story, and resume it later."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from .saved_story import SavedStory
from .story_file import StoryFile
from .story_run import CRC, NO_LIMIT, StoryRun, end_of

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
            help="File for the text, which is written every second. The story is also saved in "
            "the chats, to be resumed.",
            show_default="standard output",
            rich_help_panel=STORY_FILE,
        ),
    ] = None,
    no_save: Annotated[
        bool,
        typer.Option(
            "--no-save",
            help="Write only the text; the story cannot be resumed.",
            rich_help_panel=STORY_FILE,
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume the story of --output at the exact token, also after a crash. If the file "
            "was edited, it is read again from the edit.",
            rich_help_panel=STORY_FILE,
        ),
    ] = False,
) -> None:
    """Continue a text to a story of any length, in a cache of fixed size.

    Only the text is written to standard output or the file. Ctrl-C stops and keeps the text;
    --resume resumes the story of a file. `pyh2o batch` writes many texts at the same time.
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
    file = None if output is None else StoryFile(output)
    with nullcontext() if file is None or no_save else SavedStory(file) as saved:
        if resume and saved is not None:
            options = saved_options(options, given, saved.find(), changes="length and ends")
        elif file is not None and file.exists:
            cure = "continue it with --resume, " if saved is not None and saved.exists else ""
            raise InputError(f"{file.name} exists: {cure}give another --output, or remove it")
        run = StoryRun(Bars(hidden=options.verbose), file)
        # A story only continues, so it needs no snapshots.
        with closing(loading.load_llama(options, run, store_mib=0)) as llm:
            # imported here because it loads llama.cpp, which would delay `--help`
            from pyh2o.sessions.story import Story

            if given_prompt is None or (resume and saved is not None):
                assert file is not None
                assert saved is not None
                story = saved.open(llm)
                _check_resumed(story, given_prompt, sampling_given(options, given), file)
                _read_edit(story, file, was_killed=saved.was_killed)
                story.set_ends(until, loop_guard, ignore_eos)
            else:
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
                if saved is not None:
                    saved.add(story)
            if max_tokens is not None:
                story.notes["max_tokens"] = max_tokens
            run.write(story, story.notes.get("max_tokens", NO_LIMIT))


def _check_resumption(given: set[str], output: Path | None) -> None:
    if output is None:
        raise typer.BadParameter("--resume requires --output FILE, the story to resume")
    unchangeable = ("echo", "memory", "no_save", "reasoning_budget", "no_thinking")
    if names := [name for name in unchangeable if name in given]:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in names)
        raise typer.BadParameter(f"{options} cannot be changed with --resume: remove it")


def _check_resumed(
    story: Story,
    given_prompt: StoryPrompt | None,
    sampling: Mapping[str, float],
    file: StoryFile,
) -> None:
    """Report what is read again, and typed settings that the story ignores.

    Args:
        story: the saved story.
        given_prompt: typed prompt, if any.
        sampling: typed sampling settings.
        file: its file.

    Raises:
        InputError: the story has another prompt.
    """
    if story.reread_reason:
        terminal.say(
            f"reading {count(len(story.unread), 'token')} again, so the story may continue "
            f"differently: {story.reread_reason}"
        )
    if given_prompt is not None and not story.begins_with(
        given_prompt.for_model(story.llm.model, story.thinking)[0]
    ):
        raise InputError(
            f"the story in {file.path} has another prompt: remove the prompt to resume it, or give "
            "another --output"
        )
    own = {name: getattr(story.sampling, name) for name in sampling}
    others = [f"{name} {value}" for name, value in own.items() if value != sampling[name]]
    if others:
        terminal.say(f"the story keeps its own sampling: {', '.join(others)}")


def _read_edit(story: Story, file: StoryFile, *, was_killed: bool) -> None:
    """Change the story as its file was edited."""
    edited = file.expect(story.text(), end_of(story), story.notes.get(CRC), was_killed=was_killed)
    if edited is not None:
        story.edit(edited)
        tokens = count(max(1, len(story.tokens) - story.llm.n_tokens), "token")
        terminal.say(f"{file.name} was edited: reading {tokens} from where it differs")
