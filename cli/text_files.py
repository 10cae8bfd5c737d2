"""Text that comes from files."""

from __future__ import annotations

from pathlib import Path

from .errors import InputError


def decoded(data: bytes, name: str) -> str:
    """The text of a file, with the line breaks that models know.

    Args:
        data: what is in the file.
        name: of the file, for the message.

    Raises:
        InputError: it is not UTF-8.
    """
    try:
        # utf-8-sig also takes the mark that some editors put at the start of a file.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from None
    return text.replace("\r\n", "\n")


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
