"""Goes on with a saved conversation or story under another model or other settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from ..errors import SessionError
from ..llama import Llama
from ..text.cache_copies import DEFAULT_MIB
from ..text.chat_template import ChatTemplate
from .conversation import Conversation
from .identity import model_identity, settings_identity
from .kept_answers import KeptAnswer, check_known
from .pins import Pins, check_room, moved
from .records import in_one_line
from .saved_conversation import KIND, SavedConversation
from .saved_story import KIND as STORY
from .saved_story import StoryHeader
from .session_file import damage_found, read_session
from .story import Story
from .turns import rewritten, said_before


def reread_conversation(
    path: str | Path,
    llm: Llama,
    *,
    fair_turns: bool = False,
    on_recompute: Callable[[int], None] | None = None,
    copies_mib: int = DEFAULT_MIB,
) -> Conversation:
    """Go on with what was said in a saved conversation, whatever model and settings it had.

    With the next message all of it is read again. The same model reads the tokens that it wrote;
    another one reads the messages and answers as texts, and has neither pins nor the answers that
    were replaced, as those are tokens. Nothing of the cache or the archive of then is used, and the
    file stays as it is.

    Args:
        path: the session file.
        llm: the model. What is in its cache is dropped, unless the file is refused.
        fair_turns: True gives each turn its share of the heavy rows, if it did not have it then.
        on_recompute, copies_mib: as for `Conversation`.

    Raises:
        SessionError: there is no such file, it is damaged, of another kind or a newer format.
        SettingsError: there is no room for what is pinned.
        PyH2OError: the model cannot have such a conversation.
    """
    session = read_session(path, KIND)
    with damage_found(path):
        saved = SavedConversation.of(session.header)
        saved.check_text(session.tokens, session.tokens)
    # All that may be refused is looked at while the cache is still what it was.
    template = ChatTemplate(llm, saved.system)
    places = replace(saved.places, fair_turns=saved.places.fair_turns or fair_turns)
    n_pinned = places.n_pinned(llm, template)
    pins: Pins = ()
    kept: tuple[KeptAnswer, ...] = ()
    if saved.model.is_same(model_identity(llm)):
        tokens, turns = rewritten(template, session.tokens, saved.turns)
        pins = moved(saved.pins, saved.turns, turns)
        check_room(llm, n_pinned, pins)
        with damage_found(path):
            check_known(saved.kept, llm)
        kept = saved.kept
    else:
        said = [(turn.user, turn.answer) for turn in saved.turns]
        tokens, turns = said_before(template, said)
    conversation = Conversation.__new__(Conversation)
    conversation._set_up(llm, template, saved.sampling, places, on_recompute, copies_mib)
    conversation._rewrite(tokens, turns, pins, n_pinned)
    conversation._kept = kept
    return conversation


def reread_story(path: str | Path, llm: Llama) -> Story:
    """Go on with a saved story, whatever model and settings it had.

    With the next passage all of it is read again: the same model reads its tokens, another one the
    text in the notes of whoever saved it, and has no pins. Nothing of the cache or the archive of
    then is used, and the file stays as it is.

    Args:
        path: the session file.
        llm: the model. What is in its cache is dropped, unless the file is refused.

    Raises:
        SessionError: there is no such file, it is damaged, of another kind or a newer format, or
            its notes do not have its text.
        SettingsError: there is no room for what is pinned.
    """
    session = read_session(path, STORY)
    header = StoryHeader.of(session)
    saved, mine = header.story, model_identity(llm)
    if header.model.is_same(mine):
        check_room(llm, 0 if llm.budget is None else llm.budget.pinned, saved.pins)
        now = {"model": asdict(mine), "settings": settings_identity(llm), "archive": None}
        return Story.resume(replace(session, header=session.header | now, kv=b"", path=None), llm)
    text = header.notes.get("text")
    if not isinstance(text, str):
        raise SessionError(
            f"{path} has the story in tokens only, which another model does not know: go on with "
            f"the model {in_one_line(header.model.file)}"
        )
    story = Story(
        llm,
        text,
        sampling=saved.sampling,
        until=saved.until,
        echo=True,
        loop_guard=saved.loop_guard,
        ignore_eos=saved.ignore_eos,
    )
    story.edit(text)  # what comes next is new text only
    story.notes = header.notes
    return story
