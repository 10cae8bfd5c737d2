"""Shell completion of names. Nothing here loads llama.cpp."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from pyh2o.errors import SessionError
from pyh2o.models import PACKAGED
from pyh2o.models.names import model_names
from pyh2o.sessions.chats import DATABASE, chats_folder
from pyh2o.sessions.database import Database


def complete_model(incomplete: str) -> Iterator[str]:
    """Yield available models; without a match, the shell completes files."""
    with contextlib.suppress(OSError):  # an unreadable folder
        yield from _matching(model_names(), incomplete)


def complete_packaged_model(incomplete: str) -> Iterator[str]:
    """Yield models that can be fetched by name."""
    yield from _matching(list(PACKAGED), incomplete)


def complete_session(incomplete: str) -> Iterator[str]:
    """Yield titles of saved texts, the most recent first."""
    with (
        contextlib.suppress(OSError, SessionError),
        Database(chats_folder() / DATABASE, read_only=True) as database,
    ):
        yield from _matching([text.title for text in database.texts()], incomplete)


def _matching(names: list[str], incomplete: str) -> Iterator[str]:
    matching = (name for name in names if name.startswith(incomplete))
    typed = os.environ.get("COMP_WORDS", "").rpartition("\n")[2]
    if os.environ.get("_PYH2O_COMPLETE") != "complete_bash" or typed.startswith(("'", '"')):
        return matching
    # bash inserts completions without quoting them
    return (re.sub(r"([^\w.+/-])", r"\\\1", name) for name in matching)
