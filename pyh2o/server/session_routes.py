"""Routes of sessions: saved conversations and stories (docs/sessions-api.md)."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from anyio import from_thread
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from ..core.rows import kept_tokens
from ..engine.slots import Slot
from ..errors import SettingsError
from ..sessions.conversation import Conversation
from ..sessions.imports import read_chats
from ..sessions.listing import text_of
from ..sessions.lorebooks import entries_of
from ..sessions.story import Story
from ..writing.pictures import with_marks
from ..writing.sampling import Sampling
from .answers import EventAnswer, Events, JsonAnswer, models_of
from .open_session import OpenSession, SessionText, StoppedError
from .refusals import RefusedError
from .requests import CheckedRoute
from .served_model import ServedModel
from .session_answers import NEVER_BEGUN, Answering, kv_numbers, recalled_of
from .session_beginnings import begun
from .session_bodies import (
    AnswerBody,
    ChangeBody,
    ImportBody,
    NewSessionBody,
    PassageBody,
    PinBody,
    ReplaceBody,
    UndoBody,
)
from .sessions import Sessions

Json = dict[str, Any]
# Maximum number of token texts in a response.
MAX_TEXTS = 10_000
MEDIA_TYPES = {"text": "text/plain", "markdown": "text/markdown", "json": "application/json"}
# First bytes of files for projectors; MP3 has none of its own.
FILES = {
    b"\xff\xd8\xff": "image/jpeg",
    b"\x89PNG": "image/png",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
    b"RIFF": "audio/wav",
    b"fLaC": "audio/flac",
}
# Browsers must not run a file as something else.
PICTURE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cache-Control": "private, max-age=31536000, immutable",  # the name is a hash of the content
}


async def _sessions_of(request: Request) -> Sessions:
    """Return the sessions; refuse host names, with which a web page could read them.

    Raises:
        RefusedError: the server has no API key, and the request uses a host name.
    """
    host = request.url.hostname or ""
    if request.app.state.api_key is None and host != "localhost":
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise RefusedError(
                403,
                "sessions are available only at the server's IP address: use it, or start the "
                "server with --api-key",
            ) from None
    sessions: Sessions = request.app.state.sessions
    return sessions


AllSessions = Annotated[Sessions, Depends(_sessions_of)]
session_routes = APIRouter(prefix="/v1/sessions", route_class=CheckedRoute)


class Asked:
    """A request about one session, for the session's model."""

    def __init__(self, request: Request, sessions: Sessions, name: str) -> None:
        self._request = request
        self.sessions = sessions
        self.name = name

    def answer(self, work: Callable[[ServedModel], Json]) -> JsonAnswer:
        """Return the result of work that needs no slot."""
        return JsonAnswer(self._request, self.sessions.source(self.name), work)

    def seen(self, see: Callable[[OpenSession, Slot], Any]) -> JsonAnswer:
        """Return what `see` reads in the slot, also during an answer."""

        def work(model: ServedModel) -> Any:
            with self.sessions.using(self.name) as session, session.watched(model) as slot:
                return see(session, slot)

        return self.answer(work)

    def changed(self, change: Callable[[OpenSession], Json | None]) -> JsonAnswer:
        """Change the text; return the result, or the session if it is None."""

        def work(model: ServedModel) -> Json:
            with self.sessions.using(self.name) as session, session.changed(model):
                result = change(session)
            return self.sessions.details(self.name) if result is None else result

        return self.answer(work)

    def written(self, write: Callable[[OpenSession, ServedModel, Answering], Json]) -> EventAnswer:
        """Send text while it is generated; `write` returns the last event."""

        def work(model: ServedModel, events: Events) -> None:
            done = NEVER_BEGUN
            with (
                self.sessions.using(self.name) as session,
                suppress(StoppedError),
                session.in_slot(model, answers=True) as slot,
            ):
                done = write(session, model, Answering(session, model, slot, events))
            events.send(done)  # after this, the next one can begin

        return EventAnswer(self._request, self.sessions.source(self.name), work)


async def _asked(request: Request, sessions: AllSessions, name: str) -> Asked:
    return Asked(request, sessions, name)


OneSession = Annotated[Asked, Depends(_asked)]


# ---------------------------------------------------------------------------------------------
# All sessions
# ---------------------------------------------------------------------------------------------


@session_routes.get("")
def _list(sessions: AllSessions, q: str = "") -> Json:
    return {"object": "list", "data": sessions.listed(q)}


@session_routes.post("")
async def _begin(request: Request, sessions: AllSessions, body: NewSessionBody) -> Response:
    sampling = replace(Sampling(seed=-1), **body.sampling.given())

    def work(model: ServedModel) -> Json:
        if body.kind == "story":
            model.check_prompt(body.text, "text")
        with sessions.using(body.name, kind=body.kind, said=body.first_words) as session:
            session.begin(model, lambda slot: begun(slot, body, sampling, model.thinking))
            return sessions.details(session.name)

    return JsonAnswer(request, models_of(request).find(body.model, embeds=False), work)


@session_routes.post("/import")
def _import(_sessions: AllSessions, body: ImportBody) -> Json:
    """Return a body for a new session for each chat of a file."""
    chats = read_chats(body.text)
    return {
        "data": [
            {
                "first": chat.title,
                "turns": [{"user": user, "answer": answer} for user, answer in chat.turns],
                "unanswered": chat.unanswered,
            }
            for chat in chats
        ]
    }


# ---------------------------------------------------------------------------------------------
# One session
# ---------------------------------------------------------------------------------------------


@session_routes.get("/{name}")
def _get(sessions: AllSessions, name: str) -> Any:
    return sessions.details(name)


@session_routes.patch("/{name}")
def _change(request: Request, sessions: AllSessions, name: str, body: ChangeBody) -> Any:
    changes = body.system, body.note, body.lorebook, body.sampling, body.attempt
    is_changed = any(each is not None for each in changes)

    def rename() -> Json:
        new = body.name or name
        if new != name:
            sessions.rename(name, new, from_thread.check_cancelled)
        return sessions.details(new)

    def change(model: ServedModel) -> Json:
        with sessions.using(name) as session:
            if body.model is not None:
                with session.alone(model.check):
                    session.move(model)
            if is_changed:
                with session.changed(model) as text:
                    _set(text, body)
                if body.attempt is not None:
                    session.recalled = None
        return rename()

    if body.model is not None:
        models = models_of(request)
        # a single model accepts any name
        source = models.find(models.named(body.model).name, embeds=False)
        return JsonAnswer(request, source, change)
    if is_changed:
        return JsonAnswer(request, sessions.source(name), change)
    return rename()


def _set(text: SessionText, body: ChangeBody) -> None:
    """Change the system prompt, note, lorebook, sampling or chosen answer."""
    if isinstance(text, Conversation):
        if body.system is not None and (body.system or None) != text.system:
            text.set_system(body.system or None)
        if body.attempt is not None:
            text.choose(body.attempt)
    elif body.system is not None or body.attempt is not None:
        raise RefusedError(400, "a story has no system prompt and no answers: leave them out")
    if body.note is not None:
        text.note = body.note
    if body.lorebook is not None:
        text.lore = entries_of(body.lorebook, "lorebook")
    if body.sampling is not None:
        text.sampling = replace(text.sampling, **body.sampling.given())


@session_routes.delete("/{name}", status_code=204, response_model=None)
def _remove(sessions: AllSessions, name: str) -> None:
    sessions.remove(name, from_thread.check_cancelled)


@session_routes.post("/{name}/undo")
def _undo(asked: OneSession, _body: UndoBody) -> Response:
    def undo(session: OpenSession) -> None:
        text = session.text
        if isinstance(text, Conversation):
            text.undo()
        elif text.passages:
            text.cut(len(text.text()) - len(text.passages[-1].text))
        else:
            raise RefusedError(400, "the story has no generated passage to undo")

    return asked.changed(undo)


@session_routes.post("/{name}/replace")
def _replace(asked: OneSession, body: ReplaceBody) -> Response:
    def replace(session: OpenSession) -> None:
        story, start, end = session.text, body.start, body.end
        if not isinstance(story, Story):
            raise RefusedError(400, f"{asked.name} is a conversation: POST .../answers edits it")
        text = story.text()
        if not start <= end <= len(text):
            raise RefusedError(
                400, f"the text has no characters {start} to {end}: it has {len(text)}"
            )
        story.edit(text[:start] + body.text + text[end:])

    return asked.changed(replace)


@session_routes.get("/{name}/export")
def _export(
    sessions: AllSessions,
    name: str,
    form: Annotated[Literal["text", "markdown", "json"], Query(alias="format")] = "text",
) -> Response:
    return Response(text_of(sessions.saved(name), form), media_type=MEDIA_TYPES[form])


# ---------------------------------------------------------------------------------------------
# Answers and passages
# ---------------------------------------------------------------------------------------------


@session_routes.post("/{name}/answers")
def _answer(asked: OneSession, body: AnswerBody) -> Response:
    def answer(session: OpenSession, model: ServedModel, answering: Answering) -> Json:
        talk = session.text
        if not isinstance(talk, Conversation):
            raise RefusedError(400, f"{asked.name} is a story: POST .../passages continues it")
        if body.message is None and not talk.turns:
            raise RefusedError(400, "there is no message yet: send one (message)")
        begin: Callable[..., Any] = talk.regenerate if body.regenerate else talk.go_on
        said = body.edit if body.message is None else body.message
        if said is not None:
            [marked] = with_marks(model.engine.model, [{"content": said}])
            model.check_prompt(marked["content"], "message")
            say = talk.edit if body.message is None else talk.say
            begin = partial(say, marked["content"])
        limit = body.max_tokens or model.engine.model.window
        return answering.run(partial(begin, max_tokens=limit))

    return asked.written(answer)


@session_routes.get("/{name}/pictures/{key}")
def _picture(sessions: AllSessions, name: str, key: str) -> Response:
    """Return the file of a picture or of sound in a message."""
    data = sessions.database.pictures(sessions.info(name).id).get(key)
    if data is None:
        raise RefusedError(404, f"session {name} has no such picture")
    media_type = next((kind for begin, kind in FILES.items() if data.startswith(begin)), None)
    return Response(data, headers=PICTURE_HEADERS, media_type=media_type or "audio/mpeg")


@session_routes.post("/{name}/passages")
def _write(asked: OneSession, body: PassageBody) -> Response:
    def write(session: OpenSession, model: ServedModel, answering: Answering) -> Json:
        story = session.text
        if not isinstance(story, Story):
            raise RefusedError(400, f"{asked.name} is a conversation: POST .../answers answers")
        if body.at is not None:
            story.cut(body.at)
        limit = body.max_tokens or model.engine.model.window
        return answering.run(partial(story.write, limit))

    return asked.written(write)


@session_routes.post("/{name}/stop", status_code=204, response_model=None)
def _stop(sessions: AllSessions, name: str) -> None:
    sessions.stop(name)


# ---------------------------------------------------------------------------------------------
# Contents of the cache
# ---------------------------------------------------------------------------------------------


@session_routes.get("/{name}/map")
def _map(asked: OneSession, layer: int | None = None, head: int | None = None) -> Response:
    def see(session: OpenSession, slot: Slot) -> Json:
        cache = slot.text.watched()
        n_heads = [len(positions) for positions, _ in cache.rows]
        if layer is not None and not 0 <= layer < cache.n_layer:
            raise SettingsError(
                f"there is no layer {layer}: give one of the {cache.n_layer}, from 0 on"
            )
        counted = n_heads if layer is None else n_heads[layer : layer + 1]
        if head is not None and counted and not 0 <= head < min(counted):
            raise SettingsError(
                f"there is no KV head {head} in each of the layers: give a lower one"
            )
        kept, kv = kept_tokens(cache, layer=layer, head=head), cache.kv
        archived = (kv.unarchived, kv.unarchived + kv.archived)  # the oldest are removed first
        return {
            "tokens": len(session.text.tokens),
            "pairs": kept.pairs,
            "layers": cache.n_layer,
            "heads": max(n_heads, default=1),
            "recent_from": max(0, kv.position - kv.recent),
            "pinned": session.pinned,
            "archived": [archived] if kv.archived else [],
            "recalled": list(cache.recalled),
            "kept": {
                "positions": kept.positions.tolist(),
                "rows": kept.rows.tolist(),
                "scores": [round(score, 6) for score in kept.scores.tolist()],
            },
            "kv": kv_numbers(kv),
        }

    return asked.seen(see)


@session_routes.get("/{name}/tokens")
def _tokens(
    asked: OneSession, start: Annotated[int, Query(ge=0)] = 0, end: int | None = None
) -> Response:
    def tokens(model: ServedModel) -> Json:
        with asked.sessions.using(asked.name) as session:
            is_answering = session.answering_slot is not None
            with nullcontext() if is_answering else session.alone(model.check):
                found = session.token_texts(model)
        most = start + MAX_TEXTS
        last = min(len(found.texts), most, most if end is None else end)
        texts, ends = found.texts[start:last], found.ends[start:last]
        return {"start": start, "end": max(start, last), "texts": texts, "ends": ends}

    return asked.answer(tokens)


@session_routes.get("/{name}/recalled")
def _recalled(asked: OneSession) -> Response:
    def see(session: OpenSession, slot: Slot) -> list[Json]:
        if session.recalled is None and session.answering_slot is None:
            session.recalled = recalled_of(slot)
        return session.recalled or []

    return asked.seen(see)


@session_routes.post("/{name}/pins")
def _pin(asked: OneSession, body: PinBody) -> Response:
    return _pinned(asked, lambda text: text.pin(body.start, body.end))


@session_routes.delete("/{name}/pins")
def _unpin(asked: OneSession, body: PinBody) -> Response:
    return _pinned(asked, lambda text: text.unpin(body.start, body.end))


def _pinned(asked: Asked, change: Callable[[SessionText], None]) -> Response:
    def pin(session: OpenSession) -> Json:
        change(session.text)
        return {"pinned": session.pinned}

    return asked.changed(pin)
