"""How a chat comes to its conversation: it is begun, loaded, or read again."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyh2o.cache.settings import ARCHIVE_MIB, saved_names
from pyh2o.errors import OtherSettingsError
from pyh2o.sessions.saved import SavedChat

from ..errors import InputError, one_line
from ..options import RunOptions
from ..session_options import options_of_header, refuse_what_is_fixed
from .autosave import Autosave
from .input import Source
from .rereading import is_wanted, say_recompute, say_reread

if TYPE_CHECKING:
    from pyh2o.llama import Llama
    from pyh2o.sessions.conversation import Conversation


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


def with_limit(options: RunOptions) -> RunOptions:
    """With the usual limit of an archive in memory, where the options have none."""
    mib = options.eviction.recall_mib or ARCHIVE_MIB
    return replace(options, eviction=replace(options.eviction, recall_mib=mib))


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
        reread: have its text read again; a person is asked where model or settings are others now.
        fair_turns: of a text that is read again.
        copies_mib: as for `Conversation`.

    Raises:
        InputError: they are others, and the text shall not be read again.
        SessionError: the file is damaged.
    """
    from pyh2o.sessions.conversation import Conversation

    def load(**how: bool) -> Conversation:
        return Conversation.load(
            chat.path, llm, on_recompute=say_recompute, copies_mib=copies_mib, **how
        )

    if not reread:
        try:
            return load()
        except OtherSettingsError as error:
            if not is_wanted(error, chat.path, source):
                raise InputError(
                    f"{one_line(error)}; or have its text read again (--reread)"
                ) from None
    conversation = load(reread=True, fair_turns=fair_turns)
    say_reread(conversation, autosave.keep(chat) if autosave.enabled else None)
    return conversation
