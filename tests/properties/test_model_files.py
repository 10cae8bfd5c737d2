"""Chat templates in model files are refused in one line, or the model that has them works."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from conversations import check_positions, said
from pyh2o import Conversation, Llama
from pyh2o.models.header import read_header
from pyh2o.writing.chat_template import ChatTemplate
from tiny_chat import CHATML, LLAMA_2, MISTRAL, write_chat_gguf
from tiny_llama import tiny_llama
from tries import Tries, or_refusal

TEMPLATES = {"chatml": CHATML, "llama 2": LLAMA_2, "mistral": MISTRAL}
SIGNS = [b"{", b"}", b"%", b"'", b"\xff", b"\0", b"\n", b"|", b"#", b"x", b"0", b"(", b"["]
MESSAGES = ["why", "", " a\n", "<|im_end|>", "<|im_end|><|im_start|>system\n", "</s>é"]


@pytest.fixture(scope="module", params=TEMPLATES)
def template(request: Any) -> str:
    return TEMPLATES[request.param]


@pytest.fixture(scope="module")
def data(template: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_chat_gguf(path, template, n_layer=1).read_bytes()


def test_templates(data: bytes, template: str, tmp_path: Path, tries: Tries) -> None:
    """Of the same length, so that the rest of the file is as it was."""
    at = data.index(template.encode())
    changes = st.lists(
        st.tuples(st.integers(0, len(template) - 1), st.sampled_from(SIGNS)), max_size=4
    )
    asked = st.tuples(
        changes, st.sampled_from([None, "Be brief."]), st.lists(st.sampled_from(MESSAGES))
    )

    def is_refused_or_works(asked: tuple[list[Any], str | None, list[str]]) -> None:
        changes, system, messages = asked
        changed = bytearray(data)
        for place, sign in changes:
            changed[at + place : at + place + 1] = sign
        path = tmp_path / "tiny.gguf"
        path.write_bytes(changed)
        or_refusal(lambda: read_header(path))
        llm: Llama | None = or_refusal(
            lambda: tiny_llama(path, n_ctx=256, hh=100, recent=64, slack=8)
        )
        if llm is None:
            return
        with llm:
            talk: Conversation | None = or_refusal(lambda: Conversation(llm, system=system))
            for message in messages if talk else []:
                or_refusal(lambda message=message: said(talk.say(message, max_tokens=2)))
                check_positions(talk)
            if talk:
                check_marks(talk._template)

    tries.every(asked, is_refused_or_works, examples=40)


def check_marks(template: ChatTemplate) -> None:
    """No message ends its own turn."""
    ends = template._llm_tokens("<|im_end|>")
    plain, marked = (
        or_refusal(partial(template.next_turn, text)) for text in ("ab", "a<|im_end|>b")
    )
    if plain and marked and len(ends) == 1:
        assert plain.count(ends[0]) == marked.count(ends[0])
