"""`pyh2o generate --count`: several stories begun, or gone on with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pyh2o.generation.finish import FINISH_INTERRUPTED
from pyh2o.generation.sampling import LARGEST_SEED

from .. import loading
from ..errors import InputError
from ..options import RunOptions
from ..session_options import options_of_header, refuse_what_is_fixed, sampling_given
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from .many_stories import NewStory, OneOfMany, ResumedStory, StoriesRun
from .new_story_file import NewStoryFile
from .plan import Plan
from .resumed_story_file import ResumedStoryFile
from .task import Task, resume_command


@dataclass(frozen=True)
class Many:
    """Which stories, and how many at once.

    Attributes:
        output: whose name those of the stories are made of.
        n: how many.
        texts: places for them; None for as many as there are stories.
    """

    output: Path
    n: int
    texts: int | None

    @property
    def paths(self) -> list[Path]:
        """NAME-01.txt, NAME-02.txt ... for NAME.txt."""
        width = max(2, len(str(self.n)))
        stem, suffix = self.output.stem, self.output.suffix
        return [self.output.with_name(f"{stem}-{i:0{width}}{suffix}") for i in range(1, self.n + 1)]

    def how_to_go_on(self, options: RunOptions, given: Collection[str]) -> str:
        """The command line that goes on with all of them."""
        texts = [] if self.texts is None else ["--texts", str(self.texts)]
        return resume_command(self.output, options, given, "--count", str(self.n), *texts)


def begin_many(
    options: RunOptions,
    given: set[str],
    task: Task,
    many: Many,
    files: Sequence[NewStoryFile],
    *,
    echo: bool,
) -> None:
    """Load the model and write new stories at once; the seed is that of the first one.

    Raises:
        PyH2OError: the library refused the model, the settings or the prompt.
        typer.Exit: Ctrl-C was pressed; what was written stays.
    """
    stories = []
    for i, file in enumerate(files):
        if file.special:
            raise InputError(f"{file.name} is not a file: give another --output")
        seed = (options.sampling.seed + i) % (LARGEST_SEED + 1)
        stories.append(NewStory(file, task, replace(options.sampling, seed=seed), echo=echo))
    _write(options, given, stories, many)


def go_on_many(options: RunOptions, given: set[str], task: Task, many: Many) -> None:
    """Load the model and go on with stories at once.

    Where some were cut off, those that had come to an end stay as they are.

    Raises:
        PyH2OError: a story does not fit the options, or its file cannot be read.
        typer.Exit: Ctrl-C was pressed; what was written stays.
    """
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.saved_story import KIND, StoryHeader
    from pyh2o.sessions.session_file import read_session

    cut_off: list[OneOfMany] = []
    others: list[OneOfMany] = []
    used = options
    for path in many.paths:
        file = ResumedStoryFile(path)
        session = read_session(file.checkpoint, KIND)
        header = StoryHeader.of(session)
        if not cut_off and not others:
            refuse_what_is_fixed(given, asdict(header), "length and ends")
            used = options_of_header(options, given, asdict(header))
        plan = Plan.of(header.notes).changed(task.max_tokens, task.checkpoint_every)
        most = plan.left(len(session.tokens) - header.story.prompt_tokens)
        story = ResumedStory(file, task, most, sampling_given(options, given))
        is_cut_off = header.story.finish in (None, FINISH_INTERRUPTED)
        (cut_off if is_cut_off else others).append(story)
    if cut_off:
        for other in others:
            terminal.say(f"{other.file.name} has come to its end, and stays as it is")
    _write(used, given, cut_off or others, many)


def _write(
    options: RunOptions, given: Collection[str], stories: Sequence[OneOfMany], many: Many
) -> None:
    from pyh2o.engine.shared_model import MOST_TEXTS

    n_texts = min(len(stories), many.texts or MOST_TEXTS)
    bars = Bars(hidden=options.verbose)
    with closing(loading.load_engine(options, bars, texts=n_texts, store_mib=0)) as engine:
        run = StoriesRun(engine, stories, bars)
        run.write(n_texts, many.how_to_go_on(options, given))
