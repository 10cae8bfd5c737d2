"""The routes of sessions: conversations and stories that are kept (docs/sessions-api.md)."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

from anyio import from_thread, to_thread
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from ...sessions.listing import text_of
from .answers import Answer, Teller, Threads, ToldAnswer
from .models import ModelSource
from .open_sessions import OpenSessions, refusing
from .refusals import RefusedError
from .requests import check_key, models_of, read, takes
from .served_model import ServedModel
from .session_bodies import (
    AnswerBody,
    AttemptBody,
    ChangeBody,
    ImportBody,
    NewSessionBody,
    PassageBody,
    PinBody,
    UndoBody,
)
from .session_work import SessionWork

MEDIA_TYPES = {
    "text": ("txt", "text/plain; charset=utf-8"),
    "markdown": ("md", "text/markdown; charset=utf-8"),
    "json": ("json", "application/json"),
}


def _check_host(request: Request) -> None:
    """Refuse a page that has given its own name to this machine, to read what is saved here.

    Raises:
        RefusedError: the server has no key, and is called by a name that anybody can give it.
    """
    host = request.url.hostname or ""
    if request.app.state.api_key is None and host != "localhost":
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise RefusedError(
                403, "sessions are told to the server's IP address only: use that, or an --api-key"
            ) from None


session_routes = APIRouter(
    prefix="/v1/sessions", dependencies=[Depends(check_key), Depends(_check_host)]
)


# ---------------------------------------------------------------------------------------------
# How they are answered
# ---------------------------------------------------------------------------------------------


def _sessions(request: Request) -> OpenSessions:
    sessions: OpenSessions = request.app.state.sessions
    return sessions


async def _in_thread(work: Callable[[], Any]) -> Any:
    """What needs files and no model."""

    def refused() -> Any:
        with refusing():
            return work()

    return await to_thread.run_sync(refused)


async def _source(request: Request, name: str) -> ModelSource:
    source: ModelSource = await _in_thread(partial(_sessions(request).source, name))
    return source


def _work(
    request: Request, source: ModelSource, name: str | None, ask: Callable[[SessionWork], Any]
) -> Answer:
    """The answer that takes a session and its model, and waits for both."""
    models, sessions = models_of(request), _sessions(request)

    def ask_model(model: ServedModel) -> Any:
        with refusing():
            return ask(SessionWork(sessions, name, model))

    def work(_on_read: Callable[[], None]) -> Any:
        return models.ask(source, ask_model, from_thread.check_cancelled)

    threads: Threads = request.app.state.threads[source.name]
    return Answer(threads.run, work)


def _told(
    request: Request,
    source: ModelSource,
    name: str,
    ask: Callable[[SessionWork, Teller], None],
) -> Answer:
    """The same, told as it is made."""
    models, sessions = models_of(request), _sessions(request)

    def work(teller: Teller) -> None:
        def ask_model(model: ServedModel) -> None:
            with refusing():
                ask(SessionWork(sessions, name, model), teller)

        models.ask(source, ask_model, from_thread.check_cancelled)

    threads: Threads = request.app.state.threads[source.name]
    return ToldAnswer(threads.run, work)


# ---------------------------------------------------------------------------------------------
# All sessions
# ---------------------------------------------------------------------------------------------


@session_routes.get("", summary="Sessions")
async def _list(request: Request, q: str = "") -> dict[str, Any]:
    found = await _in_thread(partial(_sessions(request).listed, q))
    return {"object": "list", "data": found}


@session_routes.post("", summary="New session", openapi_extra=takes(NewSessionBody))
async def _begin(request: Request) -> Response:
    body = await read(request, NewSessionBody)
    source = models_of(request).find(body.model, embeds=False)
    return _work(request, source, body.name, lambda work: work.begin(body))


@session_routes.post("/import", summary="Import a session", openapi_extra=takes(ImportBody))
async def _import(request: Request) -> Response:
    body = await read(request, ImportBody)
    source = models_of(request).find(body.model, embeds=False)
    return _work(request, source, body.name, lambda work: work.begin(body))


# ---------------------------------------------------------------------------------------------
# One session
# ---------------------------------------------------------------------------------------------


@session_routes.get("/{name}", summary="Session")
async def _get(request: Request, name: str) -> Any:
    return await _in_thread(partial(_sessions(request).details, name))


@session_routes.patch("/{name}", summary="Change a session", openapi_extra=takes(ChangeBody))
async def _change(request: Request, name: str) -> Any:
    body, sessions = await read(request, ChangeBody), _sessions(request)
    is_changed = body.system is not None or body.sampling is not None

    def change(work: SessionWork) -> Any:
        if body.model is not None:
            work.move()
        if is_changed:
            work.change(body)
        return _renamed(sessions, name, body.name or name)

    if body.model is not None:
        models = models_of(request)
        # where there is one only, it would go by any name
        source = models.find(models.named(body.model).name, embeds=False)
        return _work(request, source, name, change)
    if is_changed:
        return _work(request, await _source(request, name), name, change)
    return await _in_thread(partial(_renamed, sessions, name, body.name or name))


def _renamed(sessions: OpenSessions, name: str, new: str) -> dict[str, Any]:
    if new != name:
        sessions.rename(name, new, from_thread.check_cancelled)
    return sessions.details(new)


@session_routes.delete("/{name}", summary="Remove a session", status_code=204)
async def _remove(request: Request, name: str) -> Response:
    sessions = _sessions(request)
    await _in_thread(partial(sessions.remove, name, from_thread.check_cancelled))
    return Response(status_code=204)


@session_routes.post("/{name}/answers", summary="Answer", openapi_extra=takes(AnswerBody))
async def _answer(request: Request, name: str) -> Response:
    body = await read(request, AnswerBody)
    source = await _source(request, name)
    return _told(request, source, name, lambda work, teller: work.answer(body, teller))


@session_routes.post("/{name}/passages", summary="Write on", openapi_extra=takes(PassageBody))
async def _write(request: Request, name: str) -> Response:
    body = await read(request, PassageBody)
    source = await _source(request, name)
    return _told(request, source, name, lambda work, teller: work.write_passage(body, teller))


@session_routes.post("/{name}/stop", summary="Stop an answer", status_code=204)
async def _stop(request: Request, name: str) -> Response:
    sessions = _sessions(request)
    await _in_thread(partial(sessions.saved, name))
    session = sessions.open_here(name)
    if session is not None:
        session.stopping = True
    return Response(status_code=204)


@session_routes.post(
    "/{name}/attempt", summary="Choose an answer", openapi_extra=takes(AttemptBody)
)
async def _choose(request: Request, name: str) -> Response:
    body = await read(request, AttemptBody)
    return _work(request, await _source(request, name), name, lambda work: work.choose(body))


@session_routes.post("/{name}/undo", summary="Take back", openapi_extra=takes(UndoBody))
async def _undo(request: Request, name: str) -> Response:
    body = await read(request, UndoBody)
    return _work(request, await _source(request, name), name, lambda work: work.undo(body))


# ---------------------------------------------------------------------------------------------
# Its memory
# ---------------------------------------------------------------------------------------------


@session_routes.get("/{name}/map", summary="Memory map")
async def _map(
    request: Request, name: str, layer: int | None = None, head: int | None = None
) -> Response:
    return _work(request, await _source(request, name), name, lambda work: work.map(layer, head))


@session_routes.get("/{name}/tokens", summary="Texts of tokens")
async def _tokens(request: Request, name: str, start: int = 0, end: int | None = None) -> Response:
    if start < 0 or (end is not None and end < start):
        raise RefusedError(400, "start and end: give positions from 0, end not before start")
    source = await _source(request, name)
    return _work(request, source, name, lambda work: work.tokens(start, end))


@session_routes.get("/{name}/tokens/{position}", summary="One token")
async def _token(request: Request, name: str, position: int) -> Response:
    if position < 0:
        raise RefusedError(400, "position: give one from 0")
    source = await _source(request, name)
    return _work(request, source, name, lambda work: work.token(position))


@session_routes.post("/{name}/pins", summary="Pin tokens", openapi_extra=takes(PinBody))
async def _pin(request: Request, name: str) -> Response:
    body = await read(request, PinBody)
    source = await _source(request, name)
    return _work(request, source, name, lambda work: work.pin(body, pinned=True))


@session_routes.delete("/{name}/pins", summary="Unpin tokens", openapi_extra=takes(PinBody))
async def _unpin(request: Request, name: str) -> Response:
    body = await read(request, PinBody)
    source = await _source(request, name)
    return _work(request, source, name, lambda work: work.pin(body, pinned=False))


@session_routes.get("/{name}/recalled", summary="What was recalled")
async def _recalled(request: Request, name: str) -> Response:
    return _work(request, await _source(request, name), name, lambda work: work.recalled())


@session_routes.get("/{name}/export", summary="Export")
async def _export(
    request: Request, name: str, form: Annotated[str, Query(alias="format")] = "text"
) -> Response:
    if form not in MEDIA_TYPES:
        raise RefusedError(400, "format: give text, markdown or json", param="format")
    saved = await _in_thread(partial(_sessions(request).saved, name))
    if saved.trouble:
        raise RefusedError(400, saved.trouble)
    suffix, media_type = MEDIA_TYPES[form]
    shown = f"attachment; filename*=UTF-8''{quote(name)}.{suffix}"
    return Response(
        text_of(saved, form), media_type=media_type, headers={"content-disposition": shown}
    )
