"""What a model is asked to write: one record for every adapter."""

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

# (token ids so far [n_tokens], logits [n_vocab]) to whether the text ends, as in llama_cpp.
StoppingCriteria = Callable[[npt.NDArray[np.intc], npt.NDArray[np.single]], bool]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The continuation of a prompt, or the answer to the messages of a chat.

    Attributes:
        prompt: text or tokens to continue; unused with messages.
        suffix: text after a gap to fill.
        messages: the whole history of a chat as OpenAI's API has it; None for a prompt.
        tools: that the answer may call, as OpenAI's API has them.
        tool_choice: "auto", "none", "required" or {"function": {"name": ...}}; None is "auto".
        parallel_tool_calls: whether several calls are allowed; None for "auto" only.
        continue_final_message: whether the last message is the start of the answer.
        reasoning: whether the model reasons, and for how long.
        template_arguments: more variables of the chat template.
        schema: JSON schema of the answer; None for any text.
        grammar: of the answer.
        sampling: how tokens are sampled.
        max_tokens: most tokens of the answer, 0 to only read the prompt; None for no limit.
        stop: texts that end the answer and are not part of it; empty ones are ignored.
        stop_tokens: tokens that do so.
        logit_bias: added to the logits of tokens.
        logits_processors: called before each sample, in this order, before the bias.
        stopping_criteria: called before each token is accepted.
        top_logprobs: number of alternatives whose log probabilities are reported; None for none.
        keep_reasoning: leave the reasoning in the cache, whatever the settings say.
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
        """The stop texts in UTF-8.

        Raises:
            TextError: one is not Unicode.
        """
        return [utf8(stop) for stop in self.stop if stop]

    def processor(self, n_vocab: int) -> LogitsProcessor | None:
        """Return the processors and the bias as one; None without both.

        Raises:
            ValueError: the bias names a token that the model does not have.
        """
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
                f"logit_bias names token {token}, but the model has tokens 0 to {n_vocab - 1}: "
                "take the numbers from tokenize()"
            )
    tokens = np.array(list(bias), dtype=np.intp)
    values = np.array(list(bias.values()), dtype=np.single)

    def add_bias(
        _ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        logits[tokens] += values
        return logits

    return add_bias
