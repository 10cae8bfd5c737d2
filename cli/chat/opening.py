"""How a chat comes to its conversation: it is begun, loaded, or read again."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyh2o.cache.settings import saved_names
from pyh2o.errors import OtherSettingsError
from pyh2o.sessions.saved import LONGEST_NAME, SavedChat

from ..errors import InputError, one_line
from ..options import RunOptions
from ..session_options import options_of_header, refuse_what_is_fixed
from ..terminal.terminal import terminal
from ..terminal.wording import count
from .autosave import Autosave
from .input import Dropped, Source
from .loop import say_recompute

if TYPE_CHECKING:
    from pyh2o.llama import Llama
    from pyh2o.sessions.conversation import Conversation
    from pyh2o.sessions.saved_conversation import SavedConversation

BEFORE = ".before"
"""At the end of the name of what a session was before it was read again."""


def saved_options(
    options: RunOptions, given: Set[str], header: Mapping[str, Any], *, reread: bool
) -> RunOptions:
    """The options that a session was made with, but for those that were given.

    Args:
        options: the options as they are, with defaults.
        given: names of those that the user typed.
        header: of the session file.
        reread: whether the text may be read again under others.

    Raises:
        InputError: one was given that cannot be changed without that.
    """
    if not reread:
        refuse_what_is_fixed(given, header, "system prompt and sampling")
    options = options_of_header(options, given, header)
    if "no_evict" not in given and not given.isdisjoint(saved_names()):
        options = replace(options, no_evict=False)
    return options


def begin(
    llm: Llama, options: RunOptions, system: str | None, fair_turns: bool, copies_mib: int
) -> Conversation:
    """A new conversation."""
    # Imported here, as below, because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.conversation import Conversation

    return Conversation(
        llm,
        system=system,
        sampling=options.sampling,
        fair_turns=fair_turns,
        on_recompute=say_recompute,
        copies_mib=copies_mib,
    )


def open_saved(
    llm: Llama,
    chat: SavedChat,
    autosave: Autosave,
    source: Source,
    *,
    reread: bool,
    fair_turns: bool,
    copies_mib: int,
) -> Conversation:
    """The conversation of a saved chat.

    Args:
        llm: the model.
        chat: that is saved.
        autosave: where it is saved from now on.
        source: of a person who can be asked.
        reread: whether its text may be read again, if model or settings are others now.
        fair_turns: of a text that is read again; such a session need not be.
        copies_mib: as for `Conversation`.

    Raises:
        InputError: they are others, and the text shall not be read again.
        SessionError: the file is damaged.
    """
    from pyh2o.sessions.conversation import Conversation
    from pyh2o.sessions.rereading import reread_conversation
    from pyh2o.sessions.saved_conversation import read_saved_conversation

    saved = read_saved_conversation(chat.path)
    try:
        if not (reread and fair_turns) or saved.places.fair_turns:
            return Conversation.load(
                chat.path, llm, on_recompute=say_recompute, copies_mib=copies_mib
            )
    except OtherSettingsError as error:
        if not reread and not _is_wanted(error, saved, source):
            raise InputError(f"{one_line(error)}; or have its text read again (--reread)") from None
    conversation = reread_conversation(
        chat.path,
        llm,
        fair_turns=fair_turns,
        on_recompute=say_recompute,
        copies_mib=copies_mib,
    )
    kept = ""
    if autosave.enabled:
        before = _before(chat)
        autosave.keep(before)
        kept = f"; once it is saved anew, {before.name} is the session as it was"
    terminal.say(f"the text will be read again with the next message{kept}", style="dim")
    return conversation


def _is_wanted(error: OtherSettingsError, saved: SavedConversation, source: Source) -> bool:
    """Ask a person whether a text shall be read again."""
    if not source.interactive:
        return False
    tokens = count(saved.turns[-1].end if saved.turns else 0, "token")
    cause = one_line(error).partition(": ")[0]
    try:
        answer = source.read(f"{cause}. Read its {tokens} again? [y/N] ")
    except (Dropped, EOFError):
        return False
    return answer.strip().lower() in ("y", "yes")


def _before(chat: SavedChat) -> SavedChat:
    """A name for what the chat is now, that no other one has."""
    name = chat.name
    while len(f"{name}{BEFORE}-99".encode()) > LONGEST_NAME:
        name = name[:-1]
    before, number = SavedChat(f"{name}{BEFORE}"), 1
    while before.path.exists():
        number += 1
        before = SavedChat(f"{name}{BEFORE}-{number}")
    return before
