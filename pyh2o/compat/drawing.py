"""`Llama.sample` and `Llama.generate`: llama_cpp's arguments of drawing, given to a `Writer`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

import llama_cpp
from llama_cpp import Llama as StockLlama

from ..core.beginnings import keep_prefix
from ..errors import BusyError
from ..writing.sampler import Draws
from ..writing.writer import Writer

if TYPE_CHECKING:
    from .llama import Llama

Method = TypeVar("Method", bound=Callable[..., Any])

_SAMPLE = inspect.signature(StockLlama.sample)
_SAME = [field.name for field in fields(Draws) if field.name in _SAMPLE.parameters]
# Settings of samplers that llama_cpp lacks.
MORE = {"repeat_last_n"} | {
    field.name for field in fields(Draws) if field.name.startswith(("dry_", "xtc_"))
}


def like(method: Any) -> Callable[[Method], Method]:
    """Show that a method has the arguments of this one."""
    return cast(Callable[[Method], Method], functools.wraps(method, assigned=()))


def bound(method: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a method by their names, with the defaults of the others; also MORE."""
    more = {name: kwargs.pop(name) for name in MORE & kwargs.keys()}
    given = inspect.signature(method).bind(*args, **kwargs)
    given.apply_defaults()
    return {**given.arguments, **more}


def writer_of(llama: Llama, given: Mapping[str, Any]) -> Writer:
    """What draws as these arguments of `sample` or `generate` say."""
    draws = Draws(
        **{
            "repeat_last_n": llama.last_n_tokens_size,
            **{name: given[name] for name in (*_SAME, *(MORE & given.keys()))},
        },
        temperature=given["temp"],
        seed=llama._seed,
    )
    processors = given["logits_processor"]
    if processors is not None and not callable(processors):
        processors = llama_cpp.LogitsProcessorList(processors)
    return Writer(
        llama.text,
        draws,
        logits_processor=processors,
        grammar=given["grammar"],
        drafts=llama.draft_model,
    )


def generated(llama: Llama, given: Mapping[str, Any]) -> Generator[int, Sequence[int] | None, None]:
    """The tokens that these arguments of `generate` ask for (see `Llama.generate`)."""
    text, tokens, criteria = llama.text, list(given["tokens"]), given["stopping_criteria"]
    with text.guard:
        writer = writer_of(llama, given)
        unread = keep_prefix(text, tokens) if given["reset"] else tokens
    n_text = text.n_tokens + len(unread)
    sent: Sequence[int] | None = None
    with contextlib.closing(writer.write(unread)) as writing:
        while True:
            try:
                token = writing.send(sent)
            except StopIteration:
                return
            if criteria is not None and criteria(text.record[:n_text], writer.logits):
                return
            n_tokens = text.n_tokens
            sent = yield token
            if text.n_tokens != n_tokens:
                raise BusyError(
                    "the text was changed while it was generated: let one generation end "
                    "before the model is used for anything else"
                )
            n_text += 1
