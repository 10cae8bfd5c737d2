"""The model for one request: completions in OpenAI's words that end some time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import llama_cpp
from llama_cpp import LlamaGrammar

from ...errors import BusyError
from ..chat import in_openai_words
from .bodies import Body, ChatBody
from .refusals import RefusedError

if TYPE_CHECKING:
    from .served_model import ServedModel


class AskedModel:
    """The model for one request; what is not here is the model's own.

    llama_cpp's chat handlers call `create_completion` with the prompt they made.

    Attributes:
        has_prompt: whether it was called.
    """

    def __init__(
        self, served: ServedModel, body: Body, grammar: str | None, on_read: Callable[[], None]
    ) -> None:
        self._served = served
        self._completions = served.completions(on_read)
        self._body = body
        self._grammar = grammar or None
        self._usage: dict[str, Any] = {}
        self.has_prompt = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._completions, name)

    def create_completion(self, prompt: str | list[int], **arguments: Any) -> Any:
        """A completion in OpenAI's words, that ends some time.

        Raises:
            RefusedError: the prompt is too long, or there was no place for it in time.
            ValueError: what the model refuses.
        """
        self.has_prompt = True
        served, body = self._served, self._body
        served.check_prompt(prompt, "messages" if isinstance(body, ChatBody) else "prompt")
        if arguments.get("logprobs") is not None and not served.engine.model._logits_all:
            raise RefusedError(
                400,
                "logprobs: no probabilities of tokens are kept here: leave it out",
                param="logprobs",
            )
        arguments.update(
            model=served.name,
            max_tokens=arguments["max_tokens"] or self.n_ctx(),
            logit_bias=served.biases(body),
            logits_processor=self._processors(),
            # A chat handler's own for a tool would be that of any JSON, where it fails to make one.
            grammar=self._grammar and LlamaGrammar.from_string(self._grammar, verbose=False),
        )
        try:
            result = self._completions.create_completion(prompt=prompt, **arguments)
        except BusyError:
            raise served.busy() from None
        if body.stream:
            result = self._without_usage(result)
        return in_openai_words(result)

    def answer(self, result: Any) -> Any:
        """What the client gets of a result or of the chunks of a stream: the tokens used, too."""
        if not self._body.stream or not self._body.stream_options.include_usage:
            return result
        return self._with_usage(result)

    def _without_usage(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for chunk in chunks:
            self._usage = chunk.pop("usage", {})
            yield chunk

    def _with_usage(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The chunks, and one more with the tokens used: so OpenAI's clients expect it."""
        for chunk in chunks:
            last = {**chunk, "choices": []}
            yield {**chunk, "usage": None}
        yield {**last, "usage": self._usage}

    def _processors(self) -> Any:
        least = self._body.min_tokens
        if least == 0:
            return None
        processor = llama_cpp.MinTokensLogitsProcessor(least, self.token_eos())
        return llama_cpp.LogitsProcessorList([processor])
