"""Chats of `Llama` with pictures in their messages."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_cpp.llama_chat_format import Llava15ChatHandler

from pyh2o import Llama
from pyh2o.errors import PictureError, SettingsError
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama
from tiny_pictures import mark_of, tiny_seer, write_models
from tiny_projector import png

SETTINGS: dict[str, Any] = {"n_ctx": 512, "hh": 64, "recent": 64}
# Contents in parts only, as SmolVLM's template has them.
IN_PARTS = """\
{%- for message in messages -%}
{{ message['role'] }}:
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{ part['text'] }}{%- else -%}<image>{%- endif -%}
{%- endfor %}
{% endfor -%}
{%- if add_generation_prompt -%}assistant: {%- endif -%}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_models(tmp_path_factory.mktemp("seer"))


@pytest.fixture
def seer(models: tuple[Path, Path]) -> Iterator[Llama]:
    with tiny_seer(models, **SETTINGS) as llm:
        yield llm


def asked(number: int) -> list[dict[str, Any]]:
    url = f"data:image/png;base64,{base64.b64encode(png(number)).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [{"type": "text", "text": "what is "}, image]}]


def test_a_picture_stands_where_its_part_does(seer: Llama) -> None:
    seer.create_chat_completion(asked(1), max_tokens=1)
    prompt = f"user: what is {mark_of(seer, png(1))}\nassistant: "
    expected = seer.tokenize(prompt.encode(), special=True)
    assert seer.text.tokens.tolist()[: len(expected)] in (expected, expected[1:])


def test_templates_that_know_parts_only(models: tuple[Path, Path], tmp_path: Path) -> None:
    """They get all contents so, with pictures and without."""
    model = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, chat_template=IN_PARTS)
    with tiny_seer((model, models[1]), **SETTINGS) as llm:
        llm.create_chat_completion([{"role": "user", "content": "hello"}], max_tokens=1)
        assert b"user:hello" in llm.detokenize(llm.text.tokens.tolist()).replace(b" ", b"")
        llm.create_chat_completion(asked(1), max_tokens=1)
        tokens = llm.tokenize(mark_of(llm, png(1)).encode(), add_bos=False)
        assert tokens[-1] in llm.text.tokens.tolist()


def test_an_echo_is_the_prompt(seer: Llama) -> None:
    prompt = f"see {mark_of(seer, png(1))} here"
    result = seer.create_completion(prompt, max_tokens=1, echo=True)
    assert result["choices"][0]["text"].startswith(prompt)


def test_pictures_have_no_log_probabilities(models: tuple[Path, Path]) -> None:
    with tiny_seer(models, logits_all=True, **SETTINGS) as llm:
        prompt = f"see {mark_of(llm, png(1))} here"
        assert llm.create_completion(prompt, max_tokens=2, logprobs=1)
        with pytest.raises(ValueError, match=r"pictures.*: omit echo"):
            llm.create_completion(prompt, max_tokens=2, logprobs=1, echo=True)


def test_a_copy_has_the_projector(seer: Llama) -> None:
    with pickle.loads(pickle.dumps(seer)) as copy:
        assert mark_of(copy, png(1)) == mark_of(seer, png(1))


def test_what_is_refused(seer: Llama, models: tuple[Path, Path]) -> None:
    part = {"type": "image_url", "image_url": "https://a.example/a.png"}
    with pytest.raises(PictureError, match="only data: URLs are supported"):
        seer.create_chat_completion([{"role": "user", "content": [part]}])
    with tiny_llama(models[0], **SETTINGS) as blind:
        with pytest.raises(PictureError, match=r"without a projector.*--mmproj FILE"):
            blind.create_chat_completion(asked(1))
        blind.chat_handler = Llava15ChatHandler(str(models[1]), verbose=False)
        with pytest.raises(SettingsError, match="give the projector as mmproj"):
            blind.create_chat_completion(asked(1))
