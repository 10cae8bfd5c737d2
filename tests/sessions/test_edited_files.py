"""Session files with right check sums and nonsense in them: refused, or loaded to what they say."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rewritten_sessions
from pyh2o import Conversation, Llama, Sampling, Story
from pyh2o.errors import PyH2OError, SessionError
from pyh2o.sessions.records import record_of
from pyh2o.sessions.saved_conversation import SavedConversation
from pyh2o.sessions.session_file import read_session
from rewritten_sessions import KV
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama

SETTINGS: dict[str, Any] = {"n_ctx": 400, "hh": 60, "recent": 60, "slack": 40}
N_EDITS = 1500

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 10**12, 2**70, -(2**70), 1.5, -0.5, 1e300, "", "x",
    "\ud800", "\0", "é" * 50, "stop", "6162", "two\nlines",
    [], [1], ["a"], [[[]]], {}, {"a": 1}, {"start": 0},
]  # fmt: skip


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    with closing(tiny_llama(write_chat_gguf(path, CHATML, n_layer=2), **SETTINGS)) as llm:
        yield llm


def members_of(file: Path) -> dict[str, bytes]:
    return rewritten_sessions.members_of(file.read_bytes())


def write_members(file: Path, members: dict[str, bytes]) -> None:
    """With right check sums."""
    file.write_bytes(rewritten_sessions.session_of(rewritten_sessions.with_sums(members)))


def saved(
    save: Callable[[Llama, Path], None], llm: Llama, folder: Path
) -> tuple[Path, dict[str, bytes]]:
    """A session's file in the folder, and its members."""
    file = folder / "session"
    save(llm, file)
    return file, members_of(file)


def saved_conversation(llm: Llama, file: Path) -> None:
    conversation = Conversation(llm, system="Speak like a pirate.", sampling=Sampling(seed=5))
    for message in ("hello", "and then?", "why?"):
        "".join(conversation.say(message, max_tokens=9))
    "".join(conversation.regenerate(max_tokens=9))
    conversation.save(file)


def saved_story(llm: Llama, file: Path) -> None:
    story = Story(llm, "Once upon a time", until=["The end", "é"], echo=True)
    "".join(story.write(20))
    story.save(file)


def go_on_with_conversation(llm: Llama, file: Path) -> None:
    conversation = Conversation.load(file, llm)
    conversation.save(file)
    for turn in conversation.answers:
        conversation.choose(turn.attempt)
    "".join(conversation.regenerate(max_tokens=2) if conversation.turns else ())
    "".join(conversation.say("bye", max_tokens=3))
    conversation.undo()


def go_on_with_story(llm: Llama, file: Path) -> None:
    story = Story.load(file, llm)
    story.text()
    story.save(file)
    "".join(story.write(3))


KINDS = [
    (saved_conversation, go_on_with_conversation),
    (saved_story, go_on_with_story),
]


def places_in(value: Any) -> Generator[tuple[Any, Any]]:
    """All (container, key) pairs in a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in list(keys):
        yield value, key
        yield from places_in(value[key])


def edit(header: Any, rng: np.random.Generator) -> None:
    """Change something somewhere in a JSON object."""
    places = list(places_in(header))
    container, key = places[rng.integers(len(places))]
    kind = rng.integers(6)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container["more"] = deepcopy(VALUES[rng.integers(len(VALUES))])
    elif kind == 2 and isinstance(container, list):
        container.append(deepcopy(container[key]))
    elif kind == 3 and type(container[key]) is int:
        container[key] += int(rng.integers(-3, 4))
    elif kind == 4:
        other, place = places[rng.integers(len(places))]
        container[key] = deepcopy(other[place])
    else:
        container[key] = deepcopy(VALUES[rng.integers(len(VALUES))])


# What the place of the model and a refused state of the cache change, and the name of an archive:
# what cannot be one is none, since a session opens without its archive, too.
OWN = {"model", "cached", "known", "archive"}


def says(found: Any, header: Any) -> bool:
    """Whether all that a header says was found; what is missing in it has a default."""
    if isinstance(header, dict) and isinstance(found, dict):
        return all(
            name in OWN or (name in found and says(found[name], value))
            for name, value in header.items()
        )
    if isinstance(header, list) and isinstance(found, list):
        return len(found) == len(header) and all(map(says, found, header))
    return bool(found == header)


def refusal(go_on: Callable[[Llama, Path], None], llm: Llama, file: Path) -> PyH2OError | None:
    """The error with which a file is refused, if it is."""
    try:
        go_on(llm, file)
    except PyH2OError as error:
        return error
    return None


@pytest.mark.parametrize(("save", "go_on"), KINDS)
def test_edited_headers_are_refused_or_load_to_what_they_say(
    llm: Llama,
    tmp_path: Path,
    rng: np.random.Generator,
    save: Callable[[Llama, Path], None],
    go_on: Callable[[Llama, Path], None],
) -> None:
    file, whole = saved(save, llm, tmp_path)
    refused = 0
    for _ in range(N_EDITS):
        about = json.loads(whole["header.json"])
        for _ in range(rng.integers(1, 3)):
            edit(about["header"], rng)
        text = json.dumps(about).encode()
        write_members(file, whole | {"header.json": text})
        error = refusal(go_on, llm, file)
        if error is None:
            assert says(read_session(file, about["kind"]).header, about["header"]), text
        else:
            assert "\n" not in str(error)
            assert len(str(error)) < 500
            refused += isinstance(error, SessionError)
    assert refused > N_EDITS // 2


@pytest.mark.parametrize("depth", [100, 900, 990, 1000, 100_000])
@pytest.mark.parametrize(("save", "go_on"), KINDS)
def test_headers_of_any_depth(
    llm: Llama,
    tmp_path: Path,
    depth: int,
    save: Callable[[Llama, Path], None],
    go_on: Callable[[Llama, Path], None],
) -> None:
    file, whole = saved(save, llm, tmp_path)
    deep = b"[" * depth + b"]" * depth
    for name in (b"policy", b"sha256", b"until", b"turns"):
        text = whole["header.json"].replace(b'"%s": ' % name, b'"%s": %s, "x": ' % (name, deep))
        if text != whole["header.json"]:
            write_members(file, whole | {"header.json": text})
            assert isinstance(refusal(go_on, llm, file), SessionError)


@pytest.mark.parametrize("state", [b"", b"damaged", None])
def test_a_conversation_whose_state_does_not_fit_is_read_again(
    llm: Llama, tmp_path: Path, state: bytes | None
) -> None:
    file, whole = saved(saved_conversation, llm, tmp_path)
    expected = read_session(file, "conversation")
    kv = whole[KV][:-1] if state is None else state
    write_members(file, whole | {KV: kv})
    told: list[int] = []
    conversation = Conversation.load(file, llm, on_recompute=told.append)
    header = record_of(SavedConversation, expected.header)
    assert (conversation.turns, conversation.system) == (header.turns, header.system)
    assert told == []
    "".join(conversation.say("bye", max_tokens=3))
    assert told == [header.cached]
    assert llm.input_ids[: len(expected.tokens)].tolist() == expected.tokens
    conversation.save(file)
    "".join(Conversation.load(file, llm, on_recompute=told.append).say("bye", max_tokens=3))
    assert told == [header.cached]


def test_a_story_whose_state_does_not_fit_is_read_again(llm: Llama, tmp_path: Path) -> None:
    file = tmp_path / "session"
    story = Story(llm, "Once upon a time")
    text = "".join(story.write(20))
    story.save(file)
    write_members(file, members_of(file) | {KV: b"of another version"})
    told: list[int] = []
    tokens, n_evaluated = list(story.tokens), llm.n_tokens
    story = Story.load(file, llm, on_recompute=told.append)
    assert (story.text(), story.tokens) == (text, tokens)
    more = "".join(story.write(10))
    assert told == [n_evaluated]
    assert llm.input_ids[: len(tokens)].tolist() == tokens
    assert story.text() == text + more
    assert story.n_read == len(tokens)
