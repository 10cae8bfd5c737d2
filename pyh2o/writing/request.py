"""A request to a model, the same record for every adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import LlamaGrammar

from ..core.utf8 import utf8
from .grammar import Grammar
from .sampler import LogitsProcessor, SamplerSettings
from .sampling import Sampling
from .thinking import USUAL, Thinking

# (token ids so far [n_tokens], logits [n_vocab]) -> whether the text ends, as in llama_cpp.
StoppingCriteria = Callable[[npt.NDArray[np.intc], npt.NDArray[np.single]], bool]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue, or messages of a chat to answer.

    Attributes:
        prompt: text or tokens to continue; ignored with messages.
        suffix: text after the gap to fill.
        messages: the whole history of a chat as in OpenAI's API; None for a prompt.
        tools: tools that the answer may call, as in OpenAI's API.
        tool_choice: "auto", "none", "required" or {"function": {"name": ...}}; None is "auto".
        parallel_tool_calls: whether several calls are allowed; None allows them unless a call is
            required.
        continue_final_message: whether the last message is the start of the answer.
        reasoning: whether the model reasons, and for how long.
        schema: JSON schema of the answer; None for any text.
        max_tokens: maximum tokens of the answer; 0 only reads the prompt, None for no limit.
        stop: strings that end the answer and are not part of it; empty ones are ignored.
        logits_processors: called before each sample in this order, before the bias.
        top_logprobs: number of alternatives per token with log probabilities; None for none.
        keep_reasoning: keep the reasoning in the cache, regardless of the settings.
    """

    prompt: str | Sequence[int] = ""
    suffix: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool = False
    reasoning: Thinking = USUAL
    template_arguments: Mapping[str, Any] | None = None
    schema: Any = None
    grammar: Grammar | LlamaGrammar | None = None
    sampling: Sampling = field(default_factory=SamplerSettings)
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_tokens: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    stopping_criteria: StoppingCriteria | None = None
    top_logprobs: int | None = None
    keep_reasoning: bool = False

    @property
    def stops(self) -> list[bytes]:
        """The stop strings in UTF-8."""
        return [utf8(stop) for stop in self.stop if stop]

    def processor(self, n_vocab: int) -> LogitsProcessor | None:
        """Return the processors and the bias as one processor; None if there are none."""
        steps = [*self.logits_processors]
        if self.logit_bias is not None:
            steps.append(_biasing(self.logit_bias, n_vocab))
        if len(steps) < 2:
            return steps[0] if steps else None

        def process(
            ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]
        ) -> npt.NDArray[np.single]:
            for step in steps:
                logits = step(ids, logits)
            return logits

        return process


def _biasing(bias: Mapping[int, float], n_vocab: int) -> LogitsProcessor:
    for token in bias:
        if not 0 <= token < n_vocab:
            raise ValueError(
                f"logit_bias: token {token} is out of range (0 to {n_vocab - 1}): get tokens from "
                "tokenize()"
            )
    tokens = np.array(list(bias), dtype=np.intp)
    values = np.array(list(bias.values()), dtype=np.single)

    def add_bias(
        _ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        logits[tokens] += values
        return logits

    return add_bias
