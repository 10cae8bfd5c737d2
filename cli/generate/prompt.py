"""The text that a story goes on after."""

from __future__ import annotations

import sys
from pathlib import Path

from pyh2o.system.home import expanded

from ..errors import InputError
from ..text_files import decoded

STDIN = Path("-")


def read_prompt(file: Path) -> str:
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
    return checked_prompt(decoded(data, name).removesuffix("\n"))


def checked_prompt(prompt: str) -> str:
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
