"""What the routes of sessions do, in threads: with a session and its model."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ...engine.place import Place
from ...errors import OtherSettingsError
from ...generation.sampling import LARGEST_SEED, Sampling
from ...sessions.conversation import Conversation
from ...sessions.identity import check_same_header
from ...sessions.memory_map import holders, look, map_json
from ...sessions.story import Story
from ...text.cached_text import Span
from .answers import Teller
from .open_session import OpenSession, Text
from .open_sessions import OpenSessions
from .refusals import RefusedError
from .served_model import ServedModel
from .session_answers import Answering, StoppedError, never_begun, recalled_of
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

Json = dict[str, Any]
# Tokens whose texts are told at once.
MOST_TEXTS = 10_000
_CURES = {
    "story": "POST /v1/sessions/NAME/passages goes on with it",
    "conversation": "POST /v1/sessions/NAME/answers answers a message",
}


class SessionWork:
    """Work for requests about one session, whose model is loaded.

    Args:
        sessions: of the server.
        name: of the session; None for a new one that gets a name of its own.
        model: that it goes on with.
    """

    def __init__(self, sessions: OpenSessions, name: str | None, model: ServedModel) -> None:
        self._sessions = sessions
        self._name = name
        self._model = model

    # ---------------------------------------------------------------------------------------------
    # Beginning and changing
    # ---------------------------------------------------------------------------------------------

    def begin(self, body: NewSessionBody | ImportBody) -> Json:
        """Begin a session, and save it."""
        sampling = Sampling(
            **{"seed": secrets.randbelow(LARGEST_SEED + 1), **body.sampling.given()}  # type: ignore[arg-type]
        )

        def begun(place: Place) -> Text:
            if body.kind == "story":
                story = Story(place, body.text, echo=True, sampling=sampling)
                story.edit(body.text)  # what comes next is new text only
                return story
            conversation = Conversation(place, system=body.system or None, sampling=sampling)
            if isinstance(body, ImportBody):
                conversation.take_over([(turn.user, turn.answer) for turn in body.turns])
            return conversation

        if body.kind == "story":
            self._model.check_prompt(body.text, "text")
        with self._sessions.using(self._name, kind=body.kind) as session:
            with session.alone(self._model.check), session.begun(self._model, begun):
                session.save()
            return self._sessions.details(session.chat.name)

    def change(self, body: ChangeBody) -> None:
        """Put another system prompt or sampling in the place of those that there are."""
        with self._changed() as session:
            text = session.text
            if body.system is not None:
                if not isinstance(text, Conversation):
                    raise RefusedError(400, "system: a story has no system prompt", param="system")
                if (body.system or None) != text.system:
                    text.set_system(body.system or None)
            if body.sampling is not None:
                text.sampling = replace(text.sampling, **body.sampling.given())  # type: ignore[arg-type]

    def move(self) -> None:
        """Have the session go on with the model, which it may have been made without."""
        with (
            self._sessions.using(self._name) as session,
            session.alone(self._model.check),
        ):
            try:
                header = self._sessions.saved(session.chat.name).header
                check_same_header(header, self._model.engine.model)
            except OtherSettingsError:
                session.move(self._model)

    def undo(self, body: UndoBody) -> Json:
        """Take back messages and their answers, or passages."""
        with self._changed() as session:
            text = session.text
            if isinstance(text, Conversation):
                _check_undo(body.turns, len(text.turns), "turns")
                for _ in range(body.turns):
                    text.undo()
            else:
                passages = text.notes.get("passages", [])
                _check_undo(body.passages, len(passages), "passages")
                text.cut(passages[-body.passages])
        return self._details()

    def choose(self, body: AttemptBody) -> Json:
        """Have an answer to the last message back that was replaced."""
        with self._changed() as session:
            text = session.text
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
        return self._details()

    def pin(self, body: PinBody, *, pinned: bool) -> Json:
        """Pin tokens, or let them be evicted again."""
        with self._changed() as session:
            start, end = self._span(session, body)
            (session.text.pin if pinned else session.text.unpin)(start, end)
            spans = session.pinned
        return {"pinned": spans}

    def _span(self, session: OpenSession, body: PinBody) -> Span:
        if body.start is not None and body.end is not None:
            return body.start, body.end
        found = session.token_texts(self._model).newest(body.text or "")
        if found is None:
            raise RefusedError(400, "text: it is nowhere in the session's text", param="text")
        return found

    @contextmanager
    def _changed(self) -> Iterator[OpenSession]:
        """A session in its place, to be changed and saved."""
        with (
            self._sessions.using(self._name) as session,
            session.alone(self._model.check),
            session.placed(self._model),
        ):
            yield session
            session.save()
            session.look()
            if isinstance(session.text, Story):  # what draws its tokens has the old sampling
                session.read_again()

    def _details(self) -> Json:
        return self._sessions.details(str(self._name))

    # ---------------------------------------------------------------------------------------------
    # Answers
    # ---------------------------------------------------------------------------------------------

    def answer(self, body: AnswerBody, teller: Teller) -> None:
        """Answer a message, or the last one anew."""
        done = never_begun()
        with suppress(StoppedError), self._answering("conversation", teller) as (talk, answering):
            limit = body.max_tokens or self._model.engine.model.n_ctx()
            if body.message is None and not talk.turns:
                raise RefusedError(400, "nothing has been said yet: say something (message)")
            begin: Callable[..., Generator[str]] = talk.go_on
            if body.message is not None:
                begin = partial(talk.say, body.message)
            elif body.edit is not None:
                begin = partial(talk.edit, body.edit)
            elif body.regenerate:
                begin = talk.regenerate
            said = body.message or body.edit or ""
            self._model.check_prompt(said, "message")
            n_said = len(self._model.tokenize(said)) if said else 0
            done = answering.run(partial(begin, max_tokens=limit), len(talk.unread) + n_said)
        teller.tell(done)  # only now another one can begin

    def write_passage(self, body: PassageBody, teller: Teller) -> None:
        """Go on with a story."""
        done = never_begun()
        with suppress(StoppedError), self._answering("story", teller) as (story, answering):
            if body.at is not None:
                story.cut(body.at)
            passages = story.notes.get("passages", [])
            starts = len(story.text())
            story.notes = {**story.notes, "passages": [*passages, starts]}
            limit = body.max_tokens or self._model.engine.model.n_ctx()
            n_to_read = len(story.tokens) - story.llm.n_tokens
            done = answering.run(partial(story.write, limit), n_to_read)
        teller.tell(done)

    @contextmanager
    def _answering(self, kind: str, teller: Teller) -> Iterator[tuple[Any, Answering]]:
        """The conversation or the story, placed for an answer, and what makes that."""
        with self._sessions.using(self._name) as session:
            if session.kind != kind:
                raise RefusedError(
                    400, f"session {session.chat.name} is a {session.kind}: {_CURES[kind]}"
                )

            def check() -> None:
                self._model.check()
                if session.stopping:
                    raise StoppedError

            with (
                session.alone(check, answers=True),
                session.placed(self._model, check) as place,
            ):
                yield session.text, Answering(session, self._model, place, teller)

    # ---------------------------------------------------------------------------------------------
    # Looking
    # ---------------------------------------------------------------------------------------------

    def map(self, layer: int | None, head: int | None) -> Json:
        """The memory map, of one layer and KV head or of all; also while an answer is made."""

        def seen(session: OpenSession, place: Place) -> Json:
            now = look(place.watched(), layer=layer, head=head)
            n_tokens, pinned = len(session.text.tokens), session.pinned
            return map_json(now, session.seen, n_tokens=n_tokens, pinned=pinned)

        found: Json = self._watching(seen)
        return found

    def token(self, position: int) -> Json:
        """What is known of one token."""

        def seen(session: OpenSession, place: Place) -> Json:
            texts = session.token_texts(self._model).texts
            if position >= len(texts):
                raise RefusedError(404, f"the text has {len(texts)} tokens, and no {position}")
            cache = place.watched()
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

        found: Json = self._watching(seen)
        return found

    def recalled(self) -> list[Json]:
        """The evicted passages that the last answer has looked at."""

        def seen(session: OpenSession, place: Place) -> list[Json]:
            if session.recalled is None and session.watched() is None:
                session.recalled = recalled_of(place)
            return session.recalled or []

        found: list[Json] = self._watching(seen)
        return found

    def tokens(self, start: int, end: int | None) -> Json:
        """The texts of tokens; no place is needed for that."""
        with self._sessions.using(self._name) as session:
            if session.watched() is not None:
                texts = session.token_texts(self._model)
            else:
                with session.alone(self._model.check):
                    texts = session.token_texts(self._model)
        end = min(len(texts.texts), start + MOST_TEXTS if end is None else end)
        if end - start > MOST_TEXTS:
            raise RefusedError(400, f"end: ask for at most {MOST_TEXTS:,} tokens at once")
        return {
            "start": start,
            "end": max(start, end),
            "texts": texts.texts[start:end],
            "ends": texts.ends[start:end],
        }

    def _watching(self, work: Callable[[OpenSession, Place], Any]) -> Any:
        """What `work` sees of a session: beside an answer in the making, or placed for it."""
        with self._sessions.using(self._name) as session:
            place = session.watched()
            if place is not None:
                return work(session, place)
            with session.alone(self._model.check), session.placed(self._model) as place:
                return work(session, place)


def _check_undo(wanted: int, there: int, what: str) -> None:
    """Refuse to take back more than there is.

    Raises:
        RefusedError: it is.
    """
    if wanted > there:
        raise RefusedError(400, f"there are {there} {what} to take back, not {wanted}", param=what)
