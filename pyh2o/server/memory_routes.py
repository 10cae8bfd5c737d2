"""The routes that tell what the cache of a session holds, and pin it (docs/sessions-api.md)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from ..engine.places import Place
from ..sessions.memory_map import memory_map
from .answers import Answer
from .open_session import OpenSession
from .requests import CheckedRoute
from .served_model import ServedModel
from .session_answers import recalled_of
from .session_bodies import PinBody
from .session_routes import AllSessions, Json, changed
from .sessions import Sessions

# Tokens whose texts are told at once.
MOST_TEXTS = 10_000

memory_routes = APIRouter(prefix="/v1/sessions/{name}", route_class=CheckedRoute)


def _seen(
    request: Request,
    sessions: Sessions,
    name: str,
    see: Callable[[OpenSession, Place], Any],
) -> Answer:
    """What is seen of a session in its place, also while an answer is made there."""

    def work(model: ServedModel) -> Any:
        with sessions.using(name) as session, session.watched(model) as place:
            return see(session, place)

    return Answer(request, sessions.source(name), work)


@memory_routes.get("/map")
def _map(
    request: Request,
    sessions: AllSessions,
    name: str,
    layer: int | None = None,
    head: int | None = None,
) -> Response:
    def see(session: OpenSession, place: Place) -> Json:
        n_tokens, pinned = len(session.text.tokens), session.pinned
        cache = place.text.watched()
        return memory_map(cache, layer=layer, head=head, n_tokens=n_tokens, pinned=pinned)

    return _seen(request, sessions, name, see)


@memory_routes.get("/tokens")
def _tokens(
    request: Request,
    sessions: AllSessions,
    name: str,
    start: Annotated[int, Query(ge=0)] = 0,
    end: int | None = None,
) -> Response:
    def tokens(model: ServedModel) -> Json:  # no place is needed for that
        with sessions.using(name) as session:
            is_written = session.written_place is not None
            with nullcontext() if is_written else session.alone(model.check):
                found = session.token_texts(model)
        most = start + MOST_TEXTS
        last = min(len(found.texts), most, most if end is None else end)
        texts, ends = found.texts[start:last], found.ends[start:last]
        return {"start": start, "end": max(start, last), "texts": texts, "ends": ends}

    return Answer(request, sessions.source(name), tokens)


@memory_routes.get("/recalled")
def _recalled(request: Request, sessions: AllSessions, name: str) -> Response:
    def see(session: OpenSession, place: Place) -> list[Json]:
        if session.recalled is None and session.written_place is None:
            session.recalled = recalled_of(place)
        return session.recalled or []

    return _seen(request, sessions, name, see)


@memory_routes.post("/pins")
def _pin(request: Request, sessions: AllSessions, name: str, body: PinBody) -> Response:
    return _pinned(request, sessions, name, body, is_pin=True)


@memory_routes.delete("/pins")
def _unpin(request: Request, sessions: AllSessions, name: str, body: PinBody) -> Response:
    return _pinned(request, sessions, name, body, is_pin=False)


def _pinned(
    request: Request, sessions: Sessions, name: str, body: PinBody, *, is_pin: bool
) -> Response:
    def pin(session: OpenSession, _model: ServedModel) -> Json:
        (session.text.pin if is_pin else session.text.unpin)(body.start, body.end)
        return {"pinned": session.pinned}

    return changed(request, sessions, name, pin)
