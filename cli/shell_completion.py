"""What a shell offers for the names on a command line; nothing here loads llama.cpp."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from pyh2o.models import PACKAGED
from pyh2o.models.names import model_names
from pyh2o.sessions.saved import saved_chats


def complete_model(incomplete: str) -> Iterator[str]:
    """Models that are there; where none begins so, the shell offers files."""
    with contextlib.suppress(OSError):  # a folder that cannot be read has nothing to offer
        yield from _begun(model_names(), incomplete)


def complete_packaged_model(incomplete: str) -> Iterator[str]:
    """Models that can be fetched by name."""
    yield from _begun(list(PACKAGED), incomplete)


def complete_session(incomplete: str) -> Iterator[str]:
    """Saved conversations, the one last changed first."""
    with contextlib.suppress(OSError):
        yield from _begun([chat.name for chat in saved_chats()], incomplete)


def _begun(names: list[str], incomplete: str) -> Iterator[str]:
    begun = (name for name in names if name.startswith(incomplete))
    typed = os.environ.get("COMP_WORDS", "").rpartition("\n")[2]
    if os.environ.get("_PYH2O_COMPLETE") != "complete_bash" or typed.startswith(("'", '"')):
        return begun
    # bash puts on the line what it gets, as it is
    return (re.sub(r"([^\w.+/-])", r"\\\1", name) for name in begun)
