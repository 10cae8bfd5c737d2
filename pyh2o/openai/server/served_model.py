"""A model that writes, as the routes ask it: work that can be broken off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from ...engine import Engine
from ...engine.requests import Completions, Terms
from ...llama import Llama
from ..limits import Limits
from .asked_model import AskedModel
from .bodies import Body, ChatBody, CompletionBody
from .refusals import RefusedError, one_line, without_folders
from .schemas import schema_grammar
from .served_llama import ServedLlama


class ServedModel(ServedLlama):
    """A model that writes many texts at the same time.

    Attributes:
        engine: has the model, and places for texts.
    """

    def __init__(self, engine: Engine, name: str, limits: Limits) -> None:
        super().__init__(name, limits)
        self.engine = engine

    def close(self) -> None:
        """Free the model; texts in the making end."""
        self.engine.close()

    def grown_bytes(self) -> int:
        """Of texts without a place, and of archives; it waits for the batch in the making."""
        archives = sum(place.kv.bytes_archive for place in self.engine.report())
        return self.engine.stored.bytes + archives

    @property
    def _llama(self) -> Llama:
        return self.engine.model

    def completions(self, on_read: Callable[[], None]) -> Completions:
        """The engine for one request, in the thread that is to wait and to work for it.

        Its work ends with a `ShutdownError` when the server is to end, and with what anyio raises
        when the client has left.

        Args:
            on_read: called after each piece of a prompt.
        """
        return Completions(
            self.engine,
            Terms(
                wait_seconds=self.limits.wait_seconds,
                check=self.check,
                on_read=lambda _done, _all: on_read(),
            ),
        )

    # ---------------------------------------------------------------------------------------------
    # Work
    # ---------------------------------------------------------------------------------------------

    def complete(self, body: CompletionBody, on_read: Callable[[], None]) -> Any:
        """The result of a completion, or an iterator of its chunks.

        Args:
            body: what is asked for.
            on_read: called after each piece of the prompt.

        Raises:
            RefusedError: the prompt or the constraints do not suit the model.
            ValueError: nor does anything else of it.
        """
        asked = AskedModel(self, body, body.grammar, on_read)
        return asked.answer(
            asked.create_completion(
                prompt=body.prompt,
                suffix=body.suffix,
                echo=body.echo,
                logprobs=body.logprobs,
                max_tokens=body.max_tokens,
                **body.drawing(),
            )
        )

    def chat(self, body: ChatBody, on_read: Callable[[], None]) -> Any:
        """The model's answer in a chat, or an iterator of its chunks.

        Args:
            body: what is asked for.
            on_read: called after each piece of the prompt.

        Raises:
            RefusedError: the messages or the constraints do not suit the model.
            ValueError: nor does anything else of it.
        """
        grammar = body.grammar
        wanted, tool = body.response_format.wanted, body.forced_tool()
        if wanted is not None:
            grammar = schema_grammar(wanted, "response_format")
        if tool is not None:
            grammar = schema_grammar(tool.parameters, "tools")
        tools = [
            {
                "type": "function",
                "function": {"parameters": {}, **each.model_dump(exclude_unset=True)},
            }
            for each in body.all_tools()
        ]
        asked = AskedModel(self, body, grammar, on_read)
        try:
            result = Llama.create_chat_completion(
                cast(Any, asked),
                messages=[message.for_template() for message in body.messages],
                tools=tools or None,
                tool_choice=tool and {"type": "function", "function": {"name": tool.name}},
                logprobs=body.logprobs,
                top_logprobs=body.top_logprobs,
                max_tokens=body.max_completion_tokens or body.max_tokens,
                **body.drawing(),
            )
        except Exception as error:
            if asked.has_prompt or isinstance(error, MemoryError):
                raise
            reason = one_line(without_folders(str(error)))
            raise RefusedError(
                400,
                f"messages: the model's chat template cannot write them down: {reason}",
                param="messages",
            ) from error
        return asked.answer(result)

    # ---------------------------------------------------------------------------------------------
    # Checks that need the model
    # ---------------------------------------------------------------------------------------------

    def check_prompt(self, prompt: str | list[int], param: str) -> None:
        """Refuse a prompt that is longer than the limit.

        Raises:
            RefusedError: it is.
        """
        limit = self.limits.prompt_limit(self._llama.n_ctx())
        # A text of fewer bytes than the limit has no more tokens than it, but for the first.
        if isinstance(prompt, str):
            data = prompt.encode()
            if len(data) < limit:
                return
            n_tokens = len(self._llama.tokenize(data, add_bos=False, special=True))
        else:
            n_tokens = len(prompt)
        if n_tokens > limit:
            raise RefusedError(
                400,
                f"{param}: {n_tokens:,} tokens, and the limit is {limit:,}: shorten the prompt, or "
                "start the server with a higher --max-prompt-tokens",
                param=param,
                code="context_length_exceeded",
            )

    def biases(self, body: Body) -> dict[int, float] | None:
        """The logit biases of a request, by token.

        Raises:
            RefusedError: for something that is no token.
        """
        if body.logit_bias is None:
            return None
        if body.logit_bias_type == "tokens":
            return {
                token: bias
                for text, bias in body.logit_bias.items()
                for token in self._llama.tokenize(text.encode(), add_bos=False, special=True)
            }
        try:
            biases = {int(token): bias for token, bias in body.logit_bias.items()}
        except ValueError:
            raise RefusedError(
                400, "logit_bias: its keys have to be numbers of tokens", param="logit_bias"
            ) from None
        self.check_tokens(list(biases), "logit_bias")
        return biases
