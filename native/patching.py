"""Strict application of unified diffs.

Every context line has to match exactly (no fuzz). A hunk that is not where its header says may
apply elsewhere, but only if there is exactly one such place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

_HUNK_HEADER = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchSyntaxError(ValueError):
    """The text is not a unified diff of the kind we apply."""


@dataclass(frozen=True)
class Hunk:
    """One replacement of consecutive lines. Lines keep their line ends."""

    number: int  # within its file, from 1
    start: int  # line of the old text where the hunk begins, from 1
    old: tuple[str, ...]
    new: tuple[str, ...]
    changed: int  # lines added plus lines removed


@dataclass(frozen=True)
class FilePatch:
    """All hunks for one file, in order."""

    path: str  # relative to the llama.cpp root, with forward slashes
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """One patch file: free text, then the changes of one or more files."""

    name: str
    files: tuple[FilePatch, ...]

    @property
    def changed(self) -> int:
        return sum(hunk.changed for file in self.files for hunk in file.hunks)


@dataclass(frozen=True)
class Failure:
    """A hunk that does not apply, and why."""

    patch: str
    path: str
    hunk: Hunk | None  # None: the whole file is missing
    reason: str

    def __str__(self) -> str:
        where = f", hunk {self.hunk.number} (line {self.hunk.start})" if self.hunk else ""
        return f"{self.patch}: {self.path}{where}: {self.reason}"


@dataclass
class Report:
    """What applying a patch did: moved hunks are notes, failures left their file's hunk out."""

    moved: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def read_patches(folder: Path) -> list[Patch]:
    """Parse the patches of a folder, in the order of their numbers."""
    return [
        parse_patch(path.name, path.read_bytes().decode("utf-8"))
        for path in sorted(folder.glob("*.patch"))
    ]


def parse_patch(name: str, text: str) -> Patch:
    """Parse a patch with `a/` and `b/` paths that changes existing files.

    Raises PatchSyntaxError for anything else: created, deleted, renamed or binary files, and
    hunks whose length is not the one in their header.
    """
    lines = _split_lines(text)
    files: list[FilePatch] = []
    announced = None  # line of a "diff --git" that no change has followed yet
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("@@ "):
            raise PatchSyntaxError(f"{name}:{at + 1}: hunk without a '--- a/' and '+++ b/' header")
        if line.startswith("diff --git "):
            _refuse_without_hunks(name, announced)
            announced = at + 1
        if _is_file_header(lines, at):
            path = _target_path(name, lines, at)
            hunks, at = _parse_hunks(name, lines, at + 2)
            files.append(FilePatch(path, hunks))
            announced = None
        else:
            at += 1
    _refuse_without_hunks(name, announced)
    if not files:
        raise PatchSyntaxError(f"{name}: contains no diff")
    return Patch(name, tuple(files))


def apply_patch(files: dict[str, bytes], patch: Patch) -> Report:
    """Apply a patch to `files` (path -> content) in place, as far as its hunks apply."""
    report = Report()
    for file in patch.files:
        if file.path not in files:
            report.failures.append(Failure(patch.name, file.path, None, "no such file"))
            continue
        lines = _split_lines(files[file.path].decode("utf-8"))
        shift = 0  # how far the text has moved since the patch was made, above this hunk
        done = 0  # lines above belong to earlier hunks
        for hunk in file.hunks:
            expected = hunk.start - 1 + shift
            try:
                at = _find(lines, hunk.old, expected, done)
            except LookupError as error:
                report.failures.append(Failure(patch.name, file.path, hunk, str(error)))
                continue
            if at != expected:
                report.moved.append(
                    f"{patch.name}: {file.path}, hunk {hunk.number}: {at - expected:+d} lines"
                )
            lines[at : at + len(hunk.old)] = hunk.new
            done = at + len(hunk.new)
            shift += at - expected + len(hunk.new) - len(hunk.old)
        files[file.path] = "".join(lines).encode("utf-8")
    return report


def _find(lines: list[str], wanted: tuple[str, ...], expected: int, first: int) -> int:
    def matches(at: int) -> bool:
        return tuple(lines[at : at + len(wanted)]) == wanted

    if expected >= first and matches(expected):
        return expected
    places = [at for at in range(first, len(lines) - len(wanted) + 1) if matches(at)]
    if not places:
        raise LookupError("its lines are nowhere in the file")
    if len(places) > 1:
        raise LookupError(f"its lines occur {len(places)} times, none at the expected line")
    return places[0]


def _parse_hunks(name: str, lines: list[str], at: int) -> tuple[tuple[Hunk, ...], int]:
    hunks: list[Hunk] = []
    while at < len(lines) and (header := _HUNK_HEADER.match(lines[at])):
        hunk, at = _parse_hunk(f"{name}:{at + 1}: hunk {len(hunks) + 1}", header, lines, at + 1)
        hunks.append(replace(hunk, number=len(hunks) + 1))
    if not hunks:
        raise PatchSyntaxError(f"{name}:{at + 1}: no hunk follows the file header")
    return tuple(hunks), at


def _parse_hunk(where: str, header: re.Match[str], lines: list[str], at: int) -> tuple[Hunk, int]:
    start, old_length, new_length = (int(n) if n else 1 for n in header.group(1, 2, 4))
    if old_length == 0:
        raise PatchSyntaxError(f"{where} has no context lines")
    old: list[str] = []
    new: list[str] = []
    changed = 0
    while len(old) < old_length or len(new) < new_length or _starts(lines, at, "\\"):
        line = lines[at] if at < len(lines) else ""
        if line.startswith("\\"):  # "\ No newline at end of file", about the line above
            for side in {" ": (old, new), "-": (old,), "+": (new,)}[lines[at - 1][0]]:
                side[-1] = side[-1].removesuffix("\n")
        elif line[:1] in (" ", "-", "+", "\n"):  # editors strip the blank of an empty context line
            text = line.removeprefix(line[0]) if line != "\n" else line
            changed += line[0] in "-+"
            if line[0] != "+":
                old.append(text)
            if line[0] != "-":
                new.append(text)
        else:
            raise PatchSyntaxError(f"{where} is shorter than its header says")
        at += 1
    signature = at < len(lines) and lines[at].rstrip("\n") == "-- "  # git format-patch ends so
    more = _starts(lines, at, (" ", "-", "+")) and not _is_file_header(lines, at) and not signature
    if len(old) != old_length or len(new) != new_length or more:
        raise PatchSyntaxError(f"{where} is longer than its header says")
    return Hunk(0, start, tuple(old), tuple(new), changed), at


def _is_file_header(lines: list[str], at: int) -> bool:
    return _starts(lines, at, "--- ") and _starts(lines, at + 1, "+++ ")


def _starts(lines: list[str], at: int, prefix: str | tuple[str, ...]) -> bool:
    return at < len(lines) and lines[at].startswith(prefix)


def _refuse_without_hunks(name: str, announced: int | None) -> None:
    if announced is not None:
        raise PatchSyntaxError(f"{name}:{announced}: only changes of text files are supported")


def _target_path(name: str, lines: list[str], at: int) -> str:
    # diff(1) puts a tab and a date behind the path
    old_path, new_path = (line[4:].split("\t")[0].rstrip("\n") for line in lines[at : at + 2])
    path = new_path.removeprefix("b/")
    if (old_path, new_path) != (f"a/{path}", f"b/{path}") or ".." in path.split("/"):
        raise PatchSyntaxError(
            f"{name}:{at + 1}: expected '--- a/PATH' and '+++ b/PATH' with the same path"
        )
    return path


def _split_lines(text: str) -> list[str]:
    """Lines with their ends. Unlike str.splitlines, only a line feed ends a line."""
    return [line for line in re.split(r"(?<=\n)", text) if line]
