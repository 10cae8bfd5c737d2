"""`Llama.sample` and `Llama.generate`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

import llama_cpp
from llama_cpp import Llama as StockLlama

from ..core.prefixes import keep_prefix
from ..writing.answer import sampled
from ..writing.sampler import LogitsProcessor, SamplerSettings
from ..writing.writer import Writer

if TYPE_CHECKING:
    from .llama import Llama

Method = TypeVar("Method", bound=Callable[..., Any])

_SAMPLE = inspect.signature(StockLlama.sample)
_SAME = [field.name for field in fields(SamplerSettings) if field.name in _SAMPLE.parameters]
# Settings that llama_cpp lacks.
MORE = {"repeat_last_n"} | {
    field.name for field in fields(SamplerSettings) if field.name.startswith(("dry_", "xtc_"))
}


def like(method: Any) -> Callable[[Method], Method]:
    """Give a method the signature of another one."""
    return cast(Callable[[Method], Method], functools.wraps(method, assigned=()))


def bound(method: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults, and those of `MORE`."""
    more = {name: kwargs.pop(name) for name in MORE & kwargs.keys()}
    given = inspect.signature(method).bind(*args, **kwargs)
    given.apply_defaults()
    return {**given.arguments, **more}


def sampling_of(llama: Llama, given: Mapping[str, Any], temperature: float) -> SamplerSettings:
    """Return sampler settings from llama_cpp's arguments."""
    named = {name: given[name] for name in (*_SAME, *(MORE & given.keys())) if name in given}
    last_n = {"repeat_last_n": llama.last_n_tokens_size}
    return SamplerSettings(**{**last_n, **named}, temperature=temperature, seed=llama._seed)


def processors_of(given: Mapping[str, Any]) -> list[LogitsProcessor]:
    """Return the logits processors from llama_cpp's arguments."""
    processors = given["logits_processor"]
    if processors is None:
        return []
    return [processors] if callable(processors) else [llama_cpp.LogitsProcessorList(processors)]


def writer_of(llama: Llama, given: Mapping[str, Any]) -> Writer:
    """Return a writer for arguments of `sample` or `generate`."""
    processors = processors_of(given)
    return Writer(
        llama.text,
        sampling_of(llama, given, given["temp"]),
        logits_processor=processors[0] if processors else None,
        grammar=given["grammar"],
        drafts=llama.draft_model,
    )


def generated(llama: Llama, given: Mapping[str, Any]) -> Generator[int, Sequence[int] | None, None]:
    """Yield tokens for arguments of `Llama.generate`."""
    text, tokens = llama.text, list(given["tokens"])
    with text.lock:
        writer = writer_of(llama, given)
        unread = keep_prefix(text, tokens) if given["reset"] else tokens
    yield from sampled(text, writer, unread, given["stopping_criteria"])
