"""Read text files and standard input, and write new files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyh2o.system.files import replacement
from pyh2o.system.home import expanded

from .errors import InputError

STDIN = Path("-")


def text_of(file: Path) -> str:
    """Return the text of a file or of standard input, without its last line break."""
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
    """Decode UTF-8, remove a byte order mark, and convert line ends to LF."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from None


def new_file(option: str, name: Path) -> Path:
    """Return the path of a new file, checked before minutes of work."""
    path = expanded(name).absolute()
    if path.exists():
        raise InputError(f"{name} exists: give another {option}, or remove it")
    check_folder(option, path.parent)
    return path


def check_folder(option: str, folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"no such folder {folder}: create it, or give another {option}")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder} is not writable: give {option} another folder")


def write_file(path: Path, data: bytes) -> None:
    """Write a temporary file and rename it, so that a crash leaves no partial file."""
    with replacement(path, prefix=".pyh2o-new-") as file:
        file.write(data)
