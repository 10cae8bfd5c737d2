"""Completions before a suffix."""

from __future__ import annotations

import llama_cpp
import pytest

from completions import complete, fed_tokens, text_of
from pyh2o import Llama
from pyh2o.writing import prompt
from tiny_tokens import BYTE_0


@pytest.mark.parametrize("spm_infill", [False, True])
def test_a_model_that_fills_gaps_sees_the_suffix(
    stock: llama_cpp.Llama, full: Llama, monkeypatch: pytest.MonkeyPatch, spm_infill: bool
) -> None:
    """In the order of llama_cpp, which has token 0 in the place of all three marks."""
    for model in (stock, full):
        monkeypatch.setattr(model, "spm_infill", spm_infill)
    for suffix in ("", "after"):
        monkeypatch.setattr(prompt, "infill_tokens", lambda model: (0, 0, 0))
        expected = fed_tokens(stock, monkeypatch, "before", suffix=suffix)
        if suffix:
            # It takes two tokens off to drop the sign before a suffix, but here that has four.
            at = expected.index(BYTE_0 + 0x98)
            assert expected.pop(at) == BYTE_0 + 0x98
            assert expected.pop(at) == BYTE_0 + 0xBA
        assert fed_tokens(full, monkeypatch, "before", suffix=suffix) == expected
    monkeypatch.setattr(prompt, "infill_tokens", lambda model: (5, 6, 7))
    fed = fed_tokens(full, monkeypatch, "", suffix="")
    assert fed == ([1, 6, 5, 7] if spm_infill else [1, 5, 6, 7])


def test_any_other_model_has_the_suffix_appended(
    full: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = complete(full, "before", seed=1)
    result = complete(full, "before", suffix=" after", seed=1)
    assert text_of(result) == text_of(plain) + " after"
    assert result["usage"] == plain["usage"]
    echoed = complete(full, "before", suffix=" after", seed=1, echo=True)
    assert text_of(echoed) == "before" + text_of(plain) + " after"
