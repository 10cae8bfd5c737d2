"""A KV cache fits the model and the settings that it was made with, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyh2o.sessions.identity import difference, model_identity, settings_identity
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=1)


def settings_of(llm: Any) -> dict[str, Any]:
    """Return the settings of a model as JSON has them."""
    settings: dict[str, Any] = json.loads(json.dumps(settings_identity(llm.text.model)))
    return settings


def test_the_same_model_and_settings_fit(model: Path, tmp_path: Path) -> None:
    settings = {"n_ctx": 100, "rope_freq_scale": 0.3, "yarn_attn_factor": 0.7}
    llm = tiny_llama(model, **settings)
    # the name does not matter, nor do batches
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    other = tiny_llama(copy, n_batch=32, **settings)
    assert difference(settings_of(llm), other.text.model) == ""
    assert model_identity(llm.text.model).is_same(model_identity(other.text.model))
    copy.unlink()
    assert model_identity(other.text.model).path == str(copy)
    third = tiny_llama(write_tiny_gguf(tmp_path / "tiny.gguf", seed=2), n_ctx=100)
    assert not model_identity(llm.text.model).is_same(model_identity(third.text.model))


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ({"n_ctx": 200}, "with --ctx 100, and the model is loaded with --ctx 200"),
        ({"n_ctx": 100, "hh": 20}, "with --hh 10, and the model is loaded with --hh 20"),
        ({"n_ctx": 100, "recent": 9}, "with --recent 10, and the model is loaded with --recent 9"),
        ({"n_ctx": 100, "pinned": 1}, "with --pinned 0, and the model is loaded with --pinned 1"),
        ({"n_ctx": 100, "policy": "snap"}, "--policy h2o, and the model is loaded with --policy s"),
        ({"n_ctx": 100, "evict": False}, "with eviction, and the model is loaded with --no-evict"),
        ({"n_ctx": 100, "type_k": 8, "type_v": 8}, "--kv-type f16, and the model is loaded with"),
        ({"n_ctx": 100, "flash_attn": False}, "flash_attn"),
        ({"n_ctx": 100, "rope_freq_base": 5000.0}, "rope_freq_base"),
    ],
)
def test_other_settings_are_named(model: Path, mine: dict[str, Any], message: str) -> None:
    saved = settings_of(tiny_llama(model, n_ctx=100))
    assert message in difference(saved, tiny_llama(model, **mine).text.model)


def test_settings_of_other_versions_are_named(model: Path) -> None:
    llm = tiny_llama(model, n_ctx=100)
    saved = settings_of(llm)
    del saved["recall"]
    assert difference(saved, llm.text.model).startswith("without --recall, and the model is loaded")
    saved = settings_of(llm) | {"positions": "original"}
    assert difference(saved, llm.text.model).startswith("with positions original, and")
