"""Compare results of `pyh2o.Llama` with those of `llama_cpp.Llama`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

# With eviction the graph has other nodes, so logits differ in the last bits.
ROUNDING = 1e-4


def assert_equal(expected: Any, actual: Any) -> None:
    """Compare responses, except for id, time and the last bits of numbers."""
    if hasattr(expected, "model_dump"):  # OpenAI's classes
        expected, actual = expected.model_dump(), actual.model_dump()
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys()
        for key in expected.keys() - {"id", "created"}:
            assert_equal(expected[key], actual[key])
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(actual)
        for one, other in zip(expected, actual, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, (float, np.floating, np.ndarray)):
        assert actual == pytest.approx(expected, abs=ROUNDING)
    else:
        assert expected == actual


def as_llama_cpp_names(result: Any) -> Any:
    """Name the tokens of log probabilities as llama_cpp does.

    It shows incomplete characters as "", keeps one of several alternatives with the same text, and
    includes the token itself among the alternatives in a chat.
    """
    if not isinstance(result, dict):
        return [as_llama_cpp_names(chunk) for chunk in result]
    for choice in result["choices"]:
        logprobs = choice["logprobs"] or {}
        if "tokens" in logprobs:
            columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
            logprobs["top_logprobs"] = [
                None if top is None else _merged({**top}, name, logprob)
                for name, logprob, top in zip(*columns, strict=True)
            ]
            logprobs["tokens"] = [_plain(name) for name in logprobs["tokens"]]
        for token in logprobs.get("content") or ():
            top = {each["token"]: each["logprob"] for each in token["top_logprobs"]}
            token["top_logprobs"] = [
                {"token": name, "bytes": None, "logprob": logprob}
                for name, logprob in _merged(top, token["token"], token["logprob"]).items()
            ]
            token.update(token=_plain(token["token"]), bytes=None)
    return result


def _merged(top: dict[str, float], name: str, logprob: float) -> dict[str, float]:
    merged = {_plain(other): each for other, each in top.items()}
    return merged | {_plain(name): logprob}


def _plain(name: str) -> str:
    if name.startswith("bytes:"):
        data = bytes.fromhex(name.removeprefix("bytes:").replace(r"\x", ""))
        return data.decode(errors="ignore")
    return "" if name in ("<unk>", "<s>", "</s>") else name
