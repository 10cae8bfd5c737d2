"""`Llama.sample` and `Llama.generate`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeVar, cast

import llama_cpp
from llama_cpp import Llama as StockLlama

from ..core.prefixes import keep_prefix
from ..core.text import Text
from ..writing.answer import sampled
from ..writing.sampler import LogitsProcessor, SamplerSettings
from ..writing.writer import Writer

Method = TypeVar("Method", bound=Callable[..., Any])

_SAMPLE = inspect.signature(StockLlama.sample)
_SAME = [field.name for field in fields(SamplerSettings) if field.name in _SAMPLE.parameters]
# Settings that llama_cpp lacks.
MORE = {"repeat_last_n"} | {
    field.name for field in fields(SamplerSettings) if field.name.startswith(("dry_", "xtc_"))
}


class AnyLlama(Protocol):
    """A `Llama`, as far as its completions use it."""

    text: Text
    model_path: str
    verbose: bool
    cache: Any
    draft_model: Any
    last_n_tokens_size: int
    _seed: int

    @property
    def _ctx(self) -> Any: ...

    def create_completion(self, *args: Any, **kwargs: Any) -> Any: ...

    def set_seed(self, seed: int) -> None: ...

    def reset(self) -> None: ...

    def save_state(self) -> Any: ...

    def load_state(self, state: Any) -> None: ...


def like(method: Any) -> Callable[[Method], Method]:
    """Give a method the signature of another one."""
    return cast(Callable[[Method], Method], functools.wraps(method, assigned=()))


def bound(method: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults, and those of `MORE`."""
    more = {name: kwargs.pop(name) for name in MORE & kwargs.keys()}
    given = inspect.signature(method).bind(*args, **kwargs)
    given.apply_defaults()
    return {**given.arguments, **more}


def sampling_of(llama: AnyLlama, given: Mapping[str, Any], temperature: float) -> SamplerSettings:
    named = {name: given[name] for name in (*_SAME, *(MORE & given.keys())) if name in given}
    last_n = {"repeat_last_n": llama.last_n_tokens_size}
    return SamplerSettings(**{**last_n, **named}, temperature=temperature, seed=llama._seed)


def processors_of(given: Mapping[str, Any]) -> list[LogitsProcessor]:
    processors = given["logits_processor"]
    if processors is None:
        return []
    return [processors] if callable(processors) else [llama_cpp.LogitsProcessorList(processors)]


def writer_of(llama: AnyLlama, given: Mapping[str, Any]) -> Writer:
    processors = processors_of(given)
    return Writer(
        llama.text,
        sampling_of(llama, given, given["temp"]),
        logits_processor=processors[0] if processors else None,
        grammar=given["grammar"],
        drafts=llama.draft_model,
    )


def generated(
    llama: AnyLlama, given: Mapping[str, Any]
) -> Generator[int, Sequence[int] | None, None]:
    text, tokens = llama.text, list(given["tokens"])
    with text.lock:
        writer = writer_of(llama, given)
        unread = keep_prefix(text, tokens) if given["reset"] else tokens
    yield from sampled(text, writer, unread, given["stopping_criteria"])
