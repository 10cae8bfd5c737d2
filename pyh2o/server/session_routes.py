"""The routes of sessions: conversations and stories that are kept (docs/sessions-api.md)."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

from anyio import from_thread, to_thread
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from ..engine.places import Place
from ..errors import OtherSettingsError
from ..sessions.conversation import Conversation
from ..sessions.identity import check_same_header
from ..sessions.listing import text_of
from ..sessions.story import Story
from ..writing.sampling import LARGEST_SEED, Sampling
from .answers import Answer, Events
from .models import ModelSource
from .open_session import OpenSession, StoppedError, Text
from .refusals import RefusedError
from .requests import answered, check_key, models_of, read, streamed, takes
from .served_model import ServedModel
from .session_answers import Answering, never_begun
from .session_bodies import (
    AnswerBody,
    AttemptBody,
    ChangeBody,
    ImportBody,
    NewSessionBody,
    PassageBody,
    UndoBody,
)
from .sessions import Sessions

Json = dict[str, Any]
MEDIA_TYPES = {
    "text": ("txt", "text/plain; charset=utf-8"),
    "markdown": ("md", "text/markdown; charset=utf-8"),
    "json": ("json", "application/json"),
}


def check_host(request: Request) -> None:
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
    prefix="/v1/sessions", dependencies=[Depends(check_key), Depends(check_host)]
)


def sessions_of(request: Request) -> Sessions:
    """The sessions of the server."""
    sessions: Sessions = request.app.state.sessions
    return sessions


async def source_of(request: Request, name: str) -> ModelSource:
    """The model of a session."""
    return await to_thread.run_sync(sessions_of(request).source, name)


# ---------------------------------------------------------------------------------------------
# All sessions
# ---------------------------------------------------------------------------------------------


@session_routes.get("", summary="Sessions")
def _list(request: Request, q: str = "") -> Json:
    return {"object": "list", "data": sessions_of(request).listed(q)}


@session_routes.post("", summary="New session", openapi_extra=takes(NewSessionBody))
async def _begin(request: Request) -> Response:
    return _begun(request, await read(request, NewSessionBody))


@session_routes.post("/import", summary="Import a session", openapi_extra=takes(ImportBody))
async def _import(request: Request) -> Response:
    return _begun(request, await read(request, ImportBody))


def _begun(request: Request, body: NewSessionBody | ImportBody) -> Answer:
    source = models_of(request).find(body.model, embeds=False)
    seed = secrets.randbelow(LARGEST_SEED + 1)
    sampling = Sampling(**{"seed": seed, **body.sampling.given()})  # type: ignore[arg-type]

    def begin(place: Place) -> Text:
        if body.kind == "story":
            story = Story(place, body.text, echo=True, sampling=sampling)
            story.edit(body.text)  # what comes next is new text only
            return story
        conversation = Conversation(place, system=body.system or None, sampling=sampling)
        if isinstance(body, ImportBody):
            conversation.take_over([(turn.user, turn.answer) for turn in body.turns])
        return conversation

    def work(model: ServedModel) -> Json:
        if body.kind == "story":
            model.check_prompt(body.text, "text")
        with sessions_of(request).using(body.name, kind=body.kind) as session:
            session.begin(model, begin)
            return sessions_of(request).details(session.chat.name)

    return answered(request, source, work)


# ---------------------------------------------------------------------------------------------
# One session
# ---------------------------------------------------------------------------------------------


@session_routes.get("/{name}", summary="Session")
def _get(request: Request, name: str) -> Any:
    return sessions_of(request).details(name)


@session_routes.patch("/{name}", summary="Change a session", openapi_extra=takes(ChangeBody))
async def _change(request: Request, name: str) -> Any:
    body, sessions = await read(request, ChangeBody), sessions_of(request)
    is_changed = body.system is not None or body.sampling is not None

    def rename() -> Json:
        new = body.name or name
        if new != name:
            sessions.rename(name, new, from_thread.check_cancelled)
        return sessions.details(new)

    def change(model: ServedModel) -> Json:
        with sessions.using(name) as session:
            if body.model is not None:
                with session.alone(model.check):
                    _move(sessions, session, model)
            if is_changed:
                with session.changed(model) as text:
                    _set(text, body)
        return rename()

    if body.model is not None:
        models = models_of(request)
        # where there is one only, it would go by any name
        source = models.find(models.named(body.model).name, embeds=False)
        return answered(request, source, change)
    if is_changed:
        return answered(request, await source_of(request, name), change)
    return await to_thread.run_sync(rename)


def _move(sessions: Sessions, session: OpenSession, model: ServedModel) -> None:
    """Have a session go on with a model, which it may have been made without."""
    try:
        check_same_header(sessions.saved(session.chat.name).header, model.engine.model)
    except OtherSettingsError:
        session.move(model)


def _set(text: Text, body: ChangeBody) -> None:
    """Put another system prompt or sampling in the place of those that there are."""
    if body.system is not None:
        if not isinstance(text, Conversation):
            raise RefusedError(400, "system: a story has no system prompt", param="system")
        if (body.system or None) != text.system:
            text.set_system(body.system or None)
    if body.sampling is not None:
        text.sampling = replace(text.sampling, **body.sampling.given())  # type: ignore[arg-type]


@session_routes.delete("/{name}", summary="Remove a session", status_code=204)
def _remove(request: Request, name: str) -> None:
    sessions_of(request).remove(name, from_thread.check_cancelled)


@session_routes.post(
    "/{name}/attempt", summary="Choose an answer", openapi_extra=takes(AttemptBody)
)
async def _choose(request: Request, name: str) -> Response:
    body, sessions = await read(request, AttemptBody), sessions_of(request)

    def choose(model: ServedModel) -> Json:
        with sessions.using(name) as session, session.changed(model) as text:
            if not isinstance(text, Conversation):
                raise RefusedError(400, "attempt: a story has no answers", param="attempt")
            attempts = [turn.attempt for turn in text.answers]
            if attempts and body.attempt not in attempts:
                there = ", ".join(map(str, attempts))
                raise RefusedError(
                    404, f"the last message has the attempts {there}, and no {body.attempt}"
                )
            text.choose(body.attempt)
            session.recalled = None
        return sessions.details(name)

    return answered(request, await source_of(request, name), choose)


@session_routes.post("/{name}/undo", summary="Take back", openapi_extra=takes(UndoBody))
async def _undo(request: Request, name: str) -> Response:
    body, sessions = await read(request, UndoBody), sessions_of(request)

    def undo(model: ServedModel) -> Json:
        with sessions.using(name) as session, session.changed(model) as text:
            if isinstance(text, Conversation):
                check(body.turns, len(text.turns), "turns")
                for _ in range(body.turns):
                    text.undo()
            else:
                passages = text.notes.get("passages", [])
                check(body.passages, len(passages), "passages")
                text.cut(passages[-body.passages])
        return sessions.details(name)

    def check(wanted: int, there: int, what: str) -> None:
        if wanted > there:
            message = f"there are {there} {what} to take back, not {wanted}"
            raise RefusedError(400, message, param=what)

    return answered(request, await source_of(request, name), undo)


@session_routes.get("/{name}/export", summary="Export")
def _export(
    request: Request, name: str, form: Annotated[str, Query(alias="format")] = "text"
) -> Response:
    if form not in MEDIA_TYPES:
        raise RefusedError(400, "format: give text, markdown or json", param="format")
    saved = sessions_of(request).saved(name)
    if saved.trouble:
        raise RefusedError(400, saved.trouble)
    suffix, media_type = MEDIA_TYPES[form]
    shown = f"attachment; filename*=UTF-8''{quote(name)}.{suffix}"
    return Response(
        text_of(saved, form), media_type=media_type, headers={"content-disposition": shown}
    )


# ---------------------------------------------------------------------------------------------
# Answers and passages
# ---------------------------------------------------------------------------------------------


@session_routes.post("/{name}/answers", summary="Answer", openapi_extra=takes(AnswerBody))
async def _answer(request: Request, name: str) -> Response:
    body = await read(request, AnswerBody)

    def answer(session: OpenSession, model: ServedModel, answering: Answering) -> Json:
        talk = session.text
        if not isinstance(talk, Conversation):
            raise _other_kind(session, "POST /v1/sessions/NAME/passages goes on with it")
        if body.message is None and not talk.turns:
            raise RefusedError(400, "nothing has been said yet: say something (message)")
        begin: Callable[..., Any] = talk.go_on
        if body.message is not None:
            begin = partial(talk.say, body.message)
        elif body.edit is not None:
            begin = partial(talk.edit, body.edit)
        elif body.regenerate:
            begin = talk.regenerate
        said = body.message or body.edit or ""
        model.check_prompt(said, "message")
        n_said = len(model.tokenize(said)) if said else 0
        limit = body.max_tokens or model.engine.model.window
        return answering.run(partial(begin, max_tokens=limit), len(talk.unread) + n_said)

    return _told(request, await source_of(request, name), name, answer)


@session_routes.post("/{name}/passages", summary="Write on", openapi_extra=takes(PassageBody))
async def _write(request: Request, name: str) -> Response:
    body = await read(request, PassageBody)

    def write(session: OpenSession, model: ServedModel, answering: Answering) -> Json:
        story = session.text
        if not isinstance(story, Story):
            raise _other_kind(session, "POST /v1/sessions/NAME/answers answers a message")
        if body.at is not None:
            story.cut(body.at)
        passages = story.notes.get("passages", [])
        story.notes = {**story.notes, "passages": [*passages, len(story.text())]}
        limit = body.max_tokens or model.engine.model.window
        n_to_read = len(story.tokens) - story.llm.n_tokens
        return answering.run(partial(story.write, limit), n_to_read)

    return _told(request, await source_of(request, name), name, write)


def _told(
    request: Request,
    source: ModelSource,
    name: str,
    write: Callable[[OpenSession, ServedModel, Answering], Json],
) -> Response:
    """Text of a session, told as it is written; `write` returns the last event."""

    def work(model: ServedModel, events: Events) -> None:
        done = never_begun()
        with (
            sessions_of(request).using(name) as session,
            suppress(StoppedError),
            session.placed(model, answers=True) as place,
        ):
            done = write(session, model, Answering(session, model, place, events))
        events.tell(done)  # only now another one can begin

    return streamed(request, source, work)


def _other_kind(session: OpenSession, cure: str) -> RefusedError:
    return RefusedError(400, f"session {session.chat.name} is a {session.kind}: {cure}")


@session_routes.post("/{name}/stop", summary="Stop an answer", status_code=204)
def _stop(request: Request, name: str) -> None:
    sessions = sessions_of(request)
    sessions.saved(name)
    session = sessions.open_here(name)
    if session is not None:
        session.stopping = True
