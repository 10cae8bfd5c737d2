"""Atomic replacement of files, and leftovers of killed writers."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import portalocker
import pytest
from portalocker import LockFlags

from pyh2o.system.files import replacement

WRITER = """
import sys
from pathlib import Path
from pyh2o.system.files import replacement
with replacement(Path("new"), prefix=".mine-") as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def names() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def write(name: str) -> None:
    with replacement(Path(name), prefix=".mine-") as file:
        file.write(b"new")


def test_a_file_is_replaced_at_the_end() -> None:
    Path("file").write_bytes(b"old")
    with replacement(Path("file"), prefix=".mine-", mode=0o640) as file:
        file.write(b"new")
        assert Path("file").read_bytes() == b"old"
    assert Path("file").read_bytes() == b"new"
    assert Path("file").stat().st_mode & 0o777 == 0o640
    assert names() == ["file"]


def test_a_failure_leaves_the_old_file() -> None:
    Path("file").write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacement(Path("file"), prefix=".mine-"):
        raise ZeroDivisionError
    assert Path("file").read_bytes() == b"old"
    assert names() == ["file"]


def test_leftovers_of_a_killed_writer_are_removed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        for name in (".mine-notes", ".other-1.tmp"):
            Path(name).touch()
        write("first")
        assert len(names()) == 4
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert len(names()) == 4
    write("second")
    assert names() == [".mine-notes", ".other-1.tmp", "first", "second"]


def test_a_new_file_removed_before_it_is_locked_is_created_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_lost = 0

    def lock(_file: object, flags: LockFlags) -> None:
        nonlocal n_lost
        if flags == LockFlags.EXCLUSIVE and n_lost < 3:
            n_lost += 1
            [path] = Path().glob(".mine-*.tmp")
            path.unlink()

    monkeypatch.setattr(portalocker, "lock", lock)
    write("file")
    assert n_lost == 3
    assert names() == ["file"]
    assert Path("file").read_bytes() == b"new"
