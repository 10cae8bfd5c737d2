"""The models of a server as the routes ask them: what all have, and one that writes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import llama_cpp
from anyio import from_thread
from llama_cpp import LlamaGrammar

from ..core.model import Model
from ..engine import Engine
from ..engine.requests import Completions, Terms
from ..limits import Limits
from .bodies import ChatBody, CompletionBody
from .refusals import ShutdownError, one_line, without_folders, wrong_field
from .schemas import schema_grammar


class Served:
    """A model that many requests use, each in a thread of anyio's.

    Attributes:
        name: what clients know it by.
        limits: what a request may take.
        shutting_down: set to end all answers in the making.
    """

    def __init__(self, model: Model, name: str, limits: Limits) -> None:
        self._model = model
        self.name = name
        self.limits = limits
        self.shutting_down = False

    def check_open(self) -> None:
        """Raise a ShutdownError if the server ends; from any thread."""
        if self.shutting_down:
            raise ShutdownError("the server is shutting down")

    def check(self) -> None:
        """End the work of a request, if nobody wants it.

        Raises:
            ShutdownError: the server is to end.
            BaseException: what anyio raises when the client has left.
        """
        self.check_open()
        from_thread.check_cancelled()

    def check_tokens(self, tokens: list[int], param: str) -> None:
        """Refuse numbers that are no tokens, with a RefusedError: llama.cpp ends the program."""
        n_vocab = self._model.n_vocab
        wrong = [token for token in tokens if not 0 <= token < n_vocab]
        if wrong:
            raise wrong_field(
                param,
                f"the model has tokens 0 to {n_vocab - 1}, and none is {wrong[0]}: give those",
            )


class ServedModel(Served):
    """A model that writes many texts at the same time.

    Attributes:
        engine: has the model, and places for texts.
    """

    def __init__(self, engine: Engine, name: str, limits: Limits) -> None:
        super().__init__(engine.model, name, limits)
        self.engine = engine

    def close(self) -> None:
        """Free the model; texts in the making end."""
        self.engine.close()

    def grown_bytes(self) -> int:
        """Of texts without a place, and of archives; it waits for the batch in the making."""
        archives = sum(place.kv.bytes_archive for place in self.engine.report())
        return self.engine.stored.bytes + archives

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts so far."""
        return self.engine.texts.prompt_tokens

    def terms(self, **more: Any) -> Terms:
        """On what terms a request gets a place: as long as somebody wants it; with `more`."""
        return Terms(wait_seconds=self.limits.wait_seconds, check=self.check, **more)

    def answer(self, body: CompletionBody | ChatBody, terms: Terms) -> Any:
        """The result of a completion or a chat, or an iterator of its chunks.

        Raises:
            RefusedError: the prompt or the constraints do not suit the model.
            BusyError: there was no place in time.
            ValueError: the model refuses anything else of it.
        """
        return ServedCompletions(self, body, terms).result()

    def check_prompt(self, prompt: str | list[int], param: str) -> None:
        """Refuse a prompt that is longer than the limit, with a RefusedError."""
        limit = self.limits.prompt_limit(self._model.window)
        n_tokens = len(prompt.encode() if isinstance(prompt, str) else prompt)
        # A text has no more tokens than bytes, but for the first.
        if isinstance(prompt, str) and n_tokens >= limit:
            n_tokens = len(self._model.tokenize(prompt.encode(), add_bos=False, special=True))
        if n_tokens > limit:
            raise wrong_field(
                param,
                f"{n_tokens:,} tokens, and the limit is {limit:,}: shorten the prompt, or start "
                "the server with a higher --max-prompt-tokens",
                code="context_length_exceeded",
            )


class ServedCompletions(Completions):
    """Completions for one request, in OpenAI's words; each ends some time.

    llama_cpp's chat handlers call `create_completion` with the prompt they made.
    """

    def __init__(self, served: ServedModel, body: CompletionBody | ChatBody, terms: Terms) -> None:
        super().__init__(served.engine, terms)
        self._served = served
        self._body = body
        self._grammar = body.grammar or None
        self._usage: dict[str, Any] = {}
        self._has_prompt = False

    def result(self) -> Any:
        """What comes of it; a stream ends with a chunk of the tokens used, if that is asked for."""
        body = self._body
        result = self._chat(body) if isinstance(body, ChatBody) else self._complete(body)
        is_wanted = body.stream and body.stream_options.include_usage
        return self._and_usage(result) if is_wanted else result

    def _complete(self, body: CompletionBody) -> Any:
        given = body.model_dump(include={"prompt", "suffix", "echo", "max_tokens"})
        return self.create_completion(**given, **body.drawing())

    def _chat(self, body: ChatBody) -> Any:
        wanted, tool = body.response_format, body.forced_tool()
        if wanted is not None:
            self._grammar = schema_grammar(wanted, "response_format")
        if tool is not None:
            self._grammar = schema_grammar(tool.parameters, "tools")
        try:
            return self.create_chat_completion(
                messages=[message.for_template() for message in body.messages],
                tools=[each.model_dump(exclude_none=True) for each in body.tools] or None,
                tool_choice=tool and {"type": "function", "function": {"name": tool.name}},
                max_tokens=body.max_completion_tokens or body.max_tokens,
                **body.drawing(),
            )
        except Exception as error:
            if self._has_prompt or isinstance(error, MemoryError):
                raise
            reason = one_line(without_folders(str(error)))
            raise wrong_field(
                "messages", f"the model's chat template cannot write them down: {reason}"
            ) from error

    def create_completion(self, prompt: Any, *args: Any, **arguments: Any) -> Any:
        """As `Completions.create_completion`, in OpenAI's words.

        Raises:
            RefusedError: the prompt is too long, or what the model cannot have is asked for.
        """
        self._has_prompt = True
        served, body, model = self._served, self._body, self.model
        served.check_prompt(prompt, "messages" if isinstance(body, ChatBody) else "prompt")
        processors = None
        if body.min_tokens:
            least = llama_cpp.MinTokensLogitsProcessor(body.min_tokens, model.native.token_eos())
            processors = llama_cpp.LogitsProcessorList([least])
        arguments.update(
            model=served.name,
            max_tokens=arguments["max_tokens"] or model.window,
            logit_bias=self._biases(),
            logits_processor=processors,
            # A chat handler's own for a tool would be that of any JSON, where it fails to make one.
            grammar=self._grammar and LlamaGrammar.from_string(self._grammar, verbose=False),
        )
        result = super().create_completion(prompt, *args, **arguments)
        return self._without_usage(result) if body.stream else result

    def _without_usage(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for chunk in chunks:
            self._usage = chunk.pop("usage", {})
            yield chunk

    def _and_usage(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for chunk in chunks:
            last = {**chunk, "choices": []}
            yield {**chunk, "usage": None}
        yield {**last, "usage": self._usage}

    def _biases(self) -> dict[int, float] | None:
        """The logit biases of the request, by token."""
        given = self._body.logit_bias
        if given is None:
            return None
        if self._body.logit_bias_type == "tokens":
            tokenize = partial(self.model.tokenize, add_bos=False, special=True)
            return {token: b for text, b in given.items() for token in tokenize(text.encode())}
        try:
            biases = {int(token): bias for token, bias in given.items()}
        except ValueError:
            raise wrong_field("logit_bias", "its keys have to be numbers of tokens") from None
        self._served.check_tokens(list(biases), "logit_bias")
        return biases
