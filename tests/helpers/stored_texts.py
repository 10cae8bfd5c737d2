"""Texts in the chats database, as another program finds them."""

from __future__ import annotations

from typing import TypeVar

from pyh2o import Llama
from pyh2o.sessions.chats import open_chats
from pyh2o.sessions.text_session import TextSession

AnySession = TypeVar("AnySession", bound=TextSession)


def stored(kind: type[AnySession], title: str, llm: Llama) -> AnySession:
    """Load the text with this title; it is not stored again."""
    with open_chats() as database:
        text = database.find(title)
        assert text is not None
        session = kind.open(database, text, llm)
        session.place = None
        return session
