"""The prompt of a story: a text to continue, or an instruction."""

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
class StoryPrompt:
    """The prompt of a story.

    Attributes:
        text: text to continue, or an instruction.
        instruct: whether it is an instruction.
        memory: text before a text to continue, which is not part of the story.
    """

    text: str
    instruct: bool
    memory: str

    def for_model(self, model: Model, thinking: Thinking) -> tuple[str | list[int], list[str]]:
        """Return the prompt for a model, and texts that end the story.

        Raises:
            PyH2OError: the model has no chat template for an instruction.
        """
        if not self.instruct:
            return self.text, []
        # imported here because it loads llama.cpp, which would delay `--help`
        from pyh2o.writing.chat_prompt import prompt_for_message

        return prompt_for_message(model, self.text, thinking)


def read_prompt(
    prompt: str | None, file: Path | None, *, memory: Path | None, instruct: bool
) -> StoryPrompt | None:
    """Return the given prompt; None if there is none.

    Args:
        prompt: the typed text.
        file: file with the prompt, or a save of koboldcpp.
        memory: file with the memory.
        instruct: whether the prompt is an instruction.

    Raises:
        InputError: a file cannot be used, or the prompt is empty.
    """
    if prompt is None and file is None:
        return None
    text = (prompt or "") if file is None else text_of(file)
    memory_text = "" if memory is None else text_of(memory)
    save = None if file is None else kobold_story(text)
    if save is not None:
        text, memory_text = save.text, memory_text or save.memory
        if save.left_out:
            terminal.say(f"ignored in koboldcpp's save: {', '.join(save.left_out)}")
    if not text:
        raise InputError("the prompt is empty: give at least one word")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("the prompt is not UTF-8 text") from None
    return StoryPrompt(text, instruct, memory_text)
