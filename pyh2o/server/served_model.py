"""A loaded model as the routes use it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from anyio import from_thread

from ..core.model import Model
from ..engine import Engine
from ..engine.engine import Terms
from ..errors import GrammarError, PictureError, SettingsError
from ..limits import Limits
from ..writing.chat_prompt import Prompt, prepare
from ..writing.events import Event
from ..writing.request import Request
from ..writing.sampler import LogitsProcessor, SamplerSettings
from ..writing.thinking import Thinking
from .bodies import N_SEEDS, SAMPLERS, ChatBody, CompletionBody
from .refusals import RefusedError, ShutdownError, one_line, without_folders, wrong_field


class Served:
    """A model that many requests use, each in a thread of anyio's."""

    def __init__(self, model: Model, name: str, limits: Limits) -> None:
        self._model = model
        self.name = name
        self.limits = limits
        self.shutting_down = False

    def check_open(self) -> None:
        """Raise a ShutdownError if the server shuts down; from any thread."""
        if self.shutting_down:
            raise ShutdownError("the server is shutting down")

    def check(self) -> None:
        """Raise an error if the request is cancelled.

        Raises:
            ShutdownError: the server shuts down.
            BaseException: anyio's cancellation, if the client has disconnected.
        """
        self.check_open()
        from_thread.check_cancelled()

    def check_tokens(self, tokens: list[int], param: str) -> None:
        """Raise a RefusedError for tokens out of range, at which llama.cpp would abort."""
        n_vocab = self._model.n_vocab
        wrong = [token for token in tokens if not 0 <= token < n_vocab]
        if wrong:
            raise wrong_field(param, f"token {wrong[0]} is out of range (0 to {n_vocab - 1})")


class ServedModel(Served):
    """A model that generates text."""

    def __init__(
        self, engine: Engine, name: str, limits: Limits, *, keep_dropped: bool = False
    ) -> None:
        super().__init__(engine.model, name, limits)
        self.engine = engine
        self.keep_dropped = keep_dropped

    def close(self) -> None:
        """Free the model; requests in flight fail with a ClosedError."""
        self.engine.close()

    def grown_bytes(self) -> int:
        """Return the bytes of snapshots and archives, after the current batch."""
        archives = sum(slot.kv.bytes_archive for slot in self.engine.report())
        return self.engine.stored.bytes + archives

    @property
    def senses(self) -> dict[str, bool]:
        """Whether the model takes pictures ("sees") and sound ("hears")."""
        projector = self._model.projector
        names = ("sees", "hears")
        return {name: projector is not None and getattr(projector, name) for name in names}

    @property
    def prompt_tokens(self) -> int:
        return self.engine.usage.prompt

    @property
    def thinking(self) -> Thinking:
        if "thinking" not in self._model.chat.abilities:
            return Thinking()
        return Thinking(None if self.limits.thinks else False, self.limits.reasoning_budget)

    def terms(self, **more: Any) -> Terms:
        return Terms(wait_seconds=self.limits.wait_seconds, check=self.check, **more)

    def answers(self, body: CompletionBody | ChatBody, terms: Terms) -> Iterator[Iterable[Event]]:
        """Yield the events of each choice: `n` answers to each prompt, one after another.

        The usage counts the tokens of a prompt once.

        Raises:
            RefusedError: the prompt or the constraints do not suit the model.
            BusyError: no slot was free in time.
            ValueError: the model refuses anything else.
        """
        keep = self.keep_dropped if body.keep_dropped is None else body.keep_dropped
        terms = replace(terms, keep_dropped=keep)
        for request in self._requests(body):
            prepared = []
            for number in range(body.n):
                seed = self.engine.new_seed() if body.seed is None else body.seed + number
                sampling = replace(request.sampling, seed=seed % N_SEEDS)
                processors = self._processors(body)
                each = replace(request, sampling=sampling, logits_processors=processors)
                prepared.append((each, self._prepared(each)))
            yield from self.engine.answers(prepared, terms)

    def count_tokens(self, body: ChatBody) -> int:
        """Return the number of prompt tokens of a chat; errors as in `answers`."""
        [request] = self._requests(body)
        return len(self._prepared(request).tokens)

    def _requests(self, body: CompletionBody | ChatBody) -> list[Request]:
        """Return a request for each prompt, without a seed."""
        limit = body.limit if isinstance(body, ChatBody) else body.max_tokens
        self.check_tokens(body.stop_token_ids, "stop_token_ids")
        request = Request(
            sampling=SamplerSettings(**body.model_dump(include=set(SAMPLERS))),
            max_tokens=self._model.window if limit is None else limit,
            stop=body.stop,
            stop_tokens=frozenset(body.stop_token_ids),
            logit_bias=self._biases(body),
            keep_reasoning=body.keep_thoughts,
        )
        if isinstance(body, ChatBody):
            return [self._chat(body, request)]
        if body.echo and body.logprobs is not None:
            raise wrong_field(
                "echo", "log probabilities of a prompt are not available: omit echo or logprobs"
            )
        prompts = body.prompts(self._model)
        for number, prompt in enumerate(prompts):
            param = "prompt" if len(prompts) == 1 else f"prompt[{number}]"
            self.check_prompt(prompt, param)
            if not isinstance(prompt, str):
                self.check_tokens(prompt, param)
        request = replace(
            request, suffix=body.suffix, grammar=body.constraint, top_logprobs=body.logprobs
        )
        return [replace(request, prompt=prompt) for prompt in prompts]

    def _chat(self, body: ChatBody, request: Request) -> Request:
        has_schema = body.schema_field is not None
        return replace(
            request,
            messages=[message.for_template() for message in body.messages],
            tools=[tool.for_template() for tool in body.tools],
            tool_choice=_tool_choice(body),
            parallel_tool_calls=body.parallel_tool_calls if body.tools else None,
            continue_final_message=body.continues,
            schema=getattr(body, body.schema_field or "", None),
            grammar=None if has_schema else body.constraint,
            top_logprobs=body.top_logprobs if body.logprobs else None,
            **self._reasoning(body),
        )

    def _reasoning(self, body: ChatBody) -> dict[str, Any]:
        """Return the reasoning settings of the request, with the server's as defaults.

        Empty if the model's file has no chat template: such a model does not reason.
        """
        if not self._model.chat.handlers:
            return {}
        enabled, budget, arguments = body.reasoning()
        usual = self.thinking
        return {
            "reasoning": Thinking(
                usual.enabled if enabled is None else enabled,
                usual.budget if budget is None else budget,
            ),
            "template_arguments": arguments or None,
        }

    def _prepared(self, request: Request) -> Prompt:
        if request.messages is None:
            return prepare(self._model, request)
        try:
            prompt = prepare(self._model, request)
        except PictureError as error:
            raise wrong_field("messages", str(error)) from error
        except (MemoryError, RefusedError, GrammarError):
            raise
        except Exception as error:
            reason = one_line(without_folders(str(error)))
            if isinstance(error, SettingsError):  # its message starts with the argument
                raise wrong_field(*reason.split(": ", 1)) from error
            raise wrong_field(
                "messages", f"the model's chat template cannot render them: {reason}"
            ) from error
        self.check_prompt(prompt.tokens, "messages")
        return prompt

    def _processors(self, body: CompletionBody | ChatBody) -> list[LogitsProcessor]:
        ends = self._model.end_tokens
        processors: list[LogitsProcessor] = []
        if body.ignore_eos:
            processors.append(_Suppressed(ends, math.inf))
        if body.min_tokens:
            processors.append(_Suppressed([*ends, *body.stop_token_ids], body.min_tokens))
        return processors

    def _biases(self, body: CompletionBody | ChatBody) -> dict[int, float] | None:
        given = body.logit_bias
        if given is None:
            return None
        if body.logit_bias_type == "tokens":
            tokenize = partial(self._model.tokenize, add_bos=False, special=True)
            return {token: b for text, b in given.items() for token in tokenize(text.encode())}
        try:
            biases = {int(token): bias for token, bias in given.items()}
        except ValueError:
            raise wrong_field("logit_bias", "its keys must be token numbers") from None
        self.check_tokens(list(biases), "logit_bias")
        return biases

    @property
    def longest_prompt(self) -> int:
        """Maximum tokens of a prompt, which may exceed the window: it streams through the cache."""
        return self.limits.prompt_limit(self._model.window)

    def check_prompt(self, prompt: str | list[int], param: str) -> None:
        limit = self.longest_prompt
        n_tokens = len(prompt.encode() if isinstance(prompt, str) else prompt)
        # A text has at most one token per byte, except for BOS and pictures.
        if isinstance(prompt, str) and (n_tokens >= limit or self._model.projector is not None):
            n_tokens = len(self._model.tokenize(prompt.encode(), add_bos=False, special=True))
        if n_tokens > limit:
            raise wrong_field(
                param,
                f"the prompt has {n_tokens:,} tokens, the limit is {limit:,}: shorten it, or start "
                "the server with a higher --max-prompt-tokens",
                code="context_length_exceeded",
            )


def _tool_choice(body: ChatBody) -> Any:
    """Return a required tool by its name if it is the only one.

    Then the grammar can ask for it even if the chat template has no tools.
    """
    [*names] = (tool.function.name for tool in body.tools)
    if body.tool_choice != "required" or len(names) != 1:
        return body.tool_choice
    return {"type": "function", "function": {"name": names[0]}}


class _Suppressed:
    """Logits processor that suppresses `tokens` during the first `n_tokens` samples."""

    def __init__(self, tokens: list[int], n_tokens: float) -> None:
        self._tokens, self._left = tokens, n_tokens

    def __call__(self, _tokens: Any, logits: Any) -> Any:
        if self._left > 0:
            logits[self._tokens] = -math.inf
        self._left -= 1
        return logits
