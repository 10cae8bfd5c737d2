"""How llama.cpp's sources are pinned, patched and put into the build directory."""

from __future__ import annotations

import io
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from llama_pin import BuildError, Pin, cached_sdist, read_pin, sha256_of
from move_pin import describe
from patching import PatchSyntaxError, apply_patch, parse_patch, read_patches
from prepare_llama_cpp import (
    BUILD_INFO,
    PATCHES,
    check_prepared,
    patches_sha256,
    read_sources,
    sync,
    write_if_changed,
)

ROOT = Path(__file__).resolve().parents[2]

TEXT = "".join(f"line {n}\n" for n in range(1, 21))

PATCH = """\
Subject: say why

--- in the header is free text.

diff --git a/src/one.cpp b/src/one.cpp
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
diff --git a/src/two.cpp b/src/two.cpp
--- a/src/two.cpp
+++ b/src/two.cpp
@@ -1,2 +1 @@
-line 1
 line 2
--\x20
2.39.5
"""


def apply(text: str, patch: str) -> tuple[str, list[str], list[str]]:
    """Apply a patch to src/one.cpp. Returns its text, the notes on moved hunks, the failures."""
    files = {"src/one.cpp": text.encode(), "src/two.cpp": TEXT.encode()}
    report = apply_patch(files, parse_patch("0001-test.patch", patch))
    failures = [str(failure) for failure in report.failures]
    return files["src/one.cpp"].decode(), report.moved, failures


def one_hunk(body: str, header: str = "@@ -2,3 +2,3 @@") -> str:
    return f"--- a/src/one.cpp\n+++ b/src/one.cpp\n{header}\n{body}"


# --- applying patches ---------------------------------------------------------------------------


def test_patches_are_the_same_as_with_git(tmp_path: Path) -> None:
    """Ours and `git apply` agree, also where the text has moved."""
    if subprocess.run(["git", "--version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs git")
    moved = "a\nb\n" + TEXT
    for name, text in (("one", moved), ("two", TEXT)):
        write_if_changed(tmp_path / f"src/{name}.cpp", text.encode())
    subprocess.run(
        ["git", "apply", "-"],
        input=PATCH.encode(),
        cwd=tmp_path,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
        check=True,
    )

    files = {"src/one.cpp": moved.encode(), "src/two.cpp": TEXT.encode()}
    report = apply_patch(files, parse_patch("0001-test.patch", PATCH))
    assert report.failures == []
    for name, content in files.items():
        assert content == (tmp_path / name).read_bytes()


def test_hunks_follow_their_lines_and_say_so() -> None:
    text, moved, failures = apply("a\nb\nc\n" + TEXT, PATCH)
    assert "line 2\nnew line\nline 3\n" in text
    assert "line 10\nline eleven\nline 12\n" in text
    assert moved == ["0001-test.patch: src/one.cpp, hunk 1: +3 lines"]
    assert failures == []


def test_a_hunk_that_does_not_apply_is_named() -> None:
    """The other hunks still apply, so that one run reports every failing hunk."""
    changed = TEXT.replace("line 12\n", "line twelve\n")
    text, _, failures = apply(changed, PATCH)
    assert failures == [
        "0001-test.patch: src/one.cpp, hunk 2 (line 10): its lines are nowhere in the file"
    ]
    assert text == changed.replace("line 3\n", "new line\nline 3\n")


@pytest.mark.parametrize(
    "text", [TEXT.replace("line 3\n", "line 3 \n"), TEXT.replace("3\n", "3\r\n")]
)
def test_there_is_no_fuzz(text: str) -> None:
    result, _, failures = apply(text, one_hunk(" line 2\n-line 3\n+x\n line 4\n"))
    assert result == text
    assert len(failures) == 1


def test_an_ambiguous_place_is_refused() -> None:
    patch = one_hunk(" line 2\n-line 3\n+x\n line 4\n")
    result, _, failures = apply("first\n" + TEXT + TEXT, patch)
    assert result == "first\n" + TEXT + TEXT
    assert failures == [
        "0001-test.patch: src/one.cpp, hunk 1 (line 2): "
        "its lines occur 2 times, none at the expected line"
    ]
    # at its exact place a hunk is not ambiguous
    assert apply(TEXT + TEXT, patch)[2] == []


def test_hunks_stay_in_order() -> None:
    patch = one_hunk(" line 9\n-line 10\n+x\n", "@@ -9,2 +9,2 @@")
    patch += "@@ -12,2 +12,2 @@\n line 2\n-line 3\n+y\n"
    assert len(apply(TEXT, patch)[2]) == 1


def test_a_missing_file_is_named() -> None:
    report = apply_patch({"src/one.cpp": TEXT.encode()}, parse_patch("0001-test.patch", PATCH))
    assert [str(failure) for failure in report.failures] == [
        "0001-test.patch: src/two.cpp: no such file"
    ]


def test_a_last_line_without_line_feed() -> None:
    end = "\\ No newline at end of file\n"
    patch = one_hunk(f" line 19\n-line 20\n{end}+twenty\n{end}", "@@ -19,2 +19,2 @@")
    assert apply(TEXT.removesuffix("\n"), patch)[0].endswith("line 19\ntwenty")
    assert len(apply(TEXT, patch)[2]) == 1


def test_an_empty_context_line_may_have_lost_its_blank() -> None:
    patch = one_hunk(" a\n\n-b\n+c\n", "@@ -1,3 +1,3 @@")
    assert apply("a\n\nb\n", patch)[0] == "a\n\nc\n"


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ("only text\n", "contains no diff"),
        (one_hunk(" line 2\n-line 3\n"), "shorter than its header"),
        (one_hunk(" line 2\n-line 3\n+x\n line 4\n line 5\n"), "longer than its header"),
        (one_hunk(" line 2\n-line 3\n+x\n line 4\n--- y\n"), "longer than its header"),
        (one_hunk("+x\n", "@@ -0,0 +1 @@"), "no context lines"),
        (one_hunk("", "no hunk"), "no hunk follows"),
        ("@@ -2,3 +2,3 @@\n line 2\n", "without a '--- a/'"),
        ("--- /dev/null\n+++ b/new.cpp\n@@ -0,0 +1 @@\n+x\n", "the same path"),
        ("--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-x\n+y\n", "the same path"),
        ("diff --git a/x b/y\nrename from x\nrename to y\n", "only changes of text files"),
        (PATCH + "diff --git a/x.png b/x.png\nGIT binary patch\n", "only changes of text files"),
    ],
)
def test_what_is_no_plain_change_is_refused(patch: str, reason: str) -> None:
    with pytest.raises(PatchSyntaxError, match=re.escape(reason)) as error:
        parse_patch("0001-test.patch", patch)
    assert str(error.value).startswith("0001-test.patch:")


# --- the sources in the build directory -------------------------------------------------------


def test_sync_writes_only_what_changed(tmp_path: Path) -> None:
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


def test_sources_from_elsewhere_are_of_this_pin_and_these_patches(tmp_path: Path) -> None:
    info = b'{"patches": "these"}'
    with pytest.raises(BuildError, match=r"does not hold the llama\.cpp of this checkout; write"):
        check_prepared(tmp_path, info)
    sync({"CMakeLists.txt": b"", BUILD_INFO: info}, tmp_path)
    check_prepared(tmp_path, info)
    with pytest.raises(BuildError, match="does not hold"):
        check_prepared(tmp_path, b'{"patches": "others"}')


def test_only_the_needed_sources_are_read(tmp_path: Path) -> None:
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


def test_move_pin_reads_what_an_archive_contains(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    sdist = write_sdist(
        tmp_path / "llama_cpp_python-1.0.tar.gz",
        {
            ".git/modules/vendor/llama.cpp/HEAD": commit.encode() + b"\n",
            "vendor/llama.cpp/ggml/CMakeLists.txt": b"set(GGML_VERSION_MAJOR 1)\n"
            b"set(GGML_VERSION_MINOR 2)\nset(GGML_VERSION_PATCH 3)\n",
        },
    )
    assert describe(sdist, "1.0") == Pin("1.0", sha256_of(sdist), commit, "1.2.3")


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


# --- this checkout ------------------------------------------------------------------------------


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
    patches = read_patches(PATCHES)
    numbers = [patch.name[:5] for patch in patches]
    assert numbers == [f"{n:04d}-" for n in range(1, len(patches) + 1)]
    assert sum(patch.changed for patch in patches) < 300


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
