"""Import stories saved by koboldcpp."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KoboldStory:
    """The contents of a koboldcpp save file.

    Attributes:
        memory: text that comes before the story in the prompt.
        left_out: features of the save that are not imported, as koboldcpp calls them.
    """

    text: str
    memory: str
    left_out: tuple[str, ...]


def kobold_story(text: str) -> KoboldStory | None:
    """Return the story of a save file's text; None if it is not a save file."""
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
