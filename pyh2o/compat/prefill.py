"""Chats whose last message is the beginning of the answer, which the model goes on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Stands for the beginning of the answer. No template and no person writes it.
BEGUN = "begun-x8qr0f"


class BegunAnswer:
    """Stands in for a model in its chat handler, whose prompt ends where the last message does.

    The template writes the message as it would write an answer that has ended: what comes in front
    of that stays, and what comes behind it goes.

    Attributes:
        messages: for the handler.
    """

    def __init__(self, llama: Any, messages: Sequence[Mapping[str, Any]]) -> None:
        """`llama` has the model's methods.

        Raises:
            ValueError: the last message is no text of the assistant's.
        """
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
            raise ValueError(
                "only an answer can be continued: let the last message be a text of the "
                "assistant's, or leave continue_final_message out"
            )
        self._llama, self._text = llama, last["content"]
        self._is_there = False
        self.messages = [*messages[:-1], {**last, "content": BEGUN}]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> Any:
        """The tokens of the prompt, with its end as it was said."""
        before, *behind = text.decode().split(BEGUN)
        self._is_there = len(behind) == 1
        # a template may write the space that models draw
        said = self._text.lstrip(" ") if before.endswith(" ") else self._text
        return self._llama.tokenize((before + said).encode(), add_bos, special)

    def create_completion(self, *args: Any, **arguments: Any) -> Any:
        """The model's.

        Raises:
            ValueError: the prompt does not show where the message ends.
        """
        if not self._is_there:
            raise ValueError(
                "the chat template does not show where the last answer ends, so that cannot be "
                "continued: let the last message be the user's"
            )
        return self._llama.create_completion(*args, **arguments)
