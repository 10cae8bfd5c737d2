"""The script that collects texts from what Debian packages have."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import pytest

import collect_texts
from collect_texts import KINDS, NOVEL, Files, MissingError


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


def test_files_are_taken_from_the_first_folder_that_has_them(tmp_path: Path) -> None:
    write(tmp_path, "b/x/1.txt", "one")
    write(tmp_path, "b/x/2.txt", "two")
    write(tmp_path, "c/x/3.txt", "three")
    assert Files((tmp_path / "a", tmp_path / "b", tmp_path / "c")).text("x/*.txt") == "one\ntwo"
    with pytest.raises(MissingError, match="y"):
        Files((tmp_path,)).text("y")


def test_what_is_missing_is_said_and_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collect_texts, "INSTALLED", tmp_path / "nothing")
    monkeypatch.setattr(collect_texts, "MOST", 1000)
    kinds = {name: KINDS[name] for name in ("code", "tables")}
    monkeypatch.setattr(collect_texts, "KINDS", kinds)
    assert collect_texts.main([str(tmp_path / "texts"), "--root", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert output.err == (
        "tables: there is no usr/share/zoneinfo/zone1970.tab: get tzdata and netbase\n"
    )
    text = (tmp_path / "texts" / "code.txt").read_text("utf-8")
    assert len(text) <= 1001
    assert text.endswith("\n")
    assert [file.name for file in (tmp_path / "texts").iterdir()] == ["code.txt"]
    for name in collect_texts.TABLES:
        write(tmp_path, name, "a\tb\n")
    assert collect_texts.main([str(tmp_path / "texts"), "--root", str(tmp_path)]) == 0
    assert (tmp_path / "texts" / "tables.txt").read_text("utf-8") == "a\tb\n\na\tb\n\na\tb\n"
