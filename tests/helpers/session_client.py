"""A client of a server's sessions in a separate folder."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from loopback import PATIENCE, LoopbackServer, Reply, ask
from pyh2o.engine import Engine
from pyh2o.server import ServedModels

SESSIONS = "/v1/sessions"


class SessionClient:
    """Sends requests to a server, and reads its events."""

    def __init__(self, server: LoopbackServer) -> None:
        self.server = server

    def ask(self, method: str, route: str, body: Any = None) -> Reply:
        """Send a request; a route starts with the id of a session, or with its name."""
        return ask(self.server.port, method, self.path(route), body)

    def path(self, route: str) -> str:
        """Return the path of a route, with the id of the session; 404 for an unknown name."""
        _, name, *rest = route.split("/", 2) if route.startswith("/") else ("", "")
        if name and not name.isdigit() and name != "import":
            name = self.ids().get(name, 404)
            return "/".join([SESSIONS, str(name), *rest])
        return SESSIONS + quote(route, safe="/?=&%+")

    def ids(self) -> dict[str, int]:
        """Return the ids of all sessions by their names."""
        listed = ask(self.server.port, "GET", SESSIONS).json["data"]
        return {each["name"]: each["id"] for each in listed}

    def address(self, name: str) -> str:
        """Return the address of a session on the page."""
        return f"#/s/{self.ids()[name]}"

    def got(self, route: str, method: str = "GET", body: Any = None) -> Any:
        """Return the reply to a successful request."""
        reply = self.ask(method, route, body)
        assert reply.status == 200, reply.body[:500]
        return reply.json

    def create(self, name: str | None = None, **body: Any) -> Any:
        """Create a session."""
        return self.got("", "POST", {"name": name, "sampling": {"seed": 1}, **body})

    def names(self) -> list[str]:
        """Return the names of all sessions."""
        return sorted(self.ids())

    def chat(self, name: str, *messages: str, answer: str = "so be it") -> None:
        """Create a conversation with messages."""
        turns = [{"user": message, "answer": answer} for message in messages]
        self.create(name, turns=turns)

    def story(self, name: str, text: str) -> None:
        """Create a story that is not read yet."""
        self.create(name, kind="story", text=text)

    def said(self, name: str) -> list[str]:
        """Return the messages of a conversation."""
        return [turn["user"] for turn in self.got(f"/{name}")["turns_list"]]

    def refused(self, method: str, route: str, body: Any = None, status: int = 400) -> str:
        reply = self.ask(method, route, body)
        assert reply.status == status, reply.body[:500]
        return str(reply.error["message"])

    def events(self, route: str, **body: Any) -> list[dict[str, Any]]:
        """Return the events of an answer."""
        reply = self.ask("POST", route, body)
        assert reply.status == 200, reply.body[:500]
        return reply.events

    def say(self, name: str, message: str, **body: Any) -> dict[str, Any]:
        """Return the last event of an answer to a message."""
        return self.done(f"/{name}/answers", message=message, **body)

    def done(self, route: str, **body: Any) -> dict[str, Any]:
        """Return the last event of an answer, after checking that its deltas form its text."""
        events = self.events(route, **body)
        done = events[-1]
        assert done["type"] == "done", events
        done["text"] = "".join(event["text"] for event in events if event["type"] == "text")
        return done

    @contextlib.contextmanager
    def answering(self, route: str, **body: Any) -> Iterator[http.client.HTTPResponse]:
        """Start an answer, and disconnect at the end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", self.path(route), json.dumps(body).encode(), headers)
        response = connection.getresponse()
        try:
            assert response.status == 200
            response.readline()
            yield response
        finally:
            response.close()
            connection.close()


@contextlib.contextmanager
def serving(engine: Engine | ServedModels, **settings: Any) -> Iterator[SessionClient]:
    with LoopbackServer(engine, **settings) as server:
        yield SessionClient(server)
