"""How far a story is to go, as its checkpoint remembers it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import InputError

NO_LIMIT = 0
"""What -n says for a story that goes on until the model ends it."""


@dataclass(frozen=True)
class Plan:
    """What was asked for when a story was begun, or when it was gone on with.

    Attributes:
        max_tokens: most tokens of the story in all, without the prompt's; NO_LIMIT is no limit.
        checkpoint_every: tokens between two checkpoints.
    """

    max_tokens: int = NO_LIMIT
    checkpoint_every: int = 1000

    @classmethod
    def of(cls, notes: Mapping[str, Any]) -> Plan:
        """The plan in a checkpoint; an earlier pyh2o left none.

        Raises:
            InputError: it makes no sense.
        """
        found = {name: notes[name] for name in asdict(cls()) if name in notes}
        for name, value in found.items():
            if type(value) is not int or value < (name == "checkpoint_every"):
                raise InputError(
                    f"the checkpoint is damaged (its {name} is {value!r}): use another copy of it"
                )
        return cls(**found)

    def changed(self, max_tokens: int | None, checkpoint_every: int | None) -> Plan:
        """The plan with what was typed; None is what it was."""
        typed = {"max_tokens": max_tokens, "checkpoint_every": checkpoint_every}
        return replace(self, **{name: value for name, value in typed.items() if value is not None})

    def left(self, written: int) -> int | None:
        """How many tokens a story of so many may have more; None is any number."""
        return None if self.max_tokens == NO_LIMIT else max(0, self.max_tokens - written)
