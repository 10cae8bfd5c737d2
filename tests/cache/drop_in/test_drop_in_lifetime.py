"""Making, copying and ending a model."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any

import pytest

from drop_in_cases import LONG_PROMPT, PROMPT, ROOMY, SMALL, complete
from needed import needed
from pyh2o import Llama
from pyh2o.errors import ClosedError
from same_results import assert_equal
from tiny_llama import tiny_llama
from tiny_tokens import BOS


def test_unknown_arguments_are_tolerated(path: Path) -> None:
    """Programs pass arguments of older versions."""
    old = {"n_parts": -1, "f16_kv": True, "low_vram": False, "n_gqa": 8}
    with tiny_llama(path, **ROOMY, **old) as llm:
        assert llm(PROMPT, max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_pickled_model_says_the_same(path: Path) -> None:
    settings = {"logits_all": True, "n_batch": 64, "last_n_tokens_size": 32, "seed": 9}
    with tiny_llama(path, **SMALL, **settings) as llm, pickle.loads(pickle.dumps(llm)) as copy:
        assert copy.__getstate__() == llm.__getstate__()
        expected, actual = (complete(each, LONG_PROMPT, "sampled") for each in (llm, copy))
        assert_equal(expected, actual)


def test_a_model_is_closed_after_with(path: Path) -> None:
    with tiny_llama(path, **ROOMY) as llm:
        llm.eval([BOS])
    with pytest.raises(ClosedError):
        llm.eval([BOS])
    with contextlib.closing(tiny_llama(path, **ROOMY)) as llm:
        llm.eval([BOS])
    with pytest.raises(ClosedError):
        llm.eval([BOS])


def test_from_pretrained(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = needed("huggingface_hub")
    asked: list[str] = []

    class FakeFiles:
        def ls(self, repo_id: str, recursive: bool) -> list[dict[str, str]]:
            assert recursive
            return [{"name": f"{repo_id}/{name}"} for name in ("README.md", "tiny.gguf")]

    def download(repo_id: str, filename: str, **_: Any) -> str:
        asked.append(f"{repo_id}/{filename}")
        return str(path)

    monkeypatch.setattr(hub, "HfFileSystem", FakeFiles)
    monkeypatch.setattr(hub, "hf_hub_download", download)
    with Llama.from_pretrained(
        "someone/tiny", "*.gguf", n_threads=1, n_threads_batch=1, verbose=False, **SMALL
    ) as llm:
        assert set(asked) == {"someone/tiny/tiny.gguf"}
        assert type(llm) is Llama
        assert (llm.kv.heavy, llm.kv.recent, llm.kv.slack) == (24, 24, 16)
