"""The routes that tell what the cache of a session holds, and pin it (docs/sessions-api.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from ..engine.places import Place
from ..sessions.memory_map import holders, look, map_json
from .answers import Answer
from .models import ModelSource
from .open_session import OpenSession
from .refusals import RefusedError
from .requests import answered, check_key, read, takes
from .served_model import ServedModel
from .session_answers import recalled_of
from .session_bodies import PinBody
from .session_routes import check_host, sessions_of, source_of

Json = dict[str, Any]
# Tokens whose texts are told at once.
MOST_TEXTS = 10_000

memory_routes = APIRouter(
    prefix="/v1/sessions/{name}", dependencies=[Depends(check_key), Depends(check_host)]
)


def _seen(
    request: Request,
    source: ModelSource,
    name: str,
    see: Callable[[OpenSession, ServedModel, Place], Any],
) -> Answer:
    """What is seen of a session in its place, also while an answer is made there."""

    def work(model: ServedModel) -> Any:
        with sessions_of(request).using(name) as session, session.watched(model) as place:
            return see(session, model, place)

    return answered(request, source, work)


@memory_routes.get("/map", summary="Memory map")
async def _map(
    request: Request, name: str, layer: int | None = None, head: int | None = None
) -> Response:
    def see(session: OpenSession, _model: ServedModel, place: Place) -> Json:
        now = look(place.text.watched(), layer=layer, head=head)
        n_tokens, pinned = len(session.text.tokens), session.pinned
        return map_json(now, session.seen, n_tokens=n_tokens, pinned=pinned)

    return _seen(request, await source_of(request, name), name, see)


@memory_routes.get("/tokens", summary="Texts of tokens")
async def _tokens(request: Request, name: str, start: int = 0, end: int | None = None) -> Response:
    if start < 0 or (end is not None and end < start):
        raise RefusedError(400, "start and end: give positions from 0, end not before start")

    def tokens(model: ServedModel) -> Json:  # no place is needed for that
        with sessions_of(request).using(name) as session:
            if session.written_place is not None:
                found = session.token_texts(model)
            else:
                with session.alone(model.check):
                    found = session.token_texts(model)
        last = min(len(found.texts), start + MOST_TEXTS if end is None else end)
        if last - start > MOST_TEXTS:
            raise RefusedError(400, f"end: ask for at most {MOST_TEXTS:,} tokens at once")
        texts, ends = found.texts[start:last], found.ends[start:last]
        return {"start": start, "end": max(start, last), "texts": texts, "ends": ends}

    return answered(request, await source_of(request, name), tokens)


@memory_routes.get("/tokens/{position}", summary="One token")
async def _token(request: Request, name: str, position: int) -> Response:
    if position < 0:
        raise RefusedError(400, "position: give one from 0")

    def see(session: OpenSession, model: ServedModel, place: Place) -> Json:
        texts = session.token_texts(model).texts
        if position >= len(texts):
            raise RefusedError(404, f"the text has {len(texts)} tokens, and no {position}")
        cache = place.text.watched()
        now = look(cache)
        held, score = holders(cache, position)

        def is_in(spans: Any) -> bool:
            return any(start <= position < end for start, end in spans)

        return {
            "position": position,
            "text": texts[position],
            "score": round(score, 6),
            "rows": len(held),
            "pairs": now.kept.pairs,
            "held": held,
            "recent": position >= now.recent_from,
            "pinned": is_in(session.pinned),
            "archived": is_in(now.archived),
            "recalled": is_in(now.recalled),
            "evicted_at": session.seen.left_at(position),
            "recalled_at": session.seen.recalled_at(position),
        }

    return _seen(request, await source_of(request, name), name, see)


@memory_routes.get("/recalled", summary="What was recalled")
async def _recalled(request: Request, name: str) -> Response:
    def see(session: OpenSession, _model: ServedModel, place: Place) -> list[Json]:
        if session.recalled is None and session.written_place is None:
            session.recalled = recalled_of(place)
        return session.recalled or []

    return _seen(request, await source_of(request, name), name, see)


@memory_routes.post("/pins", summary="Pin tokens", openapi_extra=takes(PinBody))
async def _pin(request: Request, name: str) -> Response:
    return await _pinned(request, name, is_pin=True)


@memory_routes.delete("/pins", summary="Unpin tokens", openapi_extra=takes(PinBody))
async def _unpin(request: Request, name: str) -> Response:
    return await _pinned(request, name, is_pin=False)


async def _pinned(request: Request, name: str, *, is_pin: bool) -> Response:
    body = await read(request, PinBody)

    def pin(model: ServedModel) -> Json:
        with sessions_of(request).using(name) as session, session.changed(model) as text:
            if body.start is not None and body.end is not None:
                span = body.start, body.end
            else:
                found = session.token_texts(model).newest(body.text or "")
                if found is None:
                    raise RefusedError(
                        400, "text: it is nowhere in the session's text", param="text"
                    )
                span = found
            (text.pin if is_pin else text.unpin)(*span)
            spans = session.pinned
        return {"pinned": spans}

    return answered(request, await source_of(request, name), pin)
