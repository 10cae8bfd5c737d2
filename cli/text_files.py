"""Text that comes from files, and new files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyh2o.system.files import replacement
from pyh2o.system.home import expanded

from .errors import InputError

STDIN = Path("-")


def text_of(file: Path) -> str:
    """The text of a file, or of standard input, without its last line break, that editors add.

    Raises:
        InputError: it cannot be read, is empty, which only standard input may be, or is no text.
    """
    name = "standard input" if file == STDIN else str(file)
    try:
        data = sys.stdin.buffer.read() if file == STDIN else expanded(file).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from None
    text = decoded(data, name)
    if file != STDIN and not text.strip():
        raise InputError(f"{name} is empty: give a file with a text")
    return text.removesuffix("\n")


def decoded(data: bytes, name: str) -> str:
    """Decode what an editor saved, without a byte order mark and with LF at the ends of lines.

    Raises:
        InputError: it is not UTF-8; `name` is the file's.
    """
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from None


def new_file(option: str, name: Path) -> Path:
    """Where a new file is going to be, checked before minutes of work."""
    path = expanded(name).absolute()
    if path.exists():
        raise InputError(f"{name} exists: give another {option}, or remove it")
    check_folder(option, path.parent)
    return path


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder that new files cannot be written to; `option` gave it."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: create it, or give another {option}")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder} is not writable: give {option} another folder")


def write_file(path: Path, data: bytes) -> None:
    """Write a file next to where it belongs, and rename it: a crash leaves no half of one."""
    with replacement(path, prefix=".pyh2o-new-") as file:
        file.write(data)
