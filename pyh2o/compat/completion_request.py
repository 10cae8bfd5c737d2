"""What a completion is asked for: the arguments of llama_cpp."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import LlamaGrammar, LogitsProcessorList, StoppingCriteriaList

from ..core.drawn import NotedText
from ..core.utf8 import utf8
from ..system.integers import whole_number
from ..writing.chat_guide import ChatGuide
from ..writing.grammar import Grammar
from ..writing.sampler import LogitsProcessor
from .drawing import MORE


@dataclass(frozen=True)
class CompletionRequest:
    """The arguments of `llama_cpp.Llama._create_completion`, named as there.

    Attributes:
        samplers: those that llama_cpp lacks, by their names in `Draws`.
        stop_tokens: tokens that end the text and are not part of it.
        reads_only: only read the prompt; llama_cpp takes a `max_tokens` of 0 for no limit.
        shown: control tokens whose text is part of the completion.
        on_noted: called with the text that was noted at the end, if it was.
    """

    prompt: str | Sequence[int]
    suffix: str | None = None
    max_tokens: int | None = 16
    temperature: float = 0.8
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    logprobs: int | None = None
    echo: bool = False
    stop: str | Sequence[str] | None = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_penalty: float = 1.0
    top_k: int = 40
    stream: bool = False
    seed: int | None = None
    tfs_z: float = 1.0
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    model: str | None = None
    stopping_criteria: StoppingCriteriaList | None = None
    logits_processor: LogitsProcessorList | None = None
    grammar: Grammar | LlamaGrammar | ChatGuide | None = None
    logit_bias: Mapping[int, float] | None = None
    samplers: Mapping[str, Any] = field(default_factory=dict)
    stop_tokens: frozenset[int] = frozenset()
    reads_only: bool = False
    shown: frozenset[int] = frozenset()
    on_noted: Callable[[NotedText], None] | None = None

    @classmethod
    def of(cls, *args: Any, samplers: Mapping[str, Any] = {}, **kwargs: Any) -> CompletionRequest:
        """The request of these arguments, with those of samplers by their own names."""
        own = {name: kwargs.pop(name) for name in MORE & kwargs.keys()}
        return replace(cls(*args, **kwargs), samplers={**samplers, **own})

    @property
    def stops(self) -> list[bytes]:
        """The stop strings. An empty one is none: chat templates without an end sign give it.

        Raises:
            TextError: one is not Unicode.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [utf8(stop) for stop in stops if stop]

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate, or None for as many as the model likes."""
        if self.reads_only:
            return 0
        limit = 0 if self.max_tokens is None else whole_number("max_tokens", self.max_tokens)
        return limit if limit > 0 else None


def as_json_object(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Turn the response format "json_schema" into llama_cpp's "json_object" with a schema.

    OpenAI's clients send the schema as {"type": "json_schema", "json_schema": {"schema": ...}},
    which llama_cpp takes no notice of: the answer would be any text. Other types stay as they are.

    Raises:
        ValueError: the type is "json_schema" and there is no schema.
    """
    if response_format is None or response_format.get("type") != "json_schema":
        return response_format
    schema = (response_format.get("json_schema") or {}).get("schema")
    if schema is None:
        raise ValueError(
            'response_format has the type "json_schema" but no schema: put it at '
            'response_format["json_schema"]["schema"]'
        )
    return {"type": "json_object", "schema": schema}


def logits_processors(request: CompletionRequest, n_vocab: int) -> LogitsProcessorList | None:
    """The user's processors, then the logit bias."""
    if request.logit_bias is None:
        return request.logits_processor
    bias = {int(token): float(value) for token, value in request.logit_bias.items()}
    return LogitsProcessorList([*(request.logits_processor or []), _bias_processor(bias, n_vocab)])


def _bias_processor(bias: Mapping[int, float], n_vocab: int) -> LogitsProcessor:
    for token in bias:
        if not 0 <= token < n_vocab:
            raise ValueError(
                f"logit_bias names token {token}, but the model has tokens 0 to {n_vocab - 1}: "
                "take the numbers from tokenize()"
            )
    tokens = np.array(list(bias), dtype=np.intp)
    values = np.array(list(bias.values()), dtype=np.single)

    def add_bias(
        input_ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        scores[tokens] += values
        return scores

    return add_bias
