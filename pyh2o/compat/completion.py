"""`Llama.create_completion`.

It replaces `llama_cpp.Llama._create_completion`, which detokenizes the whole completion again for
every token and ends at `n_ctx`. Results have the same format and mostly the same contents. These
are different:

* `max_tokens` is exact. llama_cpp may exceed it to complete a character, and counts the BOS token
  of an empty prompt as generated.
* The chunks of a stream, joined, equal the text without streaming. llama_cpp loses characters of
  several tokens, and one invalid byte drops the rest of the stream.
* The text ends at its first stop string, in any order of the list. Empty stop strings are ignored.
* Tokens of more than 32 bytes have text.
* `suffix` uses the model's fill-in-the-middle tokens; without them it is appended to the text.
  llama_cpp replaces missing ones by token 0.
* `logit_bias` and `logits_processor` can be combined. llama_cpp ignores both then.
* Stopping criteria are called once per token.
* Log probabilities are Python floats, `text_offset` counts characters, and a chunk of several
  tokens has an entry for each. Each token has its own name (see `logprobs`). llama_cpp gives the
  tokens of one character the same name and drops all but one.
* `echo` of a prompt of tokens returns their text.
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
    # llama_cpp's range of seeds, for the same answers as llama_cpp
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
    """Yield the chunks of a stream, or the one result, for arguments of `create_completion`.

    A stream has neither echo nor suffix.
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
            # nothing predicts the first token
            records = [replace(first, logprob=None, top=None), *others]
            choice["logprobs"] = _joined(completion_logprobs(records), choice["logprobs"])
    yield results.result([choice], usage_json(results.usage, with_details=False))


def answered(llama: AnyLlama, answer: Answer, *, with_logits: bool = False) -> Iterator[Event]:
    """Yield the events of an answer; load and save states in llama_cpp's cache.

    `with_logits` evaluates the prompt again unless the logits of all its tokens are available.
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


def _check_echo(llama: AnyLlama, prompt: Prompt) -> None:
    if not llama.text.keeps_logits:
        raise ValueError(
            "logprobs of a prompt (echo) need a model created with logits_all=True: omit echo, or "
            "create the model so"
        )
    if min(prompt.tokens) < 0:
        raise ValueError("a prompt with pictures has no logprobs: omit echo")


def _prompt_records(llama: AnyLlama, tokens: list[int], top: int) -> list[TokenLogprobs]:
    model, logits = llama.text.model, llama.text.all_logits
    recorder = LogprobRecorder(model, detokenizer(model, [], starts_text=False), top, 0)
    for position, token in enumerate(tokens):
        recorder.record(token, logits[max(position - 1, 0)])
    return recorder.take()


def _joined(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    return {name: [*first[name], *then[name]] for name in first}


def _load_state(llama: AnyLlama, prompt: list[int]) -> None:
    """Load a cached state if it has a longer prefix of the prompt than the KV cache.

    The prompt is still read again if rows were evicted that it needs.
    """
    try:
        state = llama.cache[prompt]
    except KeyError:
        return
    n_cached = n_common(state.input_ids[: state.n_tokens], prompt)
    if n_cached <= n_common(llama.text.tokens, prompt):
        return
    try:
        llama.load_state(state)
    except (RuntimeError, ValueError) as error:
        # Different models and settings can share a cache, even on disk.
        warnings.warn(
            f"cannot use a state of the prompt cache: {error}", RuntimeWarning, stacklevel=2
        )
        llama.reset()
