"""Stories that koboldcpp has saved."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KoboldStory:
    """What is in a save of koboldcpp's.

    Attributes:
        text: of the story.
        memory: what the model is told before it.
        left_out: what else is told there, by the names that koboldcpp has for it.
    """

    text: str
    memory: str
    left_out: tuple[str, ...]


def kobold_story(text: str) -> KoboldStory | None:
    """The story in the text of a save; None if that is none."""
    try:
        save: Any = json.loads(text)
    except ValueError:
        return None
    if not isinstance(save, dict) or not {"gamestarted", "prompt", "actions"} <= save.keys():
        return None
    actions = save["actions"] if isinstance(save["actions"], list) else []
    parts = [save["prompt"], *actions]
    memory = save.get("memory")
    others = {"author's note": save.get("authorsnote"), "world info": save.get("worldinfo")}
    return KoboldStory(
        "".join(part for part in parts if isinstance(part, str)),
        memory.strip() if isinstance(memory, str) else "",
        tuple(name for name, other in others.items() if other),
    )
