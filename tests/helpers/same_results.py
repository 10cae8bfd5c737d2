"""Compares results of `pyh2o.Llama` with those of `llama_cpp.Llama`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

# Logits differ in the last bits if eviction is on: it has other nodes in the graph.
ROUNDING = 1e-4


def assert_equal(expected: Any, actual: Any) -> None:
    """Equal, but for the name and time of a response and the last bits of its numbers."""
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
