"""Bodies of requests about sessions, as strict as those in `bodies`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..sessions.characters import DEFAULT_USER
from ..writing.sampling import LARGEST_SEED
from .bodies import (
    Bias,
    Breakers,
    Content,
    Count,
    DryBase,
    DryMultiplier,
    LastTokens,
    RepeatPenalty,
    Share,
    Strict,
    Temperature,
    WholeNumber,
)

SessionName = Annotated[str, Field(max_length=200)]


class SamplingBody(Strict):
    """Sampling settings; those that are not given stay unchanged."""

    temperature: Temperature | None = None
    top_k: WholeNumber | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    repeat_penalty: RepeatPenalty | None = None
    frequency_penalty: Bias | None = None
    presence_penalty: Bias | None = None
    dry_multiplier: DryMultiplier | None = None
    dry_base: DryBase | None = None
    dry_allowed_length: WholeNumber | None = None
    dry_penalty_last_n: LastTokens | None = None
    dry_sequence_breakers: Breakers | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    seed: Annotated[int, Field(ge=-1, le=LARGEST_SEED + 1)] | None = None

    def given(self) -> dict[str, Any]:
        """Return the given settings."""
        return self.model_dump(exclude_none=True)


class ExportedTurn(Strict):
    """A message and its answer."""

    user: Annotated[str, Field(min_length=1)]
    answer: Annotated[str, Field(min_length=1)]


class NewSessionBody(Strict):
    """A new session; an export has all these fields."""

    name: SessionName | None = None
    kind: Literal["conversation", "story"] = "conversation"
    model: str | None = None
    system: str | None = None
    sampling: SamplingBody = SamplingBody()
    text: str = ""
    turns: list[ExportedTurn] = Field(default_factory=list)
    first: str = ""
    # World info of SillyTavern, and a character card: its JSON, or the base64 of its PNG.
    lorebook: dict[str, Any] | None = None
    note: str = ""
    card: dict[str, Any] | str | None = None
    user: Annotated[str, Field(min_length=1)] = DEFAULT_USER
    # Of a story: text before it, or whether `text` is an instruction.
    memory: str = ""
    instruct: bool = False

    @property
    def first_words(self) -> str:
        """The first words, from which a name is made if none is given."""
        return self.first or self.text or (self.turns[0].user if self.turns else "")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> NewSessionBody:
        of_conversations = self.system, self.turns, self.card
        if self.kind == "story" and any(each not in (None, "", []) for each in of_conversations):
            raise ValueError("a story has no system prompt, turns and card: give it a text")
        if self.kind == "conversation" and (self.text or self.memory or self.instruct):
            raise ValueError("a conversation begins with a message: leave text out")
        if self.instruct and self.memory:
            raise ValueError("an instruction has no memory: leave memory or instruct out")
        return self


class ImportBody(Strict):
    """The text of a file exported by another program."""

    text: str


class ChangeBody(Strict):
    """Changes of a session; an empty system prompt or note removes it.

    `attempt` chooses one of the answers to the last message.
    """

    name: SessionName | None = None
    model: str | None = None
    system: str | None = None
    note: str | None = None
    lorebook: dict[str, Any] | None = None
    sampling: SamplingBody | None = None
    attempt: WholeNumber | None = None


class AnswerBody(Strict):
    """What to answer: a message, which may have pictures and sound, or the last one again."""

    message: Content | None = None
    edit: Content | None = None
    regenerate: Literal[True] | None = None
    goes_on: Literal[True] | None = Field(default=None, alias="continue")
    max_tokens: Count | None = None

    @model_validator(mode="after")
    def _is_one(self) -> AnswerBody:
        given = [self.message, self.edit, self.regenerate, self.goes_on]
        if sum(each is not None for each in given) != 1:
            raise ValueError("give one of message, edit, regenerate and continue")
        for text in (self.message, self.edit):
            if isinstance(text, str) and not text.strip():
                raise ValueError("the message is empty: say something")
        return self


class PassageBody(Strict):
    """A passage of a story to generate, at the end or from character `at`."""

    max_tokens: Count | None = None
    at: WholeNumber | None = None


class ReplaceBody(Strict):
    """The text that replaces a story's characters from `start` to `end`."""

    start: WholeNumber
    end: WholeNumber
    text: str


class UndoBody(Strict):
    """Empty; a page of another site cannot send JSON without permission."""


class PinBody(Strict):
    """Tokens to pin, from `start` to `end`."""

    start: WholeNumber
    end: WholeNumber
