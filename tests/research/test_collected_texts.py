"""The script that collects texts from what Debian packages have."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import pytest

from research.eval import collect_texts
from research.eval.collect_texts import KINDS, NOVEL, Files, MissingError


def write(root: Path, name: str, data: str | bytes) -> Files:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return Files((root / "nothing", root))


def collected(name: str, files: Files) -> str:
    return KINDS[name][0](files)


def test_prose_is_unwrapped(tmp_path: Path) -> None:
    for name in collect_texts.LICENCES:
        files = write(tmp_path, name, f"  {name[-7:]}\n\n one\n two\n")
    assert "MPL-2.0\n\none two\n\n" in collected("legal", files)
    text = "Contents\nChapter\N{NO-BREAK SPACE}1. A\n\nChapter\N{NO-BREAK SPACE}1. A\n\n  b\n  c\n"
    data = gzip.compress(text.partition("\n")[2].encode())
    files = write(tmp_path, "usr/share/doc/debian/FAQ/debian-faq.en.txt.gz", data)
    assert collected("technical", files).endswith("Chapter 1. A\n\nb c")


def test_chat_has_a_message_on_each_line(tmp_path: Path) -> None:
    text = "<a> one\n    two\n<b> three\n%\nA saying.\n%\n<c> alone\n%\n<d> x\n<e> y\n%\n"
    files = write(tmp_path, "usr/share/games/fortunes/knghtbrd", text)
    assert collected("chat", files) == "<a> one two\n<b> three\n\n<d> x\n<e> y"


def test_dialogue_names_who_speaks(tmp_path: Path) -> None:
    text = """
        [message]
            speaker=narrator
            image="a.png"
            message= _ "It was
            late."
        [/message]
        [message]
            speaker=Urug-Telfar
            {VARIANT x}
            message=_"He said ""no""."
        [/message]
        #else
        [message]
            speaker=Konrad
            message= _ "He said ""no""."
        [/message]
    """
    folder = "usr/share/games/wesnoth/1.16/data/campaigns/Heir_To_The_Throne/scenarios"
    files = write(tmp_path, f"{folder}/01_a.cfg", text)
    write(tmp_path, f"{folder}/02_b.cfg", '[message]\n speaker=Konrad\n message= _ "Yes."')
    said = ["Narrator: It was late.", 'Urug-telfar: He said "no".', "Konrad: Yes."]
    assert collected("dialogue", files) == "\n\n".join(said)


def test_novel_is_found_among_arrays_of_r(tmp_path: Path) -> None:
    def array(*lines: str) -> bytes:
        strings = [struct.pack(">ii", 0x40009, len(line)) + line.encode() for line in lines]
        data = b"X\n" + bytes(24) + b"".join(strings)
        return struct.pack(">i", len(data)) + zlib.compress(data)

    name = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    files = write(tmp_path, name, array("EMMA", "x") + array(NOVEL, "", "No one", "who", "", "y"))
    assert collected("narrative", files) == f"{NOVEL}\n\nNo one who\n\ny"
    files = write(tmp_path, name, array("EMMA", "x"))
    with pytest.raises(MissingError, match=NOVEL):
        collected("narrative", files)
