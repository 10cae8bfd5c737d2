"""What every subject of a trial is: something that writes files which people cannot get back.

It is run without trouble once, to know what must come out. Then it is run in trouble, its files are
looked at as they were left, and it is gone on with: nothing that was said to be saved may be gone,
and the end must be the same as without trouble.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from faulty_process import Ended, Fault, Trouble

CACHE = ["--ctx=512", "--hh=80", "--recent=32", "--slack=8", "--recall=16"]
# What could not be archived is not recalled, and what is drawn is other from there on.
ARCHIVE_LOST = re.compile(r"nothing is archived|\.archive\.\S+ cannot be written")
# What a clock that goes back, or stands still, makes of times and speeds.
NO_FIGURE = re.compile(r"(?<![\w.-])-\d|\b(inf|nan)\b")
SAMPLING = ["--seed=7", "--temp=1", "--top-k=40"]


@dataclass(frozen=True)
class Found:
    """What a trial came to.

    Attributes:
        ended: how the program ended that was in trouble.
        complete: whether it had done all that it was asked to.
    """

    ended: Ended
    complete: bool


class Subject(Protocol):
    """Something that writes files.

    Attributes:
        name: of it.
        n_operations: that it does to its files without trouble.
    """

    name: str
    n_operations: int

    def prepare(self, folder: Path) -> None:
        """Find out in a folder, which is emptied, what must come out."""

    def check(self, folder: Path, trouble: Trouble) -> Found:
        """Do it in an empty folder, in trouble, and go on without.

        Raises:
            AssertionError: something was lost, does not open, or is not what it must be.
        """


def check_end(ended: Ended, trouble: Trouble) -> None:
    """A program in trouble ends by itself, in order, and says in a line what is wrong."""
    said = f"exit code {ended.code}: {ended.notes}"
    assert "Traceback" not in ended.notes, said
    if trouble.fault in (Fault.KILL, Fault.POWER):
        assert ended.killed or ended.code == 0, said
    elif trouble.fault in (Fault.SHORT, Fault.CLOCK, Fault.SLEEP):
        assert ended.code == 0, said
        assert not NO_FIGURE.search(ended.notes), said
    else:
        assert ended.code in (0, 1), said
        assert ended.code == 0 or re.search("error: |warning: .* not saved", ended.notes), said


def emptied(folder: Path) -> Path:
    """The folder, without anything in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
