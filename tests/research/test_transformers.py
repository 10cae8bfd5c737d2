"""Hugging Face transformers and kvpress beside this runtime."""

from __future__ import annotations

from typing import Any

import pytest

from needed import needed
from pyh2o.bench.process import Use
from pyh2o.errors import MissingPackageError
from research.speed import transformers as ours


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"torch.*pip install 'pyh2o-llm\[compare\]'"):
        ours.check_packages()
    assert not ours.has_kvpress()


def tiny_transformer() -> Any:
    transformers = needed("transformers", install="'.[compare]'")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_transformers_cache_holds_the_whole_text() -> None:
    model = ours.TransformersModel(tiny_transformer())
    model.read(range(20), last=False)
    model.read(range(20), last=True)
    model.generate(7)
    assert model.position == 41
    assert model.use() == Use(41 * 2 * 2 * 32 * 4, 41, 41)
    model.reset()
    model.generate(7)
    assert (model.position, model.use().used) == (1, 1)


def test_kvpress_drops_rows_when_the_prompt_is_read() -> None:
    needed("kvpress", install="kvpress")
    model = ours.KVPressModel(tiny_transformer(), rows=25)
    model.read(range(30), last=False)
    assert (model.position, model.use().used) == (30, 0)
    model.read(range(70), last=True)
    assert (model.position, model.use().used) == (100, 25)
    model.generate(7)
    assert (model.position, model.use().used) == (101, 26)
    model.reset()
    assert (model.position, model.use().used) == (0, 0)
