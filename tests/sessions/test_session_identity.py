"""A session fits the model and the settings that it was made with, and no others."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pyh2o.errors import SessionError
from pyh2o.sessions.headers import (
    SessionHeader,
    model_identity,
    settings_identity,
)
from pyh2o.sessions.records import record_of
from pyh2o.writing.sampling import Sampling
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=1)


def header_of(llm: Any) -> SessionHeader:
    """What a session says that was made with it, as JSON has it."""
    model = llm.text.model
    header = SessionHeader(
        model=model_identity(model),
        settings=settings_identity(model),
        sampling=Sampling(),
        cached=0,
        pins=(),
    )
    return record_of(SessionHeader, json.loads(json.dumps(asdict(header))))


def test_the_same_model_and_settings_fit(model: Path, tmp_path: Path) -> None:
    settings = {"n_ctx": 100, "rope_freq_scale": 0.3, "yarn_attn_factor": 0.7}
    made = header_of(tiny_llama(model, **settings))
    made.check_made_with(tiny_llama(model, **settings).text.model)
    # the name does not matter, nor do batches
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    made.check_made_with(tiny_llama(copy, n_batch=32, **settings).text.model)


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ({"n_ctx": 200}, "made with --ctx 100, and the model is loaded with --ctx 200"),
        ({"n_ctx": 100, "hh": 20}, "made with --hh 10, and the model is loaded with --hh 20"),
        ({"n_ctx": 100, "recent": 9}, "--recent 10, and the model is loaded with --recent 9"),
        ({"n_ctx": 100, "pinned": 1}, "--pinned 0"),
        ({"n_ctx": 100, "slack": 5}, "--slack 5"),
        ({"n_ctx": 100, "policy": "snap"}, "made with --policy h2o, .* with --policy snap"),
        ({"n_ctx": 100, "evict": False}, "made with eviction, .* loaded with --no-evict"),
        ({"n_ctx": 100, "type_k": 8, "type_v": 8}, "--kv-type f16, .* --kv-type q8_0"),
        ({"n_ctx": 100, "flash_attn": False}, "flash_attn"),
        ({"n_ctx": 100, "rope_freq_base": 5000.0}, "rope_freq_base"),
    ],
)
def test_other_settings_are_refused(model: Path, mine: dict[str, Any], message: str) -> None:
    made = header_of(tiny_llama(model, n_ctx=100))
    with pytest.raises(SessionError, match=message) as error:
        made.check_made_with(tiny_llama(model, **mine).text.model)
    assert "start a new session" in str(error.value)


def test_another_model_of_the_same_name_is_refused(model: Path, tmp_path: Path) -> None:
    made = header_of(tiny_llama(model, n_ctx=100))
    other = write_tiny_gguf(tmp_path / "tiny.gguf", seed=2)
    with pytest.raises(SessionError, match=r"made with the model tiny\.gguf") as error:
        made.check_made_with(tiny_llama(other, n_ctx=100).text.model)
    assert "\n" not in str(error.value)


def test_a_model_file_that_is_gone_is_known_all_the_same(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "gone.gguf"
    copy.write_bytes(model.read_bytes())
    llm = tiny_llama(copy)
    copy.unlink()
    assert model_identity(llm.text.model).path == str(copy)
    assert model_identity(llm.text.model).is_same(model_identity(tiny_llama(model).text.model))


def test_a_header_without_a_setting_is_refused(model: Path) -> None:
    llm = tiny_llama(model, n_ctx=100)
    header = header_of(llm)
    del header.settings["recall"]
    with pytest.raises(SessionError, match=r"made without --recall, .* with --recall"):
        header.check_made_with(llm.text.model)


def test_a_setting_of_an_earlier_version_is_refused_by_name(model: Path) -> None:
    llm = tiny_llama(model, n_ctx=100)
    header = header_of(llm)
    header.settings["positions"] = "original"
    with pytest.raises(SessionError, match=r"with positions original, .* without positions"):
        header.check_made_with(llm.text.model)
