"""The models of a server as the routes ask them: what all have, and one that writes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import llama_cpp
from anyio import from_thread

from ..compat.completion import completion_tokens
from ..core.model import Model
from ..engine import Engine
from ..engine.requests import Completions, Terms
from ..errors import GrammarError, PictureError, SettingsError
from ..limits import Limits
from ..writing.prompt import prompt_text
from ..writing.thinking import Thinking
from .bodies import MORE_SAMPLERS, ChatBody, CompletionBody
from .custom_tools import chunks_with_custom_calls, with_custom_calls
from .one_place import OnePlace
from .refusals import RefusedError, ShutdownError, one_line, without_folders, wrong_field


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
        keep_dropped: for requests that do not say (see `Terms`).
    """

    def __init__(
        self, engine: Engine, name: str, limits: Limits, *, keep_dropped: bool = False
    ) -> None:
        super().__init__(engine.model, name, limits)
        self.engine = engine
        self.keep_dropped = keep_dropped

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

    @property
    def thinking(self) -> Thinking:
        """Whether the model thinks, and for how long, unless somebody says otherwise."""
        if "thinking" not in self._model.chat.abilities:
            return Thinking()
        return Thinking(None if self.limits.thinks else False, self.limits.reasoning_budget)

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
        result = ServedCompletions(self, body, terms).result()
        names = body.custom_tools if isinstance(body, ChatBody) else set()
        if not names:
            return result
        return (chunks_with_custom_calls if body.stream else with_custom_calls)(result, names)

    def count_tokens(self, body: ChatBody) -> int:
        """How many tokens the prompt of a chat has; raises what `answer` does, but for the wait."""
        prompt = _Prompt(self, body.model_copy(update={"stream": True}), self.terms())
        prompt.result()
        return prompt.n_tokens

    @property
    def longest_prompt(self) -> int:
        """Most tokens of one: what is longer than the window streams through the cache."""
        return self.limits.prompt_limit(self._model.window)

    def check_prompt(self, prompt: str | list[int], param: str) -> None:
        """Refuse a prompt that is longer than the limit, with a RefusedError."""
        limit = self.longest_prompt
        n_tokens = len(prompt.encode() if isinstance(prompt, str) else prompt)
        # A text has no more tokens than bytes, but for the first, and for pictures.
        if isinstance(prompt, str) and (n_tokens >= limit or self._model.projector is not None):
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

    Attributes:
        usage: the tokens used so far.
        stop: the stop string of the request that ended the stream; None if none did.
    """

    def __init__(self, served: ServedModel, body: CompletionBody | ChatBody, terms: Terms) -> None:
        keep = served.keep_dropped if body.keep_dropped is None else body.keep_dropped
        super().__init__(served.engine, replace(terms, keep_dropped=keep))
        self._served = served
        self._body = body
        self.usage = Usage()
        self.stop: str | None = None
        self._has_prompt = False

    def result(self) -> Any:
        """What comes of it; a stream ends with a chunk of the tokens used, if that is asked for.

        Several answers come one after the other: each goes back to the end of the prompt.
        """
        if self._body.stream:
            return self._chunks()
        results = list(self._results())
        choices = [{**result["choices"][0], "index": index} for index, result in enumerate(results)]
        return {**results[0], "choices": choices, "usage": self.usage.json()}

    def _results(self) -> Iterator[Any]:
        body = self._body
        write: Callable[..., Any] = self._chat
        prompts: list[Any] = [None]
        if isinstance(body, CompletionBody):
            if body.echo and body.logprobs is not None and not self.model.parameters.logits_all:
                raise wrong_field(
                    "echo", "log probabilities of a prompt are not kept: leave echo or logprobs out"
                )
            write, prompts = self._complete, body.prompts(self.model)
            for number, prompt in enumerate(prompts):
                param = "prompt" if len(prompts) == 1 else f"prompt[{number}]"
                self._served.check_prompt(prompt, param)
                if not isinstance(prompt, str):
                    self._served.check_tokens(prompt, param)
        for prompt in prompts:
            with OnePlace(self._served.engine) as place:
                self._engine = cast(Engine, place if body.n > 1 else self._served.engine)
                for number in range(body.n):
                    result = write(prompt, body.drawing(number))
                    if not body.stream:
                        self.usage.note(result["usage"])
                    yield result
                    self.usage.end_choice(is_last=number == body.n - 1)

    def _chunks(self) -> Iterator[Any]:
        wants_usage = self._body.stream_options.include_usage
        last: dict[str, Any] = {}
        for index, chunks in enumerate(self._results()):
            for chunk in chunks:
                choice = {**chunk["choices"][0], "index": index}
                last = {**chunk, "id": last.get("id", chunk["id"]), "choices": [choice]}
                yield {**last, "usage": None} if wants_usage else last
        if wants_usage:
            yield {**last, "choices": [], "usage": self.usage.json()}

    def _complete(self, prompt: str | list[int], drawing: dict[str, Any]) -> Any:
        given = self._body.model_dump(include={"suffix", "echo", "max_tokens", "logprobs"})
        result = self.create_completion(prompt, **given, grammar=self._body.constraint, **drawing)
        if not (self._body.stream and given["echo"]):
            return result
        first = next(result)
        [choice] = first["choices"]
        echo = {**choice, "text": prompt_text(self.model, prompt), "finish_reason": None}
        return itertools.chain([{**first, "choices": [{**echo, "logprobs": None}]}, first], result)

    def _chat(self, _prompt: None, drawing: dict[str, Any]) -> Any:
        body = self._body
        assert isinstance(body, ChatBody)
        schema = body.schema_field and {
            "type": "json_object",
            "schema": getattr(body, body.schema_field),
        }
        try:
            return self.create_chat_completion(
                messages=[message.for_template() for message in body.messages],
                tools=[each.for_template() for each in body.tools] or None,
                tool_choice=self._tool_choice(body),
                response_format=schema,
                grammar=None if schema else body.constraint,
                max_tokens=body.limit,
                logprobs=body.logprobs,
                top_logprobs=body.top_logprobs,
                continue_final_message=body.goes_on,
                **self._thinking(body),
                **drawing,
            )
        except PictureError as error:
            raise wrong_field("messages", str(error)) from error
        except Exception as error:
            if self._has_prompt or isinstance(error, (MemoryError, RefusedError, GrammarError)):
                raise
            reason = one_line(without_folders(str(error)))
            if isinstance(error, SettingsError):  # which names the argument first
                raise wrong_field(*reason.split(": ", 1)) from error
            raise wrong_field(
                "messages", f"the model's chat template cannot write them down: {reason}"
            ) from error

    def _thinking(self, body: ChatBody) -> dict[str, Any]:
        """What the request says of reasoning, or else the server.

        Empty if the model's file has no chat template: such a model has no reasoning.
        """
        if not self.model.chat.handlers:
            return {}
        of_server = self._served.thinking
        usual = {"enable_thinking": of_server.enabled, "reasoning_budget": of_server.budget}
        return {**usual, **body.thinking()}

    def _tool_choice(self, body: ChatBody) -> Any:
        """As `Llama` takes it; the only tool by its name where the template has no tools."""
        [*names] = (tool.function.name for tool in body.tools)
        if body.tool_choice != "required" or len(names) != 1:
            return body.tool_choice
        return {"type": "function", "function": {"name": names[0]}}

    def create_completion(self, prompt: Any, *args: Any, **arguments: Any) -> Any:
        """As `Completions.create_completion`, in OpenAI's words.

        Raises:
            RefusedError: the prompt is too long, or what the model cannot have is asked for.
        """
        self._has_prompt = True
        served, body, model = self._served, self._body, self.model
        if isinstance(body, ChatBody):
            served.check_prompt(prompt, "messages")
        served.check_tokens(body.stop_token_ids, "stop_token_ids")
        limit = arguments["max_tokens"]
        arguments.update(
            model=served.name,
            max_tokens=model.window if limit is None else limit,
            reads_only=limit == 0,
            stop_tokens=frozenset(body.stop_token_ids),
            logit_bias=self._biases(),
            logits_processor=self._processors(),
            samplers=body.model_dump(include={*MORE_SAMPLERS}),
            keep_thoughts=body.keep_thoughts,
        )
        result = super().create_completion(prompt, *args, **arguments)
        return self._without_usage(result) if body.stream else result

    def _without_usage(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for chunk in chunks:
            self.usage.note(chunk.pop("usage"))
            stop = chunk["choices"][0].pop("stop_reason", None)
            self.stop = stop if stop in self._body.stop else None
            yield chunk

    def _processors(self) -> llama_cpp.LogitsProcessorList | None:
        """Logits processors for `ignore_eos` and `min_tokens`; None without both."""
        body, ends = self._body, self.model.end_tokens
        processors = [_Suppressed(ends, math.inf)] if body.ignore_eos else []
        if body.min_tokens:
            processors.append(_Suppressed([*ends, *body.stop_token_ids], body.min_tokens))
        return llama_cpp.LogitsProcessorList(processors) if processors else None

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


class _Prompt(ServedCompletions):
    """A chat of which only the prompt is made."""

    n_tokens = 0

    def result(self) -> None:
        self._chat(None, self._body.drawing(0))

    def create_completion(self, prompt: Any, *_args: Any, **_arguments: Any) -> Any:
        self.n_tokens = len(completion_tokens(self.model, prompt, None))
        return iter(())


class _Suppressed:
    """Logits processor that suppresses tokens while the first `n_tokens` are sampled."""

    def __init__(self, tokens: list[int], n_tokens: float) -> None:
        self._tokens, self._left = tokens, n_tokens

    def __call__(self, _tokens: Any, logits: Any) -> Any:
        if self._left > 0:
            logits[self._tokens] = -math.inf
        self._left -= 1
        return logits


class Usage:
    """The tokens that a request used; those of a prompt count once, however often it is answered.

    Attributes:
        prompt: tokens of the prompts.
        cached: those of them that were in the cache already.
        dropped: tokens of the texts that are not in the prompts any more.
        written: tokens of the answers.
    """

    def __init__(self) -> None:
        self.prompt = self.cached = self.dropped = self.written = 0
        self._before = (0, 0, 0, 0)
        self._is_again = False

    def note(self, used: dict[str, Any]) -> None:
        """Take over what llama_cpp says of the choice in the making."""
        prompt, cached, dropped, written = self._before
        self.written = written + used["completion_tokens"]
        if not self._is_again:
            self.prompt = prompt + used["prompt_tokens"]
            details = used["prompt_tokens_details"]
            self.cached = cached + details["cached_tokens"]
            self.dropped = dropped + details["dropped_tokens"]

    def end_choice(self, *, is_last: bool) -> None:
        """Go on with another choice; `is_last` of its prompt."""
        self._before = (self.prompt, self.cached, self.dropped, self.written)
        self._is_again = not is_last

    def json(self) -> dict[str, Any]:
        """As OpenAI has it, and what was dropped, if anything was."""
        dropped = {"dropped_tokens": self.dropped} if self.dropped else {}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.written,
            "total_tokens": self.prompt + self.written,
            "prompt_tokens_details": {"cached_tokens": self.cached, **dropped},
        }
