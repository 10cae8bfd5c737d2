"""The model as the routes ask it: its name and its limits, and work that can be broken off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import llama_cpp
from llama_cpp import LlamaGrammar

from ...llama import Llama
from ..chat import in_openai_words
from ..limits import Limits
from .bodies import Body, ChatBody, CompletionBody
from .refusals import RefusedError, ShutdownError, one_line, without_folders
from .schemas import schema_grammar


class ServedModel:
    """A model that one request at a time may use, in any thread.

    Attributes:
        name: what clients know it by.
        limits: what a request may take.
        shutting_down: set to end an answer in the making.
    """

    def __init__(self, llama: Llama, name: str, limits: Limits) -> None:
        self.name = name
        self.limits = limits
        self.shutting_down = False
        self._llama = llama
        self._check: Callable[[], None] = _nothing
        self._on_read: Callable[[], None] = _nothing
        llama.prompt_progress = self._check_progress

    @contextmanager
    def at_work(
        self, check: Callable[[], None], on_read: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Work for one request.

        Args:
            check: called after each piece of a prompt and each token; what it raises ends the work.
                The text in the cache is whole then: it ends where the last evaluation did.
            on_read: called after each piece of a prompt.

        Raises:
            ShutdownError: the server is to end.
        """
        self._check, self._on_read = check, on_read or _nothing
        try:
            self.check()
            yield
        finally:
            self._check = self._on_read = _nothing

    def check(self) -> None:
        """Go on, or break the work off.

        Raises:
            ShutdownError: the server is to end.
            BaseException: what the request's own check raises.
        """
        if self.shutting_down:
            raise ShutdownError("the server is shutting down")
        self._check()

    def _check_progress(self, _done: int, _total: int) -> None:
        self.check()
        self._on_read()

    # ---------------------------------------------------------------------------------------------
    # Work
    # ---------------------------------------------------------------------------------------------

    def complete(self, body: CompletionBody) -> Any:
        """The result of a completion, or an iterator of its chunks.

        Raises:
            RefusedError: the prompt or the constraints do not suit the model.
            ValueError: nor does anything else of it.
        """
        asked = _AskedModel(self, self._llama, body, body.grammar)
        return asked.create_completion(
            prompt=body.prompt,
            suffix=body.suffix,
            echo=body.echo,
            logprobs=body.logprobs,
            max_tokens=body.max_tokens,
            **body.drawing(),
        )

    def chat(self, body: ChatBody) -> Any:
        """The model's answer in a chat, or an iterator of its chunks.

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
        asked = _AskedModel(self, self._llama, body, grammar)
        try:
            return Llama.create_chat_completion(
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

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text, without one that begins it."""
        return list(self._llama.tokenize(text.encode(), special=True))

    def detokenize(self, tokens: list[int]) -> str:
        """The text of tokens.

        Raises:
            RefusedError: one is not in the vocabulary.
        """
        self.check_tokens(tokens, "tokens")
        return self._llama.detokenize(tokens).decode(errors="replace")

    # ---------------------------------------------------------------------------------------------
    # Checks that need the model
    # ---------------------------------------------------------------------------------------------

    def check_tokens(self, tokens: list[int], param: str) -> None:
        """Refuse numbers that are no tokens: llama.cpp ends the program.

        Raises:
            RefusedError: one is not in the vocabulary.
        """
        n_vocab = self._llama.n_vocab()
        wrong = [token for token in tokens if not 0 <= token < n_vocab]
        if wrong:
            raise RefusedError(
                400,
                f"{param}: the model has tokens 0 to {n_vocab - 1}, and none is {wrong[0]}: take "
                "the numbers from /extras/tokenize",
                param=param,
            )

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


class _AskedModel:
    """The model for one request; what is not here is the model's own.

    llama_cpp's chat handlers call `create_completion` with the prompt they made.

    Attributes:
        has_prompt: whether it was called.
    """

    def __init__(self, served: ServedModel, llama: Llama, body: Body, grammar: str | None) -> None:
        self._served = served
        self._llama = llama
        self._body = body
        self._grammar = grammar or None
        self.has_prompt = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)

    def create_completion(self, prompt: str | list[int], **arguments: Any) -> Any:
        """A completion in OpenAI's words, that ends some time."""
        self.has_prompt = True
        served, llama, body = self._served, self._llama, self._body
        served.check_prompt(prompt, "messages" if isinstance(body, ChatBody) else "prompt")
        criteria = arguments.pop("stopping_criteria", None) or []
        arguments.update(
            model=served.name,
            max_tokens=arguments["max_tokens"] or llama.n_ctx(),
            logit_bias=served.biases(body),
            logits_processor=self._processors(),
            # A chat handler's own for a tool would be that of any JSON, where it fails to make one.
            grammar=self._grammar and LlamaGrammar.from_string(self._grammar, verbose=False),
            stopping_criteria=llama_cpp.StoppingCriteriaList([*criteria, self._check_token]),
        )
        return in_openai_words(llama.create_completion(prompt=prompt, **arguments))

    def _processors(self) -> Any:
        least = self._body.min_tokens
        if least == 0:
            return None
        processor = llama_cpp.MinTokensLogitsProcessor(least, self._llama.token_eos())
        return llama_cpp.LogitsProcessorList([processor])

    def _check_token(self, _ids: Any, _logits: Any) -> bool:
        """A criterion that stops no text of a server that goes on."""
        self._served.check()
        return False


def _nothing() -> None:
    pass
