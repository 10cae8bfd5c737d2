"""Collect texts of nine kinds for `research.eval fidelity --keep-lines` from Debian packages.

Nothing is downloaded. The packages need not be installed, only unpacked:

    apt-get download debian-faq fortunes maxima-doc r-cran-janeaustenr wesnoth-1.16-httt
    for package in *.deb; do dpkg-deb -x "$package" packages; done
    python -m research.eval.collect_texts texts --root packages

Line breaks within paragraphs of prose are removed; code, tables and chats keep theirs.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Maximum characters of a text: more than 8,192 tokens of any kind.
MOST = 150_000

INSTALLED = Path("/")
STANDARD_LIBRARY = ("argparse", "tempfile", "textwrap", "statistics", "zipfile")
LICENCES = tuple(
    f"usr/share/common-licenses/{name}" for name in ("GPL-3", "MPL-2.0", "GFDL-1.3", "Apache-2.0")
)
# A part of the manual of Maxima with formulas.
MAXIMA = "usr/share/info/maxima.info-2.gz"
NOVEL = "NORTHANGER ABBEY"
# Two speeches with as many equal first words are variants of each other.
BEGINNING = 6
TABLES = ("usr/share/zoneinfo/zone1970.tab", "usr/share/zoneinfo/iso3166.tab", "etc/services")


class MissingError(Exception):
    """A file is missing."""


@dataclass(frozen=True)
class Files:
    """Folders to search for files, in this order."""

    roots: tuple[Path, ...]

    def text(self, *patterns: str) -> str:
        """Return the decompressed files that match the patterns, by name."""
        return "\n".join(data.decode("utf-8", "replace") for data in self.data(*patterns))

    def data(self, *patterns: str) -> Iterator[bytes]:
        for pattern in patterns:
            found = next(filter(None, (sorted(root.glob(pattern)) for root in self.roots)), None)
            if found is None:
                raise MissingError(pattern)
            for path in found:
                data = path.read_bytes()
                yield gzip.decompress(data) if path.suffix == ".gz" else data


# -------------------------------------------------------------------------------------------------
# The kinds
# -------------------------------------------------------------------------------------------------


def technical(files: Files) -> str:
    """Return the questions and answers, without the table of contents."""
    text = files.text("usr/share/doc/debian/FAQ/debian-faq.en.txt.gz")
    return unwrapped(re.split(r"\n(?=Chapter\s1\.)", text, maxsplit=1)[-1])


def manual(files: Files) -> str:
    """Return the manual page of bash, 80 characters wide."""
    settings = {**os.environ, "MANWIDTH": "80", "LC_ALL": "C.UTF-8"}
    command = ["man", "-P", "cat", "bash"]
    try:
        shown = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingError("the manual page of bash") from error
    return shown.stdout


def code(files: Files) -> str:
    library = Path(sysconfig.get_path("stdlib"))
    return "\n".join((library / f"{name}.py").read_text("utf-8") for name in STANDARD_LIBRARY)


def chat(files: Files) -> str:
    """Return conversations on IRC, with one message per line."""
    pieces = files.text("usr/share/games/fortunes/knghtbrd").split("\n%\n")
    talks = [piece for piece in pieces if len(re.findall(r"^<\S+>", piece, re.MULTILINE)) > 1]
    return "\n\n".join(re.sub(r"\n\s+", " ", talk) for talk in talks)


def dialogue(files: Files) -> str:
    """Return the speeches of a game's campaign, without variants of the same speech."""
    text = files.text("usr/share/games/wesnoth/*/data/campaigns/Heir_To_The_Throne/scenarios/*.cfg")
    said = re.compile(
        r'\[message\]\s+speaker=(?P<who>[\w-]+)[^\[]*?message= *_ *"(?P<what>(?:[^"]|"")*)"'
    )
    speeches: dict[str, str] = {}
    for one in said.finditer(text):
        words = one["what"].replace('""', '"').split()
        speech = f"{one['who'].capitalize()}: {' '.join(words)}"
        speeches.setdefault(" ".join(words[:BEGINNING]), speech)
    return "\n\n".join(speeches.values())


def narrative(files: Files) -> str:
    """Return a novel from R's data: consecutive compressed arrays of lines."""
    (data,) = files.data("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
    while data:
        # the first 4 bytes are the size
        decompressor = zlib.decompressobj()
        lines = r_strings(decompressor.decompress(data[4:]))
        if lines[0] == NOVEL:
            return unwrapped("\n".join(lines))
        data = decompressor.unused_data
    raise MissingError(NOVEL)


# Kinds of texts, and the packages with their sources.
KINDS: dict[str, tuple[Callable[[Files], str], str]] = {
    "legal": (lambda files: unwrapped(files.text(*LICENCES)), "base-files"),
    "technical": (technical, "debian-faq"),
    "manual": (manual, "man-db and bash, installed"),
    "code": (code, "Python's standard library"),
    "tables": (lambda files: files.text(*TABLES), "tzdata and netbase"),
    "chat": (chat, "fortunes"),
    "dialogue": (dialogue, "wesnoth-1.16-httt"),
    "narrative": (narrative, "r-cran-janeaustenr"),
    "mathematics": (lambda files: files.text(MAXIMA), "maxima-doc"),
}


# -------------------------------------------------------------------------------------------------
# Texts
# -------------------------------------------------------------------------------------------------


def unwrapped(text: str) -> str:
    """Return a text with one line per paragraph, separated by empty lines."""
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip()))


def r_strings(data: bytes) -> list[str]:
    """Return the strings of a serialised array of R: type, length and text of each."""
    strings = []
    for match in re.finditer(rb"\x00\x04\x00\x09(.{4})", data, re.DOTALL):
        size = int.from_bytes(match[1], "big")
        strings.append(data[match.end() : match.end() + size].decode())
    return strings


def shortened(text: str) -> str:
    """Return the first lines of a text, up to `MOST` characters."""
    return text if len(text) <= MOST else text[: text.rindex("\n", 0, MOST)]


def main(arguments: list[str] | None = None) -> int:
    """Write the texts, and return 1 if a source is missing."""
    parser = argparse.ArgumentParser(description="Collect texts of nine kinds, a file for each.")
    parser.add_argument("folder", type=Path, help="folder for the texts")
    parser.add_argument(
        "--root", type=Path, default=INSTALLED, help="folder where packages were unpacked"
    )
    given = parser.parse_args(arguments)
    files = Files((given.root, INSTALLED))
    given.folder.mkdir(parents=True, exist_ok=True)
    missing = 0
    for name, (collect, package) in KINDS.items():
        try:
            text = shortened(collect(files).strip()) + "\n"
        except MissingError as error:
            print(f"{name}: there is no {error}: get {package}", file=sys.stderr)
            missing += 1
            continue
        (given.folder / f"{name}.txt").write_text(text, "utf-8")
        print(f"{name}.txt: {len(text):,} characters")
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
