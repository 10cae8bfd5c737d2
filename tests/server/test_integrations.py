"""Libraries that use `llama_cpp.Llama`, with `pyh2o.Llama` in its place.

They make the model themselves, so a program sets `llama_cpp.Llama = pyh2o.Llama` before it imports
them. The texts are longer than the cache; with llama_cpp's class all of this fails. A prompt that
is in the cache already is not read again, which is not exact where rows have been evicted since;
`reset()` makes results repeatable.
"""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from needed import needed
from pyh2o import Llama
from tiny_gguf import CHAT_TEMPLATE
from tiny_llama import ONE_THREAD, tiny_llama

WINDOW = 256
POLICY = "h2o-far:near=8"
COUNTS: dict[str, Any] = {"hh": 24, "recent": 24, "slack": 16, "policy": POLICY, "recall": 0}
LONG_PROMPT = "Once upon a time there was a window. " * 12


MODEL: dict[str, Any] = {"seed": 6, "n_ctx_train": 1024, "chat_template": CHAT_TEMPLATE}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_socket: socket.socket, address: Any) -> None:
        raise AssertionError(f"a test wants to connect to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours in the place of llama_cpp's class, for libraries that are imported from here on."""
    monkeypatch.setattr(llama_cpp, "Llama", Llama)


def library(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """A module that was not imported before, or skip the test."""
    for loaded in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    needed(name.partition(".")[0], install="'.[integrations]'")
    return importlib.import_module(name)


def assert_evicting(llm: Any) -> None:
    assert type(llm) is Llama
    assert llm.n_tokens > WINDOW > llm.kv.capacity
    assert llm.kv.used <= llm.kv.capacity


@pytest.fixture
def direct(path: Path) -> Iterator[Llama]:
    """The model that the libraries make, made by ourselves."""
    with tiny_llama(path, n_ctx=WINDOW, n_batch=8, **COUNTS) as llm:
        yield llm


LANGCHAIN: dict[str, Any] = {
    "n_ctx": WINDOW,
    "n_threads": 1,
    "max_tokens": 30,
    "temperature": 0.0,
    "verbose": False,
    "model_kwargs": {**COUNTS, "n_threads_batch": 1},
}


@pytest.mark.parametrize("streaming", [False, True])
def test_langchain_s_llm(
    path: Path, direct: Llama, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    llms = library(monkeypatch, "langchain_community.llms")
    llm = llms.LlamaCpp(model_path=str(path), streaming=streaming, **LANGCHAIN)
    expected = direct(LONG_PROMPT, max_tokens=30, temperature=0.0, repeat_penalty=1.1)
    text = expected["choices"][0]["text"]
    assert llm.invoke(LONG_PROMPT) == text
    assert_evicting(llm.client)
    llm.client.reset()
    assert "".join(llm.stream(LONG_PROMPT)) == text
    llm.client.reset()
    assert llm.invoke(LONG_PROMPT, stop=[text[3:5]]) == text.partition(text[3:5])[0]
    assert llm.get_num_tokens(LONG_PROMPT) == expected["usage"]["prompt_tokens"]


def test_llama_index(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = library(monkeypatch, "llama_index.llms.llama_cpp")
    core = library(monkeypatch, "llama_index.core.llms")
    llm = module.LlamaCPP(
        model_path=str(path),
        temperature=0.0,
        max_new_tokens=30,
        context_window=WINDOW,
        model_kwargs={**COUNTS, **ONE_THREAD},
        messages_to_prompt=lambda messages: "".join(f"{each.content}\n" for each in messages),
        completion_to_prompt=lambda prompt: prompt,
        verbose=False,
    )
    assert llm.metadata.context_window == WINDOW
    text = llm.complete(LONG_PROMPT).text
    assert_evicting(llm._model)
    with tiny_llama(path, n_ctx=WINDOW, **COUNTS) as direct:
        answer = direct(LONG_PROMPT, max_tokens=30, temperature=0.0)
        assert text == answer["choices"][0]["text"]
    llm._model.reset()
    assert "".join(chunk.delta for chunk in llm.stream_complete(LONG_PROMPT)) == text
    message = core.ChatMessage(role="user", content=LONG_PROMPT)
    llm._model.reset()
    spoken = llm.chat([message]).message.content
    llm._model.reset()
    assert [*llm.stream_chat([message])][-1].message.content == spoken
