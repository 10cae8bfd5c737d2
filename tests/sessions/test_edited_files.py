"""Session files with right check sums and nonsense in them are refused, or their text is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pyh2o import Conversation, Llama
from pyh2o.errors import SessionError
from pyh2o.sessions.session_file import read_session
from pyh2o.sessions.story import Story
from pyh2o.writing.sampling import Sampling
from rewritten_sessions import KV, change_header, members_of, session_of, with_sums
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama

SETTINGS: dict[str, Any] = {"n_ctx": 400, "hh": 60, "recent": 60, "slack": 40}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    with closing(tiny_llama(write_chat_gguf(path, CHATML, n_layer=2), **SETTINGS)) as llm:
        yield llm


@pytest.fixture(scope="module")
def conversation(llm: Llama, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """One that was saved, with an answer that was replaced."""
    file = tmp_path_factory.mktemp("saved") / "session"
    talk = Conversation(llm, system="Speak like a pirate.", sampling=Sampling(seed=5))
    for message in ("hello", "and then?", "why?"):
        "".join(talk.say(message, max_tokens=9))
    "".join(talk.regenerate(max_tokens=9))
    talk.save(file)
    return file.read_bytes()


@pytest.fixture(scope="module")
def story(llm: Llama, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("saved") / "session"
    tale = Story(llm, "Once upon a time", until=["The end", "é"], echo=True)
    "".join(tale.write(20))
    tale.save(file)
    return file.read_bytes()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "session"


def with_members(data: bytes, **members: bytes) -> bytes:
    """With right check sums."""
    return session_of(with_sums({**members_of(data), **members}))


Change = Callable[[dict[str, Any]], object]

OF_ALL: list[Change] = [
    lambda h: h.pop("sampling"),
    lambda h: h.update(unknown=1),
    lambda h: h.update(sampling=[]),
    lambda h: h["sampling"].update(temperature=-1),
    lambda h: h["sampling"].update(warmth=1),
    lambda h: h.update(cached=-1),
    lambda h: h.update(cached=True),
    lambda h: h.update(cached=10**6),
    lambda h: h["settings"].update(ctx="many"),
    lambda h: h["model"].update(bytes=None),
    lambda h: h.update(pins=[[5, 4]]),
    lambda h: h.update(pins=[[0, 10**6]]),
    lambda h: h.update(pins=[[2, 4], [0, 1]]),
    lambda h: h.update(pins=[[0, 1, 2]]),
]
OF_CONVERSATIONS: list[Change] = [
    lambda h: h.update(system=5),
    lambda h: h.update(template="x"),
    lambda h: h["turns"].pop(),
    lambda h: h["turns"].reverse(),
    lambda h: h["turns"][0].update(start=1.5),
    lambda h: h["turns"][0].update(start=-1),
    lambda h: h["turns"][0].update(finish="why not"),
    lambda h: h["turns"][0].update(attempt=-1),
    lambda h: h["turns"][1].update(start=h["turns"][0]["start"]),
    lambda h: h["turns"][0].update(answer_start=h["turns"][0]["start"]),
    lambda h: h["turns"][0].update(end=h["turns"][0]["answer_start"]),
    lambda h: h["turns"][2].update(end=10**6),
    lambda h: h["kept"].append(h["kept"][0]),
    lambda h: h["kept"][0].update(attempt=1),
    lambda h: h["kept"][0].update(finish="no"),
    lambda h: h["kept"][0].update(tokens=[]),
    lambda h: h["kept"][0].update(tokens=[10**6]),
    lambda h: h.update(turns=[], cached=0, known=0),
]
OF_STORIES: list[Change] = [
    lambda h: h.update(prompt_tokens=0),
    lambda h: h.update(prompt_tokens=10**6),
    lambda h: h.update(held="xyz"),
    lambda h: h.update(unsearched=9),
    lambda h: h.update(text_bytes=h["text_bytes"] + 1),
    lambda h: h.update(opening="\ud800"),
    lambda h: h.update(until=["\ud800"]),
    lambda h: h.update(finish="no"),
    lambda h: h.update(seconds=-1),
]
EDITS = [
    *((Conversation, change) for change in OF_ALL + OF_CONVERSATIONS),
    *((Story, change) for change in OF_ALL + OF_STORIES),
]


@pytest.mark.parametrize(("kind", "change"), EDITS)
def test_headers_that_make_no_sense_are_refused(
    llm: Llama, conversation: bytes, story: bytes, file: Path, kind: Any, change: Change
) -> None:
    file.write_bytes(conversation if kind is Conversation else story)
    change_header(file, change)
    with pytest.raises(SessionError) as error:
        kind.load(file, llm)
    assert "\n" not in str(error.value)


def test_settings_that_came_later_have_their_defaults(
    llm: Llama, conversation: bytes, file: Path
) -> None:
    file.write_bytes(conversation)
    late = [name for name in vars(Sampling()) if name.startswith(("dry_", "xtc_"))]
    change_header(file, lambda h: [h["sampling"].pop(name) for name in late])
    assert Conversation.load(file, llm).sampling == Sampling(seed=5)


@pytest.mark.parametrize("state", [b"", b"damaged", None])
def test_a_conversation_whose_state_does_not_fit_is_read_again(
    llm: Llama, conversation: bytes, file: Path, state: bytes | None
) -> None:
    kv = members_of(conversation)[KV][:-1] if state is None else state
    file.write_bytes(with_members(conversation, **{KV: kv}))
    saved = read_session(file, "conversation")
    talk = Conversation.load(file, llm)
    assert [turn.user for turn in talk.turns] == ["hello", "and then?", "why?"]
    assert talk.unread == saved.tokens
    "".join(talk.say("bye", max_tokens=3))
    assert llm.input_ids[: len(saved.tokens)].tolist() == saved.tokens
    talk.save(file)
    assert len(Conversation.load(file, llm).unread) == 1


def test_a_story_whose_state_does_not_fit_is_read_again(
    llm: Llama, story: bytes, file: Path
) -> None:
    file.write_bytes(with_members(story, **{KV: b"of another version"}))
    saved = read_session(file, "story")
    tale = Story.load(file, llm)
    text = tale.text()
    assert (tale.tokens, tale.n_read) == (saved.tokens, 0)
    more = "".join(tale.write(10))
    assert llm.input_ids[: len(saved.tokens)].tolist() == saved.tokens
    assert (tale.text(), tale.n_read) == (text + more, len(saved.tokens))
