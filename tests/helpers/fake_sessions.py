"""The sessions API of `pyh2o serve` without a model: what it answers is known beforehand.

A message decides how it is answered: `echo X` with X as it is, `slowly` with many words that come
one by one, `read` after a prompt of 4,000 tokens, `remember` with spans that are recalled. All
others are answered in a few words that say which message and which attempt it was.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from fake_session import HEADS, PAIRS, FakeSession, pieces_of
from pyh2o.openai.server.page import page_routes

STEP_SECONDS = 0.02
PATIENCE = 20


class FakeError(Exception):
    """A refusal."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def answer_to(message: str, attempt: int) -> str:
    if message.startswith("echo "):
        return message.removeprefix("echo ")
    if message.startswith("slowly"):
        return " ".join(f"word {n}." for n in range(200))
    return f"Answer {attempt + 1} to *{message}*: it is `so`.\n\n- one\n- two\n"


class FakeServer:
    """The page and the fake behind it, on a free port until it is closed."""

    def __init__(self, api_key: str | None = None) -> None:
        self.api_key = api_key
        self.sessions: dict[str, FakeSession] = {}
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(self.app(), log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(page_routes())
        routes = APIRouter(dependencies=[Depends(self.check_key)])
        for path, method, endpoint in (
            ("/v1/models", "GET", self.models),
            ("/v1/sessions", "GET", self.listed),
            ("/v1/sessions", "POST", self.create),
            ("/v1/sessions/import", "POST", self.take_in),
            ("/v1/sessions/{name}", "GET", self.get),
            ("/v1/sessions/{name}", "PATCH", self.change),
            ("/v1/sessions/{name}", "DELETE", self.remove),
            ("/v1/sessions/{name}/answers", "POST", self.answer),
            ("/v1/sessions/{name}/passages", "POST", self.go_on),
            ("/v1/sessions/{name}/attempt", "POST", self.choose),
            ("/v1/sessions/{name}/undo", "POST", self.undo),
            ("/v1/sessions/{name}/stop", "POST", self.stop),
            ("/v1/sessions/{name}/map", "GET", self.map),
            ("/v1/sessions/{name}/tokens", "GET", self.tokens),
            ("/v1/sessions/{name}/tokens/{position}", "GET", self.token),
            ("/v1/sessions/{name}/pins", "POST", self.pin),
            ("/v1/sessions/{name}/pins", "DELETE", self.unpin),
            ("/v1/sessions/{name}/recalled", "GET", self.recalled),
            ("/v1/sessions/{name}/export", "GET", self.export),
        ):
            routes.add_api_route(path, endpoint, methods=[method])
        app.include_router(routes)
        app.add_exception_handler(FakeError, self.refuse)
        return app

    async def check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self.api_key and given != f"Bearer {self.api_key}":
            raise FakeError(401, "Invalid API key")

    async def refuse(self, _: Request, error: Exception) -> JSONResponse:
        body = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": body}, getattr(error, "status", 500))

    def add(self, name: str, **body: Any) -> FakeSession:
        self.sessions[name] = FakeSession(name, body)
        return self.sessions[name]

    def find(self, name: str) -> FakeSession:
        if name not in self.sessions:
            raise FakeError(404, f"there is no session {name}")
        return self.sessions[name]

    async def models(self) -> Any:
        return {"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]}

    async def listed(self, q: str = "") -> Any:
        found = [each for each in self.sessions.values() if q in str(each.whole())]
        found.sort(key=lambda each: -each.changed)
        return {"object": "list", "data": [each.summary() for each in found]}

    async def create(self, body: dict[str, Any]) -> Any:
        if body.get("kind") == "story" and "system" in body:
            raise FakeError(400, "a story has no system prompt")
        name = body.pop("name", None) or f"chat-{len(self.sessions) + 1}"
        return self.add(name, **body).whole()

    async def take_in(self, body: dict[str, Any]) -> Any:
        if body["name"] in self.sessions:
            raise FakeError(409, f"there is a session {body['name']}: give another name")
        session = self.add(body.pop("name"), **body)
        session.turns = [{"finish": "stop", "attempt": 0, **turn} for turn in body.get("turns", [])]
        session.tokens()
        return session.whole()

    async def get(self, name: str) -> Any:
        return self.find(name).whole()

    async def change(self, name: str, body: dict[str, Any]) -> Any:
        session = self.find(name)
        if "name" in body:
            if body["name"] in self.sessions:
                raise FakeError(409, f"there is a session {body['name']}: give another name")
            session.name = body["name"]
            self.sessions[session.name] = self.sessions.pop(name)
        session.model = body.get("model", session.model)
        session.system = body.get("system", session.system)
        session.sampling = {**session.sampling, **body.get("sampling", {})}
        session.touch()
        return session.whole()

    async def remove(self, name: str) -> Any:
        self.find(name)
        del self.sessions[name]
        return Response(status_code=204)

    async def undo(self, name: str) -> Any:
        session = self.find(name)
        if not (session.passages if session.kind == "story" else session.turns):
            raise FakeError(400, "there is nothing to take back")
        if session.kind == "story":
            session.text = session.text[: session.passages.pop()]
        else:
            session.turns.pop()
            session.replaced = {}
        session.touch()
        return session.whole()

    async def choose(self, name: str, body: dict[str, Any]) -> Any:
        session = self.idle(name)
        if session.kind == "story":
            raise FakeError(400, "attempt: a story has no answers")
        if not session.turns:
            raise FakeError(400, "nothing has been said yet: say something")
        there = session.told(session.turns[-1])["attempts"]
        if body["attempt"] not in there:
            raise FakeError(404, f"the last message has the attempts {there}")
        session.choose(body["attempt"])
        return session.whole()

    async def stop(self, name: str) -> Any:
        self.find(name).stopping = True
        return Response(status_code=204)

    async def answer(self, name: str, body: dict[str, Any]) -> Any:
        session, before = self.idle(name), ""
        replaced, session.replaced = session.replaced, {}
        if "message" in body:
            turn = {"user": body["message"], "attempt": 0}
        elif not session.turns:
            raise FakeError(400, "nothing has been said yet: say something (message)")
        else:
            turn = session.turns.pop()
            if "edit" in body:
                turn = {"user": body["edit"], "attempt": 0}
            elif body.get("continue"):
                before, session.replaced = turn["answer"], replaced
            else:
                session.replaced = {**replaced, turn["attempt"]: turn}
                turn = {"user": turn["user"], "attempt": max(session.replaced) + 1}
        text = " And so on." if before else answer_to(turn["user"], turn["attempt"])
        session.turns.append(turn)
        turn.update(answer=before, finish="stop")
        session.recalled = [[2, 6]] if "remember" in turn["user"] else []
        return self.stream(session, text, turn, body)

    def idle(self, name: str) -> FakeSession:
        session = self.find(name)
        if session.answering:
            raise FakeError(409, f"session {name} is being answered: wait for the end of that")
        return session

    async def go_on(self, name: str, body: dict[str, Any]) -> Any:
        session = self.idle(name)
        at = body.get("at", len(session.text))
        kept = [start for start in session.passages if start < at]
        session.text, session.passages = session.text[:at], [*kept, at]
        text = "".join(f" passage {n} of the story." for n in range(5)) + "\n\n"
        if "slow" in session.text:
            text *= 20
        return self.stream(session, text, None, body)

    def stream(
        self, session: FakeSession, text: str, turn: dict[str, Any] | None, body: dict[str, Any]
    ) -> StreamingResponse:
        async def told() -> AsyncIterator[str]:
            session.answering = True
            try:
                async for each in self.events(session, text, turn, body.get("max_tokens")):
                    yield each
            finally:  # also where the client has left
                session.answering = False
                if turn is not None and not turn["answer"] and turn in session.turns:
                    session.turns.remove(turn)
                    session.touch()

        return StreamingResponse(told(), media_type="text/event-stream")

    async def events(
        self, session: FakeSession, text: str, turn: dict[str, Any] | None, most: int | None
    ) -> AsyncIterator[str]:
        def event(**content: Any) -> str:
            return f"data: {json.dumps(content)}\n\n"

        session.stopping, finish = False, "stop"
        is_said = turn and not turn["answer"] and not turn["attempt"]
        is_slow = text.count("word") > 100 or (len(text) > 2000 and "passage" in text)
        if turn and is_said and turn["user"].startswith("read"):
            for done in range(0, 4001, 500):
                yield event(type="reading", done=done, of=4000, per_second=250.0, seconds_left=1.5)
                yield event(type="kv", kv=session.kv())
                await asyncio.sleep(STEP_SECONDS)
        pieces = pieces_of(text) if len(text) < 100_000 else slices(text)
        for n, piece in enumerate(pieces[:most]):
            if turn is None:
                session.text += piece
            else:
                turn["answer"] += piece
            yield event(type="text", text=piece)
            if n % 50 == 49:
                session.touch()
                yield event(type="kv", kv=session.kv())
            await asyncio.sleep(STEP_SECONDS if is_slow else 0)
            if session.stopping:
                finish = "interrupted"
                break
        if most and len(pieces) > most:
            finish = "length"
        if turn and turn["user"].startswith("round"):
            finish = "repetition"
        if turn:
            turn["finish"] = finish
        session.touch()
        session.tokens()
        session.answering = False
        speed = {"seconds": 1.0, "first_token_seconds": 0.12, "tokens_per_second": 98.7}
        kv = {**session.kv(), "tokens_per_second": speed["tokens_per_second"]}
        told = turn and session.told(turn)
        yield event(type="done", turn=told, finish=finish, kv=kv, **speed)
        yield "data: [DONE]\n\n"

    async def map(self, name: str, layer: int | None = None, head: int | None = None) -> Any:
        return self.find(name).map(layer, head)

    async def tokens(self, name: str, start: int, end: int) -> Any:
        session = self.find(name)
        texts, ends = session.tokens()[start:end], session.ends()[start:end]
        return {"start": start, "end": start + len(texts), "texts": texts, "ends": ends}

    async def token(self, name: str, position: int) -> Any:
        session = self.find(name)
        if position >= len(session.tokens()):
            raise FakeError(404, f"the text has {len(session.tokens())} tokens, and no {position}")
        kept = session.map(None, None)["kept"]
        at = bisect_left(kept["positions"], position)
        is_kept = kept["positions"][at : at + 1] == [position]
        rows = kept["rows"][at] if is_kept else 0
        recalled = any(start <= position < end for start, end in session.recalled)
        return {
            "position": position,
            "text": session.tokens()[position],
            "score": kept["scores"][at] if is_kept else 0.0,
            "rows": rows,
            "pairs": PAIRS,
            "held": [[pair // HEADS, pair % HEADS] for pair in range(rows)],
            "recent": position >= len(session.tokens()) - 256,
            "pinned": session.is_pinned(position),
            "archived": not is_kept,
            "recalled": recalled,
            "evicted_at": None if is_kept else position + 300,
            "recalled_at": len(session.tokens()) if recalled else None,
        }

    def span(self, session: FakeSession, body: dict[str, Any]) -> list[int]:
        if "text" not in body:
            return [body["start"], body["end"]]
        at = "".join(session.tokens()).rfind(body["text"])
        if at < 0:
            raise FakeError(400, "text: it is nowhere in the session's text")
        ends = session.ends()
        return [bisect_left(ends, at + 1), bisect_left(ends, at + len(body["text"])) + 1]

    async def pin(self, name: str, body: dict[str, Any]) -> Any:
        session = self.find(name)
        session.pinned.append(self.span(session, body))
        return {"pinned": session.pinned}

    async def unpin(self, name: str, body: dict[str, Any]) -> Any:
        session = self.find(name)
        start, end = self.span(session, body)
        parts = [[(a, min(b, start)), (max(a, end), b)] for a, b in session.pinned[1:]]
        left = [[a, b] for both in parts for a, b in both if a < b]
        session.pinned = [session.pinned[0], *left]
        return {"pinned": session.pinned}

    async def recalled(self, name: str) -> Any:
        session = self.find(name)
        texts = session.tokens()
        return [
            {"start": start, "end": end, "text": "".join(texts[start:end]), "mass": 0.25}
            for start, end in session.recalled
        ]

    async def export(self, name: str, format: str = "text") -> Any:  # noqa: A002
        session = self.find(name)
        if format == "json":
            return JSONResponse(session.exported())
        return Response("".join(session.tokens()), media_type="text/plain")


def slices(text: str) -> list[str]:
    """A huge text in a hundred pieces."""
    step = len(text) // 100
    return [text[start : start + step] for start in range(0, len(text), step)]


def story_text(n_tokens: int) -> Iterator[str]:
    """The words of a story, a paragraph now and then."""
    for n in range(n_tokens):
        yield f" {n}th" if n % 90 else "\n\nOnce,"
