"""The fake of the API answers as the server does: the same statuses, fields, types and events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from many_texts import tiny_engine
from needed import needed
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

clients = needed("session_client", name="the server's packages")
fakes = needed("fake_sessions", name="the server's packages")

CACHE: dict[str, Any] = {"n_ctx": 256, "hh": 56, "recent": 32, "slack": 16, "recall": 24}
LONG = "read what was said of the sea and its ships " * 4
SAID: list[tuple[str, str, Any]] = [
    ("GET", "", None),
    ("POST", "", {"name": "talk", "system": "Be brief.", "sampling": {"seed": 1}}),
    ("POST", "/talk/answers", {"regenerate": True}),
    ("POST", "/talk/undo", {}),
    ("POST", "/talk/attempt", {"attempt": 0}),
    ("POST", "/talk/answers", {"message": LONG, "max_tokens": 4}),
    ("POST", "/talk/answers", {"continue": True, "max_tokens": 4}),
    ("POST", "/talk/answers", {"regenerate": True, "max_tokens": 4}),
    ("POST", "/talk/attempt", {"attempt": 0}),
    ("POST", "/talk/attempt", {"attempt": 0}),
    ("POST", "/talk/attempt", {"attempt": 7}),
    ("POST", "/nobody/attempt", {"attempt": 0}),
    ("POST", "/talk/answers", {"edit": "remember the sea", "max_tokens": 4}),
    ("POST", "/talk/stop", None),
    ("GET", "/talk", None),
    ("GET", "/talk/map", None),
    ("GET", "/talk/map?layer=1&head=0", None),
    ("GET", "/talk/tokens?start=1&end=4", None),
    ("GET", "/talk/tokens/1", None),
    ("GET", "/talk/tokens/100000", None),
    ("POST", "/talk/pins", {"text": "sea"}),
    ("DELETE", "/talk/pins", {"text": "sea"}),
    ("POST", "/talk/pins", {"text": "nowhere at all"}),
    ("GET", "/talk/recalled", None),
    ("GET", "/talk/export?format=json", None),
    ("POST", "", {"name": "tale", "kind": "story", "text": "Once upon", "sampling": {"seed": 1}}),
    ("POST", "/tale/passages", {"max_tokens": 3}),
    ("POST", "/tale/passages", {"max_tokens": 3, "at": 9}),
    ("GET", "/tale", None),
    ("GET", "/tale/map", None),
    ("GET", "/tale/export?format=json", None),
    ("POST", "/tale/attempt", {"attempt": 0}),
    ("POST", "/tale/undo", {}),
    ("POST", "/tale/undo", {}),
    ("POST", "", {"kind": "story", "system": "Be brief."}),
    ("GET", "?q=sea", None),
    ("PATCH", "/talk", {"name": "tale"}),
    ("PATCH", "/talk", {"name": "other", "sampling": {"temperature": 0.5}}),
    ("POST", "/import", {"name": "other", "turns": [{"user": "a", "answer": "b"}]}),
    ("POST", "/import", {"name": "third", "turns": [{"user": "a", "answer": "b"}]}),
    ("DELETE", "/other", None),
    ("GET", "/other", None),
    ("GET", "/other/map", None),
]


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("PYH2O_CHATS", str(tmp_path / "chats"))
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=5, chat_template=CHAT_TEMPLATE)
    with tiny_engine(path, texts=2, **CACHE) as engine, clients.serving(engine) as running:
        yield running


@pytest.fixture
def fake() -> Iterator[Any]:
    running = fakes.FakeServer()
    yield clients.SessionClient(running)
    running.close()


def answer_of(client: Any, method: str, route: str, body: Any) -> tuple[int, Any]:
    """The status, and the JSON or each kind of event in the order of their first."""
    reply = client.ask(method, route, body)
    assert reply.status < 500, f"{method} {route}: {reply.body[:500]!r}"
    if not reply.body.startswith(b"data: "):
        return reply.status, reply.json if reply.body else None
    events = clients.events_of(reply)  # the numbers come now and then
    return reply.status, {event["type"]: event for event in events if event["type"] != "kv"}


def differences(real: Any, fake: Any, place: str) -> list[str]:
    """Where two answers are not of one shape; null goes with anything."""
    if real is None or fake is None:
        return []
    if isinstance(real, dict) and isinstance(fake, dict):
        found = [f"{place}: {name}" for name in real.keys() ^ fake.keys()]
        for name in real.keys() & fake.keys():
            found += differences(real[name], fake[name], f"{place}.{name}")
        return found
    if isinstance(real, list) and isinstance(fake, list):
        return differences(real[0], fake[0], f"{place}[0]") if real and fake else []
    same = {int: float}.get(type(real), type(real)) is {int: float}.get(type(fake), type(fake))
    return [] if same else [f"{place}: {real!r} and {fake!r}"]


def test_the_fake_is_like_the_server(real: Any, fake: Any) -> None:
    found = []
    for method, route, body in SAID:
        (status, content), (other, made_up) = (
            answer_of(client, method, route, body) for client in (real, fake)
        )
        if status != other:
            found.append(f"{method} {route}: {status} {content}, and {other} {made_up}")
        else:
            found += differences(content, made_up, f"{method} {route}")
    assert found == [], "\n".join(found)
