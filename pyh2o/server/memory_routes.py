"""The routes that tell what the cache of a session holds, and pin it (docs/sessions-api.md)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

from fastapi import Path, Query, Request
from fastapi.responses import Response

from ..engine.places import Place
from ..sessions.memory_map import archived, holders, map_json, recent_from
from .answers import Answer
from .open_session import OpenSession
from .refusals import RefusedError, wrong_field
from .requests import checked_router
from .served_model import ServedModel
from .session_answers import recalled_of
from .session_bodies import PinBody
from .session_routes import AllSessions, Json, changed
from .sessions import Sessions

# Tokens whose texts are told at once.
MOST_TEXTS = 10_000

memory_routes = checked_router(prefix="/v1/sessions/{name}")


def _seen(
    request: Request,
    sessions: Sessions,
    name: str,
    see: Callable[[OpenSession, ServedModel, Place], Any],
) -> Answer:
    """What is seen of a session in its place, also while an answer is made there."""

    def work(model: ServedModel) -> Any:
        with sessions.using(name) as session, session.watched(model) as place:
            return see(session, model, place)

    return Answer(request, sessions.source(name), work)


@memory_routes.get("/map", summary="Memory map")
def _map(
    request: Request,
    sessions: AllSessions,
    name: str,
    layer: int | None = None,
    head: int | None = None,
) -> Response:
    def see(session: OpenSession, _model: ServedModel, place: Place) -> Json:
        cache, n_tokens = place.text.watched(), len(session.text.tokens)
        return map_json(cache, layer, head, n_tokens, session.pinned)

    return _seen(request, sessions, name, see)


@memory_routes.get("/tokens", summary="Texts of tokens")
def _tokens(
    request: Request,
    sessions: AllSessions,
    name: str,
    start: Annotated[int, Query(ge=0)] = 0,
    end: int | None = None,
) -> Response:
    if end is not None and end < start:
        raise RefusedError(400, "end: give a position that is not before start")

    def tokens(model: ServedModel) -> Json:  # no place is needed for that
        with sessions.using(name) as session:
            is_written = session.written_place is not None
            with nullcontext() if is_written else session.alone(model.check):
                found = session.token_texts(model)
        last = min(len(found.texts), start + MOST_TEXTS if end is None else end)
        if last - start > MOST_TEXTS:
            raise RefusedError(400, f"end: ask for at most {MOST_TEXTS:,} tokens at once")
        texts, ends = found.texts[start:last], found.ends[start:last]
        return {"start": start, "end": max(start, last), "texts": texts, "ends": ends}

    return Answer(request, sessions.source(name), tokens)


@memory_routes.get("/tokens/{position}", summary="One token")
def _token(
    request: Request, sessions: AllSessions, name: str, position: Annotated[int, Path(ge=0)]
) -> Response:
    def see(session: OpenSession, model: ServedModel, place: Place) -> Json:
        texts = session.token_texts(model).texts
        if position >= len(texts):
            raise RefusedError(404, f"the text has {len(texts)} tokens, and no {position}")
        cache = place.text.watched()
        held, n_pairs, score = holders(cache, position)

        def is_in(spans: Any) -> bool:
            return any(start <= position < end for start, end in spans)

        return {
            "position": position,
            "text": texts[position],
            "score": round(score, 6),
            "rows": len(held),
            "pairs": n_pairs,
            "held": held,
            "recent": position >= recent_from(cache.kv),
            "pinned": is_in(session.pinned),
            "archived": is_in(archived(cache.kv)),
            "recalled": is_in(cache.recalled),
        }

    return _seen(request, sessions, name, see)


@memory_routes.get("/recalled", summary="What was recalled")
def _recalled(request: Request, sessions: AllSessions, name: str) -> Response:
    def see(session: OpenSession, _model: ServedModel, place: Place) -> list[Json]:
        if session.recalled is None and session.written_place is None:
            session.recalled = recalled_of(place)
        return session.recalled or []

    return _seen(request, sessions, name, see)


@memory_routes.post("/pins", summary="Pin tokens")
def _pin(request: Request, sessions: AllSessions, name: str, body: PinBody) -> Response:
    return _pinned(request, sessions, name, body, is_pin=True)


@memory_routes.delete("/pins", summary="Unpin tokens")
def _unpin(request: Request, sessions: AllSessions, name: str, body: PinBody) -> Response:
    return _pinned(request, sessions, name, body, is_pin=False)


def _pinned(
    request: Request, sessions: Sessions, name: str, body: PinBody, *, is_pin: bool
) -> Response:
    def pin(session: OpenSession, model: ServedModel) -> Json:
        span: Any = body.start, body.end
        if body.text is not None:
            span = session.token_texts(model).newest(body.text)
        if span is None:
            raise wrong_field("text", "it is nowhere in the session's text")
        (session.text.pin if is_pin else session.text.unpin)(*span)
        return {"pinned": session.pinned}

    return changed(request, sessions, name, pin)
