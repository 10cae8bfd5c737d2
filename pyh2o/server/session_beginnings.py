"""New sessions from their bodies, for example with a character card."""

from __future__ import annotations

import base64

from ..engine.slots import Slot
from ..sessions.characters import card_in, character_of
from ..sessions.conversation import Conversation
from ..sessions.lorebooks import LoreEntry, entries_of
from ..sessions.story import Story
from ..writing.chat_prompt import prompt_for_message
from ..writing.sampling import Sampling
from ..writing.thinking import Thinking
from .open_session import SessionText
from .refusals import wrong_field
from .session_bodies import NewSessionBody


def begun(slot: Slot, body: NewSessionBody, sampling: Sampling, thinking: Thinking) -> SessionText:
    """Return a new session in a slot; nothing is read yet.

    Raises:
        RefusedError, PyH2OError: the body is invalid for the model.
    """
    make = _story if body.kind == "story" else _conversation
    made = make(slot, body, thinking)
    made.sampling = sampling
    made.note = body.note or made.note
    return made


def _story(slot: Slot, body: NewSessionBody, thinking: Thinking) -> SessionText:
    if body.instruct:
        tokens, ends = prompt_for_message(slot.text.model, body.text, thinking)
        story = Story(slot, tokens, until=ends, thinking=thinking)
    else:
        story = Story(slot, body.text, echo=True, memory=body.memory)
        story.edit(body.text)  # only new text is returned later
    story.lore = _lore(body, "")
    return story


def _conversation(slot: Slot, body: NewSessionBody, thinking: Thinking) -> SessionText:
    system, said, name = body.system or None, [(turn.user, turn.answer) for turn in body.turns], ""
    lore: tuple[LoreEntry, ...] = ()
    note = ""
    if body.card is not None:
        card = body.card
        if isinstance(card, str):
            card = card_in(_decoded(card), "card")
        character = character_of(card, "card", user=body.user, instruction=system)
        system, name, lore = character.system, character.name, character.lore
        said, note = said or list(character.opening), character.note
    conversation = Conversation(slot, system=system, thinking=thinking)
    conversation.lore, conversation.note = lore + _lore(body, name), note
    if said:
        conversation.take_over(said)
    return conversation


def _lore(body: NewSessionBody, name: str) -> tuple[LoreEntry, ...]:
    """Return the entries of the lorebook, with the names of character and user."""
    found = () if body.lorebook is None else entries_of(body.lorebook, "lorebook")
    return tuple(entry.named(name, body.user) for entry in found)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise wrong_field("card", "give its JSON, or the base64 of its PNG") from None
