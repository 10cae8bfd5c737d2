"""Shared by the tests of the drop-in class: two caches, texts and named completions."""

from __future__ import annotations

import json
from typing import Any

import llama_cpp
from llama_cpp import LlamaGrammar, LogitsProcessorList, StoppingCriteriaList

from pyh2o import Llama
from tiny_tokens import ONLY_ASCII, only_letters

WINDOW = 256
# Rows for the whole window, and a cache smaller than the texts. The first is compared with the
# parent class, so it uses the parent's attention: ours rounds less.
ROOMY: dict[str, Any] = {"n_ctx": WINDOW, "hh": 0.5, "recent": 0.5, "attention": "ops"}
SMALL: dict[str, Any] = {"n_ctx": WINDOW, "hh": 24, "recent": 24, "slack": 16}

PROMPT = "A prompt"
LONG_PROMPT = "Once upon a time there was a window. " * 12
MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
]
LONG_MESSAGES: Any = [MESSAGES[0], {"role": "user", "content": LONG_PROMPT}]

FLAG_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"flag": {"type": "boolean"}, "name": {"type": "string", "maxLength": 4}},
    "required": ["flag", "name"],
}


def until(n_tokens: int) -> StoppingCriteriaList:
    """Return a stopping criterion: the text has `n` tokens."""
    return StoppingCriteriaList([lambda ids, _: len(ids) >= n_tokens])


COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.4},
    "mirostat": {"mirostat_mode": 2},
    "stop string": {"stop": "a"},
    "stop strings": {"stop": ["xyz", "b", "ad"]},
    "log probabilities": {"logprobs": 3},
    "echo": {"echo": True},
    "grammar": {"grammar": LlamaGrammar.from_string('root ::= ("yes" | "no")+', verbose=False)},
    "logits processor": {
        "logits_processor": LogitsProcessorList([only_letters]),
        "logit_bias": None,
    },
    "stopping criteria": {"stopping_criteria": until(1000)},
    "name": {"model": "a name"},
}


def complete(llm: llama_cpp.Llama, given: Any, case: str, stream: bool = False) -> Any:
    """Complete from an empty text. Return the chunks of a stream as a list."""
    llm.reset()
    arguments = {"max_tokens": 40, "seed": 11, "logit_bias": ONLY_ASCII, **COMPLETIONS[case]}
    result = llm.create_completion(given, stream=stream, **arguments)
    return list(result) if stream else result


def assert_evicted(llm: Llama) -> None:
    assert llm.n_tokens > llm.kv.capacity
    assert llm.kv.used <= llm.kv.capacity


def assert_follows_schema(content: str) -> None:
    answer = json.loads(content)
    assert isinstance(answer["flag"], bool)
    assert isinstance(answer["name"], str)
