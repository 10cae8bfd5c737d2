"""Making, copying and ending a model."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drop_in_cases import (
    FLAG_SCHEMA,
    LONG_PROMPT,
    MESSAGES,
    PROMPT,
    ROOMY,
    SMALL,
    WINDOW,
    complete,
)
from needed import needed
from pyh2o import Llama
from same_results import assert_equal
from tiny_llama import tiny_llama
from tiny_tokens import ONLY_ASCII


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


def chat_by_a_grammar(llm: Llama) -> None:
    form = {"type": "json_object", "schema": FLAG_SCHEMA}
    llm.create_chat_completion(MESSAGES, response_format=form, max_tokens=4)


USES: dict[str, Callable[[Llama], object]] = {
    "nothing": lambda llm: None,
    "a bias": lambda llm: llm(PROMPT, max_tokens=2, logit_bias=ONLY_ASCII),
    "a stream that is left": lambda llm: next(llm(PROMPT, max_tokens=9, stream=True)),
    "a grammar": chat_by_a_grammar,
    "a state": lambda llm: (llm(PROMPT, max_tokens=2), llm.load_state(llm.save_state())),
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
@pytest.mark.parametrize("settings", [SMALL, {"n_ctx": WINDOW, "evict": False}], ids=str)
def test_a_model_s_memory_is_freed_with_its_last_reference(
    path: Path, settings: dict[str, Any], use: Callable[[Llama], object]
) -> None:
    """As in llama_cpp: or a program that loads the next one would have both in memory."""
    llm = tiny_llama(path, load_progress=lambda share: None, **settings)
    gone = weakref.ref(llm)
    gc.disable()
    try:
        use(llm)
        del llm
        assert gone() is None
    finally:
        gc.enable()


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
        assert (llm.kv.heavy, llm.kv.recent, llm.kv.slack) == (18, 24, 16)
