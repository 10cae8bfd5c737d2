"""llama.cpp's sources are pinned, patched and copied to the build directory."""

from __future__ import annotations

import io
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

import move_pin
from llama_pin import BuildError, Pin, cached_sdist, read_pin, sha256_of
from prepare_llama_cpp import (
    BUILD_INFO,
    PATCHES,
    apply_patch,
    check_prepared,
    patches_sha256,
    read_sources,
    sync,
)

ROOT = Path(__file__).resolve().parents[2]

TEXT = "".join(f"line {n}\n" for n in range(1, 21))
PATCH = """\
Say why

--- a/src/one.cpp
+++ b/src/one.cpp
@@ -2,3 +2,4 @@ some function
 line 2
+new line
 line 3
 line 4
@@ -10,3 +11,3 @@
 line 10
-line 11
+line eleven
 line 12
"""


def patched(tmp_path: Path, text: str, patch: str = PATCH) -> str:
    path = tmp_path / "0001-test.patch"
    path.write_text(patch)
    files = {"src/one.cpp": text.encode()}
    apply_patch(files, path, tmp_path)
    return files["src/one.cpp"].decode()


def test_a_patch_is_applied(tmp_path: Path) -> None:
    expected = TEXT.replace("line 3\n", "new line\nline 3\n").replace("line 11\n", "line eleven\n")
    assert patched(tmp_path, TEXT) == expected


@pytest.mark.parametrize(
    ("text", "patch"),
    [
        (TEXT.replace("line 12\n", "line twelve\n"), PATCH),
        (TEXT.replace("line 3\n", "line 3 \n"), PATCH),  # no fuzz
        (TEXT, PATCH.replace("one.cpp", "two.cpp")),
        (TEXT, "only text\n"),
    ],
    ids=["another line", "white space", "no such file", "no diff"],
)
def test_a_patch_that_does_not_apply_is_named(tmp_path: Path, text: str, patch: str) -> None:
    with pytest.raises(BuildError, match=r"0001-test\.patch does not apply"):
        patched(tmp_path, text, patch)


def test_patches_follow_moved_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch applies after git moved its lines; a hunk without its lines is reported."""
    patches = tmp_path / "patches"
    patches.mkdir()
    (patches / "0001-test.patch").write_text(PATCH)
    monkeypatch.setattr(move_pin, "PATCHES", patches)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    moved = "a\nb\n" + TEXT
    [text] = move_pin.moved_patches({"src/one.cpp": moved.encode()}, tmp_path / "new").values()
    assert str(text).startswith("Say why\n\n--- a/src/one.cpp")
    assert "new line\nline 3\n" in patched(tmp_path, moved, str(text))
    gone = TEXT.replace("line 12\n", "")
    assert [
        *move_pin.moved_patches({"src/one.cpp": gone.encode()}, tmp_path / "gone").values()
    ] == [None]


def test_sync_writes_only_changed_files(tmp_path: Path) -> None:
    files = {"a.cpp": b"a", "src/b.cpp": b"b", "old/c.cpp": b"c"}
    assert sorted(sync(files, tmp_path)) == sorted(files)
    for name in files:
        os.utime(tmp_path / name, ns=(0, 0))

    files = {"a.cpp": b"a", "src/b.cpp": b"changed", "src/d.cpp": b"d"}
    assert sorted(sync(files, tmp_path)) == ["old/c.cpp", "src/b.cpp", "src/d.cpp"]

    present = {p.relative_to(tmp_path).as_posix(): p for p in tmp_path.rglob("*")}
    assert sorted(present) == ["a.cpp", "src", "src/b.cpp", "src/d.cpp"]
    assert {name: present[name].read_bytes() for name in files} == files
    assert present["a.cpp"].stat().st_mtime_ns == 0
    assert present["src/b.cpp"].stat().st_mtime_ns > 0
    assert sync(files, tmp_path) == []


def write_sdist(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(f"llama_cpp_python-1.0/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_external_sources_must_match_the_pin_and_the_patches(tmp_path: Path) -> None:
    info = b'{"patches": "these"}'
    with pytest.raises(BuildError, match=r"does not hold the llama\.cpp of this checkout; write"):
        check_prepared(tmp_path, info)
    sync({"CMakeLists.txt": b"", BUILD_INFO: info}, tmp_path)
    check_prepared(tmp_path, info)
    with pytest.raises(BuildError, match="does not hold"):
        check_prepared(tmp_path, b'{"patches": "others"}')


def test_only_the_needed_sources_are_extracted(tmp_path: Path) -> None:
    sdist = write_sdist(
        tmp_path / "llama_cpp_python-1.0.tar.gz",
        {
            "CMakeLists.txt": b"",
            "vendor/llama.cpp/CMakeLists.txt": b"cmake",
            "vendor/llama.cpp/src/llama.cpp": b"source",
            "vendor/llama.cpp/tools/main.cpp": b"",
        },
    )
    assert read_sources(sdist) == {"CMakeLists.txt": b"cmake", "src/llama.cpp": b"source"}


def test_an_archive_without_llama_cpp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no usable vendor/llama\.cpp"):
        read_sources(write_sdist(tmp_path / "llama_cpp_python-1.0.tar.gz", {"README.md": b""}))


def test_move_pin_reads_the_version_of_an_archive(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    sdist = write_sdist(
        tmp_path / "llama_cpp_python-1.0.tar.gz",
        {
            ".git/modules/vendor/llama.cpp/HEAD": commit.encode() + b"\n",
            "vendor/llama.cpp/ggml/CMakeLists.txt": b"set(GGML_VERSION_MAJOR 1)\n"
            b"set(GGML_VERSION_MINOR 2)\nset(GGML_VERSION_PATCH 3)\n",
        },
    )
    assert move_pin.describe(sdist, "1.0") == Pin("1.0", sha256_of(sdist), commit, "1.2.3")


def test_a_cached_archive_is_used_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr("llama_pin.download_sdist", lambda *_: pytest.fail("downloads"))
    sdist = tmp_path / "llama_cpp_python-1.0.tar.gz"
    sdist.write_bytes(b"archive")
    assert cached_sdist(Pin("1.0", sha256_of(sdist), "", "")) == sdist


def test_an_archive_with_another_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(version: str, folder: Path, sha256: str) -> Path:
        path = folder / "llama_cpp_python-1.0.tar.gz"
        path.write_bytes(b"another archive")
        return path

    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr("llama_pin.download_sdist", download)
    (tmp_path / "llama_cpp_python-1.0.tar.gz").write_bytes(b"damaged archive")
    with pytest.raises(BuildError, match="does not have the sha256") as error:
        cached_sdist(Pin("1.0", "0" * 64, "", ""))
    assert "\n" not in str(error.value)


def test_the_pin_is_the_same_everywhere() -> None:
    pin = read_pin()
    requirement = f"llama-cpp-python=={pin.version}"
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    assert re.findall(r"llama-cpp-python==[\w.]+", pyproject) == [requirement]
    assert re.findall(r"llama-cpp-python==[\w.]+", requirements) == [requirement]
    assert re.findall(r"--hash=sha256:(\w+)", requirements) == [pin.sha256]


def test_an_incomplete_pin_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "llama-cpp.toml"
    path.write_text('version = "1.0"\n')
    with pytest.raises(BuildError, match="not a usable pin"):
        read_pin(path)


def test_patches_are_few_and_in_order() -> None:
    patches = sorted(PATCHES.glob("*.patch"))
    assert [path.name[:5] for path in patches] == [f"{n:04d}-" for n in range(1, len(patches) + 1)]
    changed = re.compile(r"^(?!--- a/|\+\+\+ b/)[-+]", re.MULTILINE)
    assert sum(len(changed.findall(path.read_text())) for path in patches) < 300


def test_the_patch_hash_covers_names_and_contents(tmp_path: Path) -> None:
    hashes = []
    for name, content in (("0001-a.patch", "x"), ("0001-b.patch", "x"), ("0001-b.patch", "y")):
        folder = tmp_path / str(len(hashes))
        folder.mkdir()
        (folder / name).write_text(content)
        hashes.append(patches_sha256(folder))
    assert len(set(hashes)) == 3


def test_no_llama_cpp_source_is_tracked() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0 or not listed.stdout:
        pytest.skip("not a git checkout with tracked files")
    foreign = re.compile(r"(^|/)(ggml|gguf|llama|unicode)[^/]*\.(c|cc|cpp|cu|h|m|metal)$")
    tracked = [name for name in listed.stdout.splitlines() if foreign.search(name)]
    ours = re.compile(r"^native/(include|src)/llama-h2o[^/]*$")
    assert [name for name in tracked if not ours.search(name)] == []
