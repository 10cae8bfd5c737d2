"""Session files of older versions are imported once, and can be loaded."""

from __future__ import annotations

import json
import shutil
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conversations import said, text_of
from pyh2o import Conversation, Llama
from pyh2o.errors import SessionError
from pyh2o.sessions.chats import open_chats
from pyh2o.sessions.database import Database
from pyh2o.sessions.messages import packed
from pyh2o.sessions.older import read_older
from pyh2o.sessions.story import Story
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama

FILES = Path(__file__).parent / "older_files"
TALK, TALE = FILES / "a talk.h2o", FILES / "a tale.h2o"
MESSAGES = ["hello", "and then?", "why?"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """The model that made the files."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return tiny_llama(
        write_chat_gguf(path, CHATML, n_layer=2), n_ctx=400, hh=60, recent=60, slack=40
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYH2O_CHATS", str(tmp_path))
    shutil.copy(TALK, tmp_path)
    shutil.copy(TALE, tmp_path)
    (tmp_path / "damaged.h2o").write_bytes(TALK.read_bytes()[:-100])
    return tmp_path


def tokens_in(file: Path) -> list[int]:
    with zipfile.ZipFile(file) as archive:
        data = archive.read("tokens.bin")
    return [int.from_bytes(data[n : n + 4], "little", signed=True) for n in range(0, len(data), 4)]


def check_talk(talk: Conversation) -> None:
    assert [turn.user for turn in talk.turns] == MESSAGES
    assert [turn.attempt for turn in talk.answers] == [0, 1]
    assert (talk.system, talk.sampling.seed) == ("Speak like a pirate.", 5)
    assert talk.pins == ((4, 7),)
    assert text_of(talk) == talk.unread == tokens_in(TALK)
    assert talk.reread_reason == "its KV cache was not saved"
    said(talk.say("bye", max_tokens=5))


def check_tale(tale: Story) -> None:
    assert tale.tokens == tokens_in(TALE)
    assert tale.text().startswith("Once upon a time")
    assert (tale.memory, tale.note, len(tale.inserted)) == ("It rains.", "sad", 1)
    assert "".join(passage.text for passage in tale.passages) == tale.text()[16:]
    assert "".join(tale.write(5))


def test_they_are_loaded(llm: Llama) -> None:
    check_talk(Conversation.load(TALK, llm))
    check_tale(Story.load(TALE, llm))


def test_they_are_imported_once(llm: Llama, folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.glob("*.h2o")}
    with open_chats() as database:
        assert {info.title for info in database.texts()} == {"a talk", "a tale"}
        ((_, tale), (_, talk)) = sorted((info.title, info.id) for info in database.texts())
        check_talk(Conversation.open(database, talk, llm))
        check_tale(Story.open(database, tale, llm))
        assert [found.text.id for found in database.search("and then")] == [talk]
        database.remove(talk)
    with open_chats() as database:
        assert [info.title for info in database.texts()] == ["a tale"]
    assert {path.name: path.read_bytes() for path in folder.glob("*.h2o")} == before
    with pytest.raises(SessionError, match=r"damaged\.h2o is damaged"):
        Conversation.load(folder / "damaged.h2o", llm)


def header_of(file: Path) -> dict[str, Any]:
    with zipfile.ZipFile(file) as archive:
        header: dict[str, Any] = json.loads(archive.read("header.json"))["header"]
    return header


@pytest.mark.parametrize("is_newest", [True, False])
def test_an_answer_in_progress_is_loaded_as_interrupted(
    llm: Llama, tmp_path: Path, is_newest: bool
) -> None:
    """Unless the session was saved after it was recorded."""
    talk, tale = (Path(shutil.copy(file, tmp_path)) for file in (TALK, TALE))
    records = []
    for file in (talk, tale):
        tokens = tokens_in(file)
        start = len(tokens) - 3
        more = tokens[5:14]
        sum_of = zlib.crc32(packed(tokens if is_newest else tokens[1:]))
        record = {"session": sum_of, "start": start, "tokens": more, "n_turns": 0, "kept": []}
        records.append(
            record | {"turn": {}, "pictures": {"a" * 64: "eA=="}, "story": None, "n_characters": 0}
        )
    turn = header_of(talk)["turns"][-1]
    end = turn["end"] + 6
    turn |= {"answer": "so far", "finish": "interrupted", "thoughts": "Hm.", "end": end}
    records[0] |= {"n_turns": 2, "turn": turn}
    header = header_of(tale)
    text = header["notes"]["text"]
    header |= {"finish": None, "notes": {"text": " and so far"}}
    records[1] |= {"story": header, "n_characters": len(text) - 2}
    for file, record in zip((talk, tale), records, strict=True):
        file.with_name(f"{file.name}.unfinished").write_text(json.dumps(record))
    talk_now, tale_now = read_older(talk), read_older(tale)
    if not is_newest:
        assert (talk_now, tale_now) == (
            replace(read_older(TALK), info=talk_now.info),
            replace(read_older(TALE), info=tale_now.info),
        )
        return
    assert talk_now.pictures == {"a" * 64: b"x"}
    records[0]["pictures"] = {}
    talk.with_name(f"{talk.name}.unfinished").write_text(json.dumps(records[0]))
    last = Conversation.load(talk, llm).turns[-1]
    assert (last.answer, last.finish, last.reasoning) == ("so far", "interrupted", "Hm.")
    assert len(talk_now.messages) == 3
    story = Story.load(tale, llm)
    assert (len(story.tokens), story.finish) == (len(tokens_in(TALE)) + 6, "interrupted")
    assert tale_now.messages[-1].answer.endswith(f"{text[-10:-2]} and so far")


CHANGES: list[Callable[[dict[str, Any]], object]] = [
    lambda about: about.update(version=2),
    lambda about: about.update(kind="x"),
    lambda about: about["header"].pop("turns"),
    lambda about: about["header"].update(unknown=1),
    lambda about: about["header"]["turns"].pop(),
    lambda about: about["header"]["turns"][0].update(start="x"),
    lambda about: about.update(format="x"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_damaged_ones_are_refused_by_name(
    llm: Llama, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    with zipfile.ZipFile(TALK) as old, zipfile.ZipFile(tmp_path / "new.h2o", "w") as new:
        about = json.loads(old.read("header.json"))
        change(about)
        new.writestr("header.json", json.dumps(about))
        new.writestr("tokens.bin", old.read("tokens.bin"))
    with pytest.raises(SessionError, match=r"new\.h2o is") as error:
        Conversation.load(tmp_path / "new.h2o", llm)
    assert "\n" not in str(error.value)
    with pytest.raises(SessionError, match="is not a session file"):
        Database(tmp_path / "new.h2o", single=True)
