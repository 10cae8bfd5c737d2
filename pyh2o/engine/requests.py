"""Completions by an engine: the methods of `Llama`, from as many threads as one likes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from llama_cpp import StoppingCriteriaList

from ..compat.completion import complete, completion_tokens
from ..compat.completion_request import CompletionRequest
from ..compat.llama import Llama
from ..core.drawn import is_text

if TYPE_CHECKING:
    from .engine import Engine


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Terms:
    """On what terms a text gets a place.

    Attributes:
        priority: texts of a higher one come first.
        wait_seconds: longest wait for a place; None for any.
        check: called during the wait for a place, after each piece of the prompt that is read and
            after each token; what it raises ends the text.
        on_read: called after each piece of the prompt with (tokens read, tokens in all).
        keep_dropped: whether a text goes on as it is, where the prompt has its beginning and what
            came last, but not what was between, and no more is read for that than the prompt has.
            Only texts go on so that were begun so.
    """

    priority: int = 0
    wait_seconds: float | None = None
    check: Callable[[], None] = _nothing
    on_read: Callable[[int, int], None] = lambda _done, _all: None
    keep_dropped: bool = False


class Completions:
    """Completions that are made by an engine.

    llama_cpp's chat handlers call `create_completion` with the prompt that they made.
    """

    def __init__(self, engine: Engine, terms: Terms) -> None:
        self._engine = engine
        self._terms = terms
        self.model = engine.model
        self.chat_format, self.chat_handler = self.model.chat.name, self.model.chat.handler
        self._chat_handlers = self.model.chat.handlers
        self.verbose = self.model.verbose

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """As `Llama.tokenize`."""
        return self.model.tokenize(text, add_bos, special)

    def token_bos(self) -> int:
        """As `Llama.token_bos`."""
        return self.model.token_bos()

    def token_eos(self) -> int:
        """As `Llama.token_eos`."""
        return int(self.model.native.token_eos())

    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        *,
        stream: bool = False,
        keep_thoughts: bool = False,
        **arguments: Any,
    ) -> Any:
        """As `Llama.create_completion`, with `prompt_tokens_details` of the tokens used.

        Tokens of the text that the prompt lacks (`Terms.keep_dropped`) are no tokens of the prompt.
        A stream has its place until it ends or is closed, and the tokens used in its chunks.

        Raises:
            BusyError: there was no place in time.
            BaseException: what `check` of the terms raises.
            PyH2OError: as `Llama.create_completion` does.
        """
        criteria = arguments.pop("stopping_criteria", None) or []
        arguments["stopping_criteria"] = StoppingCriteriaList([*criteria, self._check_token])
        request = CompletionRequest.of(prompt, suffix, stream=stream, **arguments)
        tokens = completion_tokens(self.model, prompt, suffix)
        chunks = self._completed(request, tokens, keep_thoughts)
        if not stream:
            return next(chunks)
        # what is wrong with a request is raised by the call, not by the first chunk
        return itertools.chain([next(chunks)], chunks)

    def create_chat_completion(self, *args: Any, **arguments: Any) -> Any:
        """As `Llama.create_chat_completion`."""
        return Llama.create_chat_completion(cast(Llama, self), *args, **arguments)

    def _check_token(self, _ids: Any, _logits: Any) -> bool:
        self._terms.check()
        return False

    def _completed(
        self, request: CompletionRequest, tokens: list[int], keep_thoughts: bool
    ) -> Iterator[Any]:
        terms = self._terms

        def on_read(done: int, of_all: int) -> None:
            terms.check()
            terms.on_read(done, of_all)

        longer: list[int] = []
        if terms.keep_dropped and is_text(request.prompt, request.suffix):
            longer = self.model.drawn.with_dropped(self.model, tokens)
        with self._engine.text(
            tokens,
            longer=longer,
            n_new=request.token_limit,
            priority=terms.priority,
            wait_seconds=terms.wait_seconds,
            check=terms.check,
        ) as place:
            place.text.prompt_progress = on_read
            tokens = list(place.prompt)
            n_dropped = place.n_dropped if terms.keep_dropped else None
            n_cached = place.begin_prompt(tokens)
            yield from complete(
                place,
                request,
                tokens=tokens,
                n_cached=n_cached,
                n_dropped=n_dropped,
                keep_thoughts=keep_thoughts,
            )
