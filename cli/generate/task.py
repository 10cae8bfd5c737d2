"""What to write, and the story that it makes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..errors import InputError
from ..options import RunOptions
from ..terminal.wording import count
from .pen import end_of
from .resumed_story_file import ResumedStoryFile

if TYPE_CHECKING:
    from pyh2o.generation.repetition import Loop
    from pyh2o.generation.sampling import Sampling
    from pyh2o.llama import Llama
    from pyh2o.sessions.session_file import Session
    from pyh2o.sessions.story import Story


# Options that change how fast a story is written: no checkpoint has them.
SPEED_OPTIONS = ("gpu_layers", "rpc", "threads", "threads_batch")
# A run only goes on: its text never goes back to where a copy of the cache would be of use.
NO_COPIES = 0


@dataclass(frozen=True)
class Task:
    """What to write: None is what the story had, or the default."""

    prompt: str | None
    max_tokens: int | None
    until: list[str] | None
    loop_guard: bool | None
    ignore_eos: bool | None
    checkpoint_every: int | None

    def new_story(
        self, llm: Llama, sampling: Sampling, on_loop: Callable[[Loop], None], *, echo: bool
    ) -> Story:
        """A story that begins.

        Raises:
            PyH2OError: the library refused the prompt.
        """
        # Imported here because it loads llama.cpp, which `--help` must not wait for.
        from pyh2o.sessions.story import Story

        return Story(
            llm,
            cast(str, self.prompt),
            sampling=sampling,
            until=self.until or (),
            echo=echo,
            loop_guard=self.loop_guard is not False,
            ignore_eos=self.ignore_eos is True,
            on_loop=on_loop,
            copies_mib=NO_COPIES,
        )

    def resumed_story(
        self,
        session: Session,
        llm: Llama,
        file: ResumedStoryFile,
        *,
        on_loop: Callable[[Loop], None],
        on_recompute: Callable[[int], None],
    ) -> Story:
        """A story that goes on.

        Raises:
            PyH2OError: it does not fit the model, or has another prompt than was typed.
        """
        from pyh2o.sessions.story import Story

        story = Story.resume(
            session,
            llm,
            until=self.until,
            loop_guard=self.loop_guard,
            ignore_eos=self.ignore_eos,
            on_loop=on_loop,
            on_recompute=on_recompute,
            copies_mib=NO_COPIES,
        )
        if self.prompt is not None and not story.begins_with(self.prompt):
            raise InputError(
                f"the story in {file.path} has another prompt: leave the prompt out to go on with "
                "it, or give another --output"
            )
        return story


def resume_command(output: Path, options: RunOptions, given: Collection[str], *words: str) -> str:
    """The command line that goes on with a story, with further words."""
    speed = [
        word
        for name in SPEED_OPTIONS
        if name in given
        for word in (f"--{name.replace('_', '-')}", _typed(getattr(options, name)))
    ]
    return shlex.join(["pyh2o", "generate", "--resume", "--output", str(output), *words, *speed])


def _typed(value: object) -> str:
    """The value of an option as one would type it."""
    return ",".join(value) if isinstance(value, list) else str(value)


def recompute_note(tokens: int) -> str:
    """For a person: text is read once more, and what that may change."""
    return (
        f"reading {count(tokens, 'token')} again: the saved cache does not fit, and from here the "
        "story may go on otherwise than it would have"
    )


def read_edited(story: Story, file: ResumedStoryFile, name: str) -> str:
    """Take over what somebody has made of the text of a file since it was written.

    Returns:
        for a person: that the file, under this name, was edited; or "".

    Raises:
        InputError: it was made something that is no text.
    """
    edited = file.expect(story.text(), end_of(story))
    if edited is None:
        return ""
    story.edit(edited)
    return f"{name} was edited: it is read again, with {count(len(story.tokens), 'token')}"


def own_sampling_note(story: Story, given: Mapping[str, float]) -> str:
    """For a person: a story keeps its sampling, if another one was typed; or ""."""
    own = {name: getattr(story.sampling, name) for name in given}
    others = [f"{name} {value}" for name, value in own.items() if value != given[name]]
    return f"the story goes on with its own sampling: {', '.join(others)}" if others else ""
