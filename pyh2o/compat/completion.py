"""Text completion whose work per token does not grow with the text.

It stands in for `llama_cpp.Llama._create_completion`, which decodes the whole completion again for
every token and ends at `n_ctx`. Results have the same shapes and, where that function is right, the
same contents. These differ:

* `max_tokens` is exact. There, a completion could run on to finish a character, and an empty prompt
  counted its BOS token as generated text.
* The chunks of a stream, joined, are the text of the plain result. There, text held back lost its
  characters of several tokens, and one invalid byte silenced the rest of the stream.
* The text ends at the first stop string in it, whichever is first in the list. An empty one is
  none.
* Tokens of more than 32 bytes have text.
* `suffix` uses the model's own fill-in-the-middle tokens; without such tokens it is appended to the
  text. There, token 0 stood for each of them.
* `logit_bias` and `logits_processor` work together. There, both were dropped.
* Stopping criteria end a completion when they end the generation; they are not asked once more.
* Log probabilities are Python floats, `text_offset` counts characters, and a chunk that took
  several tokens has an entry for each. Tokens have names of their own (see `logprobs`). There,
  those of parts of a character had the same one, and all but one were lost.
* The echo of a prompt of tokens is their text.
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_types import CompletionUsage, CreateCompletionResponse

from ..core.beginnings import keep_prefix, n_common
from ..core.detokenizer import detokenizer
from ..core.drawn import is_text
from ..errors import SettingsError
from ..writing.finish import FINISH_LENGTH, FINISH_STOP
from ..writing.generation import Generation
from ..writing.pieces import Piece, TextPieces
from ..writing.prompt import check_prompt, infill_tokens, prompt_text, prompt_tokens
from ..writing.thoughts import forgets_thoughts, thoughts_of
from .completion_request import CompletionRequest, logits_processors
from .logprobs import LogprobRecorder, TokenLogprobs, completion_logprobs

if TYPE_CHECKING:
    from ..core.model import Model
    from .llama import Llama


# Arguments of `generate` that have the same names in a request.
_SAMPLING = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "tfs_z",
    "mirostat_mode",
    "mirostat_tau",
    "mirostat_eta",
    "frequency_penalty",
    "presence_penalty",
    "repeat_penalty",
)


def complete(
    llama: Llama,
    request: CompletionRequest,
    *,
    tokens: list[int] | None = None,
    n_cached: int | None = None,
    n_dropped: int | None = None,
    keep_thoughts: bool = False,
) -> Iterator[CreateCompletionResponse]:
    """Complete a prompt: yields the chunks of a stream, or the one result.

    A stream carries new text only: neither an echo nor a suffix to append is in it.

    Args:
        llama: the text that the prompt takes the place of.
        request: what to complete, and how.
        tokens: of the prompt, as `completion_tokens` gave them; None to cut it here.
        n_cached: how many of them are in the cache already, if that is to be told. The chunks of a
            stream have the number of tokens used so far then, and the last one the stop string
            that ended it ("stop_reason"), which llama_cpp's have not.
        n_dropped: how many of them are of the text, but not of what was sent; None if that was not
            asked for (`Terms.keep_dropped`).
        keep_thoughts: leave those of the answer in the cache, whatever the settings say.

    Raises:
        ContextLimitError: the prompt leaves no position to generate at.
        ValueError: the prompt has no token, its log probabilities are asked for and the model
            keeps none, or it has a picture; or a logit bias for a token that is not in the
            vocabulary.
    """
    text, model = llama.text, llama.text.model
    if tokens is None:
        tokens = completion_tokens(model, request.prompt, request.suffix)
    check_prompt(text, tokens)
    if request.logprobs is not None and request.echo and not text.keeps_logits:
        raise ValueError(
            "logprobs of a prompt (echo) are not kept for models created with logits_all=False: "
            "leave echo out, or create this one with logits_all=True"
        )
    if request.logprobs is not None and request.echo and min(tokens) < 0:
        raise ValueError("pictures have no logprobs, and so has no prompt with one: leave echo out")
    if llama.cache is not None:
        _load_state(llama, tokens)
    if (
        request.echo
        and request.logprobs is not None
        and (not text.has_all_logits or text.forgotten)
    ):
        text.reset()  # the prompt is read for its log probabilities
    _set_seed(llama, request.seed)

    room = None if text.evicting else text.position_limit - len(tokens)
    completion = Completion(llama, request, tokens, room, n_cached, n_dropped, keep_thoughts)
    if request.stream:
        yield from completion.chunks()
    else:
        result = completion.result()
    if llama.cache is not None:
        llama.cache[[*completion.prompt, *completion.drawn]] = llama.save_state()
    if not request.stream:
        yield result


def completion_tokens(model: Model, prompt: str | Sequence[int], suffix: str | None) -> list[int]:
    """The tokens of a prompt, those that were drawn for as much of it as the model has written."""
    tokens = prompt_tokens(model, prompt, suffix)
    return model.drawn.as_drawn(model, tokens) if is_text(prompt, suffix) else tokens


# ---------------------------------------------------------------------------------------------
# Generating
# ---------------------------------------------------------------------------------------------


class Completion:
    """The tokens that follow a prompt, their text and their log probabilities.

    Attributes:
        generation: the text as it comes.
        prompt, drawn: tokens, of which those are not that the text has forgotten.
        finish_reason: known when `pieces` has ended.
        logprobs: of the tokens, if they are asked for.
    """

    def __init__(
        self,
        llama: Llama,
        request: CompletionRequest,
        prompt: list[int],
        room: int | None,
        n_cached: int | None,
        n_dropped: int | None,
        keep_thoughts: bool,
    ) -> None:
        """`room` is the number of tokens to end at; None leaves it to `generate`."""
        self.llama, self.request, self.prompt = llama, request, prompt
        self._n_prompt = len(prompt)
        self._forgets = forgets_thoughts(llama.text.model) and not keep_thoughts
        self.finish_reason = ""
        self._id, self._created = f"cmpl-{uuid.uuid4()}", int(time.time())
        self._n_cached, self._n_dropped = n_cached, n_dropped
        self._is_stopped = False  # by the stopping criteria
        model = self._model = llama.text.model
        starts_text = len(request.prompt) == 0
        self.logprobs: LogprobRecorder | None = None
        if request.logprobs is not None:
            parts = detokenizer(model, prompt, starts_text=starts_text)
            offset = len(prompt_text(model, request.prompt))
            self.logprobs = LogprobRecorder(model, parts, request.logprobs, offset)
        stop_tokens = request.stop_tokens
        self._is_end: Callable[[int], bool] = lambda token: (
            model.is_end(token) or token in stop_tokens
        )
        limits = [limit for limit in (request.token_limit, room) if limit is not None]
        self.drawn: list[int] = []
        self.generation = Generation(
            self.drawn,
            detokenizer(model, prompt, starts_text=starts_text, shown=request.shown),
            TextPieces(request.stops),
            is_end=self._is_end,
            limit=min(limits, default=None),
        )

    def pieces(self) -> Iterator[Piece]:
        """Generate to the end, yielding text as soon as no stop string can begin in it."""
        if self.llama.verbose:
            self.llama._ctx.reset_timings()
        try:
            for pieces in self.generation.run(self._generate()):
                yield from pieces
            if self.generation.finish == FINISH_STOP and self._forgets:
                self._forget_thoughts()
        finally:  # a stream may be left at any token
            if self.drawn and is_text(self.request.prompt, self.request.suffix):
                is_asked = self._n_dropped is not None
                noted = self._model.drawn.note(self.prompt, self.drawn, keep_dropped=is_asked)
                if self.request.on_noted is not None:
                    self.request.on_noted(noted)
        at_end = FINISH_STOP if self._is_stopped else FINISH_LENGTH
        self.finish_reason = self.generation.finish or at_end
        if self.llama.verbose:
            self.llama._ctx.print_timings()
        yield from self.generation.end()

    def _forget_thoughts(self) -> None:
        """Do without the thoughts of the answer, which the next prompt will not have."""
        text, n_prompt = self.llama.text, len(self.prompt)
        at = text.remembered
        if len(at) <= n_prompt:
            return
        answer = int(at[n_prompt])
        found = thoughts_of(self._model, text.tokens, answer, text.n_tokens)
        if found is None or found[1] == text.n_tokens:
            return
        with contextlib.suppress(SettingsError):  # they are among the first tokens that are pinned
            text.forget([found])
            start, end = (place - answer + n_prompt for place in found)
            whole = [*self.prompt, *self.drawn]
            self.prompt, self.drawn = whole[: min(start, n_prompt)], whole[n_prompt:start]
            self.drawn += whole[end:]

    def _generate(self) -> Iterator[int]:
        request, text, n_tokens = self.request, self.llama.text, len(self.prompt)
        if request.reads_only:
            with text.guard:
                text.read(keep_prefix(text, self.prompt))
            return
        for token in self.llama.generate(
            self.prompt,
            temp=request.temperature,
            stopping_criteria=request.stopping_criteria and self._is_to_stop,
            logits_processor=logits_processors(request, self._model.n_vocab),
            grammar=request.grammar,
            **{name: getattr(request, name) for name in _SAMPLING},
            **request.samplers,
        ):
            if self.logprobs is not None and not self._is_end(token):
                # The token that predicts a position is the one before it. With drafts, which need
                # all logits, that may not be the last one that was evaluated.
                of_all, n_gone = text.keeps_logits, sum(b - a for a, b in text.forgotten)
                logits = text.all_logits[n_gone + n_tokens - 1] if of_all else text.logits[-1]
                self.logprobs.record(token, logits)
            n_tokens += 1
            yield token

    def _is_to_stop(self, input_ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]) -> bool:
        assert self.request.stopping_criteria is not None
        self._is_stopped = bool(self.request.stopping_criteria(input_ids, logits))
        return self._is_stopped

    def chunks(self) -> Iterator[CreateCompletionResponse]:
        """One chunk for each piece of text, and an empty one with the finish reason."""
        for piece in self.pieces():
            records = self.logprobs.take(piece.tokens) if self.logprobs else None
            yield self._response(piece.text, records, None)
        last: Any = self._response("", None, self.finish_reason)
        if self._n_cached is not None:
            stop = self.generation.stop
            found = [each.decode() for each in self.request.stops if stop.startswith(each)]
            last["choices"][0]["stop_reason"] = found[0] if found else None
        yield last

    def result(self) -> CreateCompletionResponse:
        """The whole text, with the suffix unless the model fills gaps, and the tokens used."""
        request = self.request
        text = "".join(piece.text for piece in self.pieces())
        if request.suffix is not None and infill_tokens(self._model) is None:
            text += request.suffix
        if request.echo:
            text = prompt_text(self._model, request.prompt) + text
        response = self._response(text, self._all_records(), self.finish_reason)
        response["usage"] = self._usage()
        return response

    def _response(
        self, text: str, records: list[TokenLogprobs] | None, finish_reason: str | None
    ) -> CreateCompletionResponse:
        model = self.request.model
        response: CreateCompletionResponse = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self.llama.model_path if model is None else model,
            "choices": [
                {
                    "text": text,
                    "index": 0,
                    "logprobs": None if records is None else completion_logprobs(records),
                    # llama_cpp's type knows the first two reasons only.
                    "finish_reason": cast(Any, finish_reason),
                }
            ],
        }
        if self._n_cached is not None:
            response["usage"] = self._usage()
        return response

    def _usage(self) -> CompletionUsage:
        n_prompt = self._n_prompt - (self._n_dropped or 0)
        n_completion = len(self.generation.tokens)
        usage: Any = {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_completion,
            "total_tokens": n_prompt + n_completion,
        }
        if self._n_cached is not None:
            details = {"cached_tokens": self._n_cached, "dropped_tokens": self._n_dropped or 0}
            usage["prompt_tokens_details"] = details
        return cast(CompletionUsage, usage)

    def _all_records(self) -> list[TokenLogprobs] | None:
        """Those of every token generated, and with an echo of the prompt's tokens before them."""
        if self.logprobs is None:
            return None
        records = self.logprobs.take()
        if not self.request.echo:
            return records
        first, *others = self._prompt_records() + records
        # Nothing comes before the first token, to predict it.
        return [replace(first, logprob=None, top=None), *others]

    def _prompt_records(self) -> list[TokenLogprobs]:
        model, logits = self._model, self.llama.text.all_logits
        parts = detokenizer(model, [], starts_text=False)
        recorder = LogprobRecorder(model, parts, self.request.logprobs or 0, 0)
        for position, token in enumerate(self.prompt):
            recorder.record(token, logits[max(position - 1, 0)])
        return recorder.take()


# ---------------------------------------------------------------------------------------------
# Random numbers and the prompt cache
# ---------------------------------------------------------------------------------------------


def _set_seed(llama: Llama, seed: int | None) -> None:
    """Set the seed; without one, draw it from the model's last, so that runs can be repeated."""
    # The same range as in llama_cpp gives the same answers as there.
    llama.set_seed(random.Random(llama._seed).randint(0, 2**32) if seed is None else seed)


def _load_state(llama: Llama, prompt: list[int]) -> None:
    """Load the state that spares more of the prompt than what is in the KV cache, if any does.

    `generate` goes on from it. If rows were evicted that the prompt needs, where it leaves the text
    of the state, `generate` reads the prompt anew.
    """
    assert llama.cache is not None
    try:
        state = llama.cache[prompt]
    except KeyError:
        return
    spared = n_common(state.input_ids[: state.n_tokens], prompt)
    if spared <= n_common(llama.text.tokens, prompt):
        return
    try:
        llama.load_state(state)
    except (RuntimeError, ValueError) as error:
        # Caches can be shared, on disk even, by models and settings that differ.
        warnings.warn(f"a state in the prompt cache is left: {error}", RuntimeWarning, stacklevel=2)
        llama.reset()
