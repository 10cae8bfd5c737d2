"""Who gets the places in the cache that are not those of recent rows."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SettingsError
from ..llama import Llama
from ..text.chat_template import ChatTemplate


@dataclass(frozen=True)
class Places:
    """What a conversation gives them to (see Conversation).

    Attributes:
        pin_system: whether the system prompt is never evicted.
        fair_turns: whether each turn gets its share of the heavy rows.
    """

    pin_system: bool
    fair_turns: bool

    def n_pinned(self, llm: Llama, template: ChatTemplate) -> int:
        """How many tokens to pin: the template's opening, unless that is not wanted.

        Raises:
            SettingsError: there is no room for a system prompt.
        """
        budget = llm.budget
        if budget is None:
            return 0
        n_opening = len(template.opening)
        if not self.pin_system:
            return budget.pinned
        room = budget.pinned + budget.heavy
        if n_opening <= room:
            return max(n_opening, budget.pinned)
        if template.system is None:
            return budget.pinned
        raise SettingsError(
            f"the system prompt takes {n_opening} tokens, more than the {room} rows that are not "
            "recent: shorten it, or raise hh (--hh)"
        )
