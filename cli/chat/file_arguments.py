"""Files as they are typed after a command of the chat."""

from __future__ import annotations

import shlex
from io import StringIO
from pathlib import Path

from ..errors import InputError
from ..text_files import decoded


def whole_file(argument: str) -> Path:
    """The file that an argument is.

    Raises:
        InputError: it is more than that, or no name of a file.
    """
    file, rest = file_and_rest(argument)
    if rest:
        raise InputError(f"{argument!r} is more than a file: put quotes around a name with spaces")
    return file


def file_and_rest(argument: str) -> tuple[Path, str]:
    """A file, in quotes or with backslashes if its name has spaces, and the text after it.

    Raises:
        InputError: a quote is not closed, or no name of a file.
    """
    if _is_file(argument):
        return _path(argument), ""
    text = StringIO(argument)
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        name = lexer.get_token() or ""
    except ValueError:
        raise InputError(f"a quote in {argument!r} is not closed") from None
    return _path(name), text.read().strip()


def _path(name: str) -> Path:
    try:
        if "\0" in name:
            raise ValueError
        return Path(name).expanduser()
    except (ValueError, RuntimeError):  # ~ and no such user
        raise InputError(f"{name!r} cannot be the name of a file") from None


def _is_file(name: str) -> bool:
    try:
        return _path(name).is_file()
    except (InputError, OSError):  # too long for a name, such as a whole question
        return False


def text_of(file: Path) -> str:
    """The text of a file.

    Raises:
        InputError: it cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = decoded(file.read_bytes(), str(file))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    if not text.strip():
        raise InputError(f"{file} is empty: nothing was sent")
    return text.removesuffix("\n")
