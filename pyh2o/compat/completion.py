"""`Llama.create_completion`: llama_cpp's arguments and results, over the answer to a request.

It stands in for `llama_cpp.Llama._create_completion`, which decodes the whole completion again for
every token and ends at `n_ctx`. Results have the same shapes and, where that function is right, the
same contents. These differ:

* `max_tokens` is exact. There, a completion could run on to finish a character, and an empty prompt
  counted its BOS token as generated text.
* The chunks of a stream, joined, are the text of the plain result. There, text held back lost its
  characters of several tokens, and one invalid byte silenced the rest of the stream.
* The text ends at the first stop string in it, whichever is first in the list. An empty one is
  ignored.
* Tokens of more than 32 bytes have text.
* `suffix` uses the model's own fill-in-the-middle tokens; without such tokens it is appended to the
  text. There, token 0 stood for each of them.
* `logit_bias` and `logits_processor` work together. There, both were dropped.
* Stopping criteria end a completion when they end the generation; they are not asked once more.
* Log probabilities are Python floats, `text_offset` counts characters, and a chunk that took
  several tokens has an entry for each. Each token has its own name (see `logprobs`). There, the
  tokens of one character shared a name, and all but one were lost.
* The echo of a prompt of tokens is their text.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..core.detokenizer import detokenizer
from ..core.tokens import n_common
from ..system.integers import whole_number
from ..writing.answer import Answer
from ..writing.chat_prompt import Prompt, prepare
from ..writing.events import Event
from ..writing.logprobs import LogprobRecorder, TokenLogprobs, completion_logprobs
from ..writing.prompt import infill_tokens, prompt_text
from ..writing.request import Request
from .results import Results, usage_json
from .sampling import AnyLlama, processors_of, sampling_of


def request_of(llama: AnyLlama, given: Mapping[str, Any], **more: Any) -> Request:
    """Return the request of the arguments that completions and chats of llama_cpp share."""
    seed = given["seed"]
    # llama_cpp's range: the answers are the same as there, and runs can be repeated
    llama.set_seed(random.Random(llama._seed).randint(0, 2**32) if seed is None else seed)
    limit = 0 if given["max_tokens"] is None else whole_number("max_tokens", given["max_tokens"])
    stop, bias = given["stop"] or (), given["logit_bias"]
    return Request(
        sampling=sampling_of(llama, given, given["temperature"]),
        max_tokens=limit if limit > 0 else None,
        stop=[stop] if isinstance(stop, str) else stop,
        grammar=given["grammar"],
        logits_processors=processors_of(given),
        logit_bias=None if bias is None else {int(t): float(value) for t, value in bias.items()},
        **more,
    )


def completion(llama: AnyLlama, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream, or the one result, of the arguments of `create_completion`.

    A stream carries new text only, neither an echo nor a suffix.

    Raises:
        ContextLimitError: the prompt leaves no position to generate at.
        ValueError: the prompt has no token; its log probabilities are asked for and the model keeps
            none, or it has a picture; or the bias names a token that does not exist.
    """
    text, model = llama.text, llama.text.model
    echo, top, suffix = given["echo"], given["logprobs"], given["suffix"]
    request = request_of(
        llama,
        given,
        prompt=given["prompt"],
        suffix=suffix,
        stopping_criteria=given["stopping_criteria"],
        top_logprobs=top,
    )
    prompt = prepare(model, request)
    answer = Answer(text, request, prompt, drafts=llama.draft_model)
    has_prompt_logprobs = top is not None and echo and not given["stream"]
    if top is not None and echo:
        _check_echo(llama, prompt)
    name = llama.model_path if given["model"] is None else given["model"]
    results = Results(name, is_chat=False, top_logprobs=top)
    events = answered(llama, answer, with_logits=has_prompt_logprobs)
    if given["stream"]:
        yield from results.chunks(events)
        return
    choice = results.choice(events)
    if suffix is not None and infill_tokens(model) is None:
        choice["text"] += suffix
    if echo:
        choice["text"] = prompt_text(model, request.prompt) + choice["text"]
        if has_prompt_logprobs:
            first, *others = _prompt_records(llama, prompt.tokens, top)
            # nothing comes before the first token, to predict it
            records = [replace(first, logprob=None, top=None), *others]
            choice["logprobs"] = _joined(completion_logprobs(records), choice["logprobs"])
    yield results.result([choice], usage_json(results.usage, with_details=False))


def answered(llama: AnyLlama, answer: Answer, *, with_logits: bool = False) -> Iterator[Event]:
    """Yield the events of an answer, with llama_cpp's cache of whole states around it.

    With logits the prompt is read anew, unless those of all its tokens are there.
    """
    text = llama.text
    if llama.cache is not None:
        _load_state(llama, answer.prompt_tokens)
    if with_logits and (not text.has_all_logits or text.dropped_spans):
        text.reset()
    if llama.verbose:
        llama._ctx.reset_timings()
    yield from answer
    if llama.verbose:
        llama._ctx.print_timings()
    if llama.cache is not None:
        llama.cache[[*answer.prompt_tokens, *answer.tokens]] = llama.save_state()


# -------------------------------------------------------------------------------------------------
# Log probabilities of a prompt
# -------------------------------------------------------------------------------------------------


def _check_echo(llama: AnyLlama, prompt: Prompt) -> None:
    if not llama.text.keeps_logits:
        raise ValueError(
            "logprobs of a prompt (echo) are not kept for models created with logits_all=False: "
            "leave echo out, or create this one with logits_all=True"
        )
    if min(prompt.tokens) < 0:
        raise ValueError("pictures have no logprobs, and so has no prompt with one: leave echo out")


def _prompt_records(llama: AnyLlama, tokens: list[int], top: int) -> list[TokenLogprobs]:
    model, logits = llama.text.model, llama.text.all_logits
    recorder = LogprobRecorder(model, detokenizer(model, [], starts_text=False), top, 0)
    for position, token in enumerate(tokens):
        recorder.record(token, logits[max(position - 1, 0)])
    return recorder.take()


def _joined(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    return {name: [*first[name], *then[name]] for name in first}


# -------------------------------------------------------------------------------------------------
# The prompt cache
# -------------------------------------------------------------------------------------------------


def _load_state(llama: AnyLlama, prompt: list[int]) -> None:
    """Load the state that spares more of the prompt than what is in the KV cache, if any does.

    If rows were evicted that the prompt needs, where it leaves the text of the state, the prompt is
    read anew.
    """
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
