"""Whether a model thinks before it answers, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError

if TYPE_CHECKING:
    from ..core.native_chat import ChatPrompt, NativeTemplate


@dataclass(frozen=True)
class Thinking:
    """How a model thinks whose chat template has thoughts.

    Attributes:
        enabled: False for not at all, if the template can say so; None for as the template has it.
        budget: most tokens of the thoughts of an answer; 0 for none, None or -1 for any number.
    """

    enabled: bool | None = None
    budget: int | None = None

    @property
    def limit(self) -> int | None:
        """Most tokens of thoughts; None for any number."""
        return None if self.budget is None or self.budget < 0 else self.budget

    def prompt(
        self, template: NativeTemplate, messages: list[dict[str, Any]], **request: Any
    ) -> ChatPrompt:
        """What `NativeTemplate.apply` returns for these messages and a model that thinks so.

        Raises:
            ChatError: the template refuses it.
            SettingsError: the template does not turn thoughts off.
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
                "enable_thinking: the model's chat template does not turn thoughts off: give a "
                "reasoning_budget of 0, which ends them at once"
            )
        return prompt


# As the model's template has it, without a limit.
USUAL = Thinking()


def refuse_without_template(**given: Any) -> None:
    """Refuse what only the templates in models' files have.

    Raises:
        SettingsError: naming the first of `given` that is not None.
    """
    for name, value in given.items():
        if value is not None:
            raise SettingsError(
                f"{name}: the chat does not go by a template of the model's file, which alone has "
                "thoughts: leave it out, or give no chat_format"
            )
