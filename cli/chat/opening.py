"""How a chat comes to a conversation that is saved: it is loaded, or its text is read again."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyh2o.cache.settings import ARCHIVE_MIB, saved_names
from pyh2o.errors import OtherSettingsError
from pyh2o.writing.cache_copies import WORTH

from ..errors import InputError, one_line
from ..options import RunOptions
from ..session_options import options_of_header, refuse_what_is_fixed
from ..terminal.terminal import terminal
from ..terminal.wording import count, duration
from .answers import Answers
from .autosave import Autosave
from .input import Dropped, Source

if TYPE_CHECKING:
    from pyh2o.core.text import Text
    from pyh2o.sessions.conversation import Conversation


def saved_options(
    options: RunOptions, given: Set[str], header: Mapping[str, Any], *, reread: bool
) -> RunOptions:
    """The options that a session was made with, but for those whose names were given.

    Raises:
        InputError: one was given that cannot be changed unless the text is read again.
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


def open_conversation(
    path: Path,
    llm: Text,
    answers: Answers,
    source: Source,
    *,
    is_saved: bool,
    reread: bool,
    cure: str,
    copies_mib: int,
    fair_turns: bool = False,
) -> tuple[Conversation, bool]:
    """A saved conversation, and whether its text will be read again.

    Args:
        source: of a person, who is asked where model or settings were others.
        is_saved: whether it is saved from now on; if not, its archive's file is left as it is.
        reread: whether to read its text again without asking.
        cure: how to say that, for an error.
        fair_turns: of a text that is read again.

    Raises:
        InputError: model or settings were others, and the text shall not be read again.
        SessionError: there is no such file, or it is damaged.
    """
    # Imported here, as below, because it loads llama.cpp, which `--help` must not wait for.
    from pyh2o.sessions.conversation import Conversation

    def load(**how: bool) -> Conversation:
        with answers.undisturbed():
            return Conversation.load(
                path, llm, on_recompute=say_recompute, copies_mib=copies_mib, **how
            )

    if not reread:
        try:
            conversation = load()
        except OtherSettingsError as error:
            if not _is_wanted(error, path, source, answers.seconds_per_token_read):
                raise InputError(f"{one_line(error)}; or have its text read again{cure}") from None
        else:
            if not is_saved:
                _leave_archive_alone(llm)
            return conversation, False
    return load(reread=True, fair_turns=fair_turns), True


def _is_wanted(
    error: OtherSettingsError, path: Path, source: Source, seconds_per_token: float | None
) -> bool:
    """Ask a person whether a text shall be read again; nobody wants it where none can be asked."""
    from pyh2o.sessions.saved_conversation import read_saved_conversation

    if not source.interactive:
        return False
    turns = read_saved_conversation(path).turns
    n_tokens = turns[-1].end if turns else 0
    cause, takes = one_line(error).partition(": ")[0], _about(n_tokens, seconds_per_token)
    takes = f", which takes {takes}" if takes else ""
    try:
        answer = source.read(f"{cause}. Read its {count(n_tokens, 'token')} again{takes}? [y/N] ")
    except (Dropped, EOFError):
        return False
    return answer.strip().lower() in ("y", "yes")


def _leave_archive_alone(llm: Text) -> None:
    """Go on in a copy of the archive's file that has no name and ends with the program.

    For a text that is not saved: nothing that is said from now on may stay on the disk.
    """
    if llm.archive is None or not llm.archive.is_of_session:
        return
    llm.load_kv_state(llm.kv_state(), llm.tokens.tolist())  # makes the copy
    llm.archive.remove_unsaved()


def say_recompute(tokens: int) -> None:
    """Say that text is read once more, if that takes a while."""
    if tokens >= WORTH:
        terminal.say(f"reading {count(tokens, 'token')} again", style="dim")


def say_unread(conversation: Conversation) -> None:
    """Say what of a text that was changed is read again, but for the newest token of an answer."""
    n_unread = len(conversation.unread)
    if conversation.turns and n_unread > 1:
        terminal.say(f"{count(n_unread, 'token')} will be read again with the next message")


def say_reread(
    conversation: Conversation, autosave: Autosave, seconds_per_token: float | None = None
) -> None:
    """Say what it costs that a text will be read again, and where it is kept as it was."""
    n_tokens, before = len(conversation.unread), autosave.keep_before()
    takes = _about(n_tokens, seconds_per_token)
    takes = f" ({takes})" if takes else ""
    kept = f"; once it is saved anew, {before.name} is the session as it was" if before else ""
    again = f"{count(n_tokens, 'token')} will be read again with the next message"
    terminal.say(f"{again}{takes}{kept}", style="dim")


def _about(n_tokens: int, seconds_per_token: float | None) -> str:
    """How long the reading takes, in words; "" where nobody knows."""
    return "" if seconds_per_token is None else f"about {duration(n_tokens * seconds_per_token)}"
