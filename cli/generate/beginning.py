"""What a story begins with: a text to go on with, or what to write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyh2o.sessions.kobold import kobold_story

from ..errors import InputError
from ..terminal.terminal import terminal
from ..text_files import text_of

if TYPE_CHECKING:
    from pyh2o.core.model import Model
    from pyh2o.writing.thinking import Thinking


@dataclass(frozen=True)
class Beginning:
    """What was given to begin with.

    Attributes:
        text: to go on with, or that says what to write.
        instruct: whether it is the latter.
        memory: what the model is told before a text to go on with.
    """

    text: str
    instruct: bool
    memory: str

    def prompt(self, model: Model, thinking: Thinking) -> tuple[str | list[int], list[str]]:
        """The prompt of the story, and texts that end it.

        Args:
            model: that writes it.
            thinking: whether that thinks first, if the text says what to write.

        Raises:
            PyH2OError: the model has no chat template that says what to write.
        """
        if not self.instruct:
            return self.text, []
        # Imported here because it loads llama.cpp, which `--help` must not wait for.
        from pyh2o.writing.chat_template import asked_for

        return asked_for(model, self.text, thinking)


def read_beginning(
    prompt: str | None, file: Path | None, *, memory: Path | None, instruct: bool
) -> Beginning | None:
    """What was given; None if there is no prompt.

    Args:
        prompt: as it was typed.
        file: of the prompt, or a save of koboldcpp's.
        memory: a file of it.
        instruct: whether the prompt says what to write.

    Raises:
        InputError: a file cannot be used, or the prompt is empty.
    """
    if prompt is None and file is None:
        return None
    text = (prompt or "") if file is None else text_of(file)
    told = "" if memory is None else text_of(memory)
    save = None if file is None else kobold_story(text)
    if save is not None:
        text, told = save.text, told or save.memory
        if save.left_out:
            terminal.say(f"left out of koboldcpp's save: {', '.join(save.left_out)}")
    if not text:
        raise InputError("the prompt is empty: give the model at least one word to go on with")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("the prompt is not UTF-8 text") from None
    return Beginning(text, instruct, told)
