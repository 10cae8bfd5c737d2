"""Unsupported models are refused with the reason before memory is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyh2o.core.parameters import KV_TYPES
from pyh2o.errors import ModelError, SettingsError, UnsupportedModelError
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama


@pytest.mark.parametrize(
    ("arch_variant", "reason"),
    [
        ("recurrent", "the model is recurrent"),
        ("alibi", "ALiBi"),
        ("encoder", "no causal KV cache"),
    ],
)
def test_an_unsupported_model_is_refused_with_the_reason(
    tmp_path: Path, arch_variant: str, reason: str
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, arch_variant=arch_variant)
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        tiny_llama(path)
    assert "--no-evict" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_refused_model_runs_with_the_full_cache(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, arch_variant="alibi")
    llm = tiny_llama(path, n_ctx=256, evict=False)
    llm.eval([1, 2, 3])
    assert not llm.kv.evicting


def test_unsupported_flash_attention_is_refused(tmp_path: Path) -> None:
    """llama.cpp aborts with this architecture, so flash attention is off by default."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, arch_variant="plm")
    with tiny_llama(path, hh=8, recent=8, slack=8) as llm:
        llm.eval(list(range(5, 45)))
        assert llm.kv.compactions > 0
    for settings in ({"flash_attn": True}, {"type_v": KV_TYPES["q8_0"]}):
        for evict in (True, False):
            with pytest.raises(SettingsError, match="does not support flash attention"):
                tiny_llama(path, n_ctx=256, evict=evict, **settings)


def test_a_row_that_is_not_a_whole_number_of_blocks_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, head_size=16)
    with pytest.raises((SettingsError, ModelError), match="head size"):
        tiny_llama(path, type_k=KV_TYPES["q8_0"], type_v=KV_TYPES["q8_0"])
