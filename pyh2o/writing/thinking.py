"""Reasoning settings: whether a model reasons before it answers, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError

if TYPE_CHECKING:
    from ..core.native_chat import ChatPrompt, NativeTemplate


@dataclass(frozen=True)
class Thinking:
    """Reasoning settings, for chat templates that support reasoning.

    Attributes:
        enabled: False disables reasoning, if the template can; None is the template's default.
        budget: maximum reasoning tokens of an answer; 0 for none, None or -1 for no limit.
    """

    enabled: bool | None = None
    budget: int | None = None

    @property
    def limit(self) -> int | None:
        """Maximum number of reasoning tokens; None for no limit."""
        return None if self.budget is None or self.budget < 0 else self.budget

    def prompt(
        self, template: NativeTemplate, messages: list[dict[str, Any]], **request: Any
    ) -> ChatPrompt:
        """Return the prompt of `NativeTemplate.apply` with these settings.

        Raises:
            ChatError: the template refuses the messages.
            SettingsError: the template cannot disable reasoning.
        """
        enabled = False if self.enabled is None and self.budget == 0 else self.enabled
        prompt = template.apply(messages, **request, enable_thinking=enabled)
        if (
            self.enabled is False
            and prompt.supports_thinking
            and not request.get("continue_final_message")
            and template.apply(messages, **request).prompt == prompt.prompt
        ):
            raise SettingsError(
                "enable_thinking: the model's chat template cannot disable reasoning: give a "
                "reasoning_budget of 0, which ends it at once"
            )
        return prompt


# The template's default, without a limit.
USUAL = Thinking()


def refuse_without_template(**given: Any) -> None:
    """Refuse settings that need a chat template in the model's file.

    Raises:
        SettingsError: one of `given` is not None.
    """
    for name, value in given.items():
        if value is not None:
            raise SettingsError(
                f"{name}: reasoning needs the chat template of the model's file: omit it, or "
                "give no chat_format"
            )
