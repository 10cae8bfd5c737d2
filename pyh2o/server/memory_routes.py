"""The routes that tell what the cache of a session holds, and pin it (docs/sessions-api.md)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import numpy as np
from fastapi import Path, Query, Request
from fastapi.responses import Response

from ..cache.rows import WatchedCache, kept_tokens
from ..cache.statistics import KVStatistics
from ..engine.places import Place
from ..errors import SettingsError
from ..writing.cached_text import Span
from .answers import Answer
from .open_session import OpenSession
from .refusals import RefusedError, wrong_field
from .requests import checked_router
from .served_model import ServedModel
from .session_answers import kv_numbers, recalled_of
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
        return _map_json(cache, layer, head, n_tokens, session.pinned)

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
        held, n_pairs, score = _holders(cache, position)

        def is_in(spans: Any) -> bool:
            return any(start <= position < end for start, end in spans)

        return {
            "position": position,
            "text": texts[position],
            "score": round(score, 6),
            "rows": len(held),
            "pairs": n_pairs,
            "held": held,
            "recent": position >= _recent_from(cache.kv),
            "pinned": is_in(session.pinned),
            "archived": is_in(_archived(cache.kv)),
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


# -------------------------------------------------------------------------------------------------
# What a cache holds
# -------------------------------------------------------------------------------------------------


def _recent_from(kv: KVStatistics) -> int:
    """Position of the first token that is recent."""
    return max(0, kv.position - kv.recent)


def _archived(kv: KVStatistics) -> list[Span]:
    """Tokens in the archive: the oldest leave it first."""
    return [(kv.unarchived, kv.unarchived + kv.archived)] if kv.archived else []


def _holders(cache: WatchedCache, position: int) -> tuple[list[tuple[int, int]], int, float]:
    """The (layer, KV head) pairs that hold a token, of how many, and the mean of its scores."""
    if not cache.evicting:
        return ([(0, 0)] if position < cache.n_tokens else []), 1, 0.0
    held, scores, n_pairs = [], 0.0, 0
    for layer, (positions, of_rows) in enumerate(cache.rows):
        n_pairs += len(positions)
        heads, rows = np.nonzero(positions == position)
        held += [(layer, int(head)) for head in heads]
        scores += float(of_rows[heads, rows].sum())
    return held, n_pairs, scores / max(1, n_pairs)


def _map_json(
    cache: WatchedCache, layer: int | None, head: int | None, n_tokens: int, pinned: list[Span]
) -> dict[str, Any]:
    """The memory map: what is kept.

    Args:
        cache: of a text.
        layer, head: whose rows are counted; None for those of all.
        n_tokens: of the text.
        pinned: spans that are never evicted.

    Raises:
        SettingsError: there is no such layer, or no such KV head in all of the layers.
    """
    n_heads = [len(positions) for positions, _ in cache.rows]
    if layer is not None and not 0 <= layer < cache.n_layer:
        raise SettingsError(
            f"there is no layer {layer}: give one of the {cache.n_layer}, from 0 on"
        )
    counted = n_heads if layer is None else n_heads[layer : layer + 1]
    if head is not None and counted and not 0 <= head < min(counted):
        raise SettingsError(f"there is no KV head {head} in each of the layers: give a lower one")
    kept = kept_tokens(cache, layer=layer, head=head)
    return {
        "tokens": n_tokens,
        "pairs": kept.pairs,
        "layers": cache.n_layer,
        "heads": max(n_heads, default=1),
        "recent_from": _recent_from(cache.kv),
        "pinned": pinned,
        "archived": _archived(cache.kv),
        "recalled": list(cache.recalled),
        "kept": {
            "positions": kept.positions.tolist(),
            "rows": kept.rows.tolist(),
            "scores": [round(score, 6) for score in kept.scores.tolist()],
        },
        "kv": kv_numbers(cache.kv),
    }
