"""The models of `pyh2o chat` and `pyh2o generate`, each opened once and scripted anew by a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fake_story import FakeModel, fake_model, open_tiny
from pyh2o import Llama
from scripted_chat import ScriptedModel, open_chat_model, scripted_chat


@pytest.fixture(scope="session")
def chat_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    llm = open_chat_model(tmp_path_factory.mktemp("chat"))
    yield llm
    llm.close()


@pytest.fixture
def model(chat_llm: Llama, monkeypatch: pytest.MonkeyPatch) -> ScriptedModel:
    """What `chat` loads."""
    return scripted_chat(chat_llm, monkeypatch)


@pytest.fixture(scope="session")
def story_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    llm = open_tiny(tmp_path_factory.mktemp("story"))
    yield llm
    llm.close()


@pytest.fixture
def fake(story_llm: Llama, monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    """What `generate` loads."""
    return fake_model(story_llm, monkeypatch)
