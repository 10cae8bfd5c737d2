"""Hundreds of sessions: those that have not changed are not read again to be listed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from needed import needed

open_sessions = needed("pyh2o.server.sessions", name="the server's packages")
N_SESSIONS = 300


def test_a_list_reads_what_has_changed(
    client: Any, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.begin("talk-0", kind="story", text="Once upon a time")
    for i in range(1, N_SESSIONS):
        shutil.copy(chats / "talk-0.h2o", chats / f"talk-{i}.h2o")
    read, read_saved_text = [], open_sessions.read_saved_text

    def noted(chat: Any) -> Any:
        read.append(chat.name)
        return read_saved_text(chat)

    monkeypatch.setattr(open_sessions, "read_saved_text", noted)
    assert len(client.got("")["data"]) == N_SESSIONS
    assert len(read) >= N_SESSIONS - 1
    read.clear()
    client.done("/talk-7/passages", max_tokens=3)
    assert len(client.got("?search=upon")["data"]) == N_SESSIONS
    assert set(read) == {"talk-7"}


def test_sessions_that_nobody_uses_take_few_files(client: Any, chats: Path) -> None:
    most = 32
    names = [f"talk-{i}" for i in range(most + 8)]
    for name in names:
        client.begin(name)
        client.got(f"/{names[0]}/map")  # again and again, so it stays
    locked = {path.name for path in chats.glob(".*.lock")}
    assert locked == {f".{name}.lock" for name in [names[0], *names[-most + 1 :]]}
    assert client.say(names[1], "Hello?", max_tokens=3)["turn"]["user"] == "Hello?"
