"""LangChain's client of OpenAI, with the server in OpenAI's place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from many_texts import tiny_engine
from needed import needed
from pyh2o import Llama
from pyh2o.engine import Engine
from tiny_llama import EXACT_ROWS, tiny_llama

chat_models = needed("langchain_openai", install="'.[integrations]'")
NO_END = needed("loopback", name="the server's packages").NO_END

MESSAGES = [("system", "Be brief."), ("human", "once upon a time " * 20)]
# What a text gets does not depend on the size of its batches.
EXACT: dict[str, Any] = {
    **EXACT_ROWS, "attention": "ops", "n_ctx": 256, "hh": 32, "recent": 32, "slack": 16
}  # fmt: skip
FLAG_SCHEMA = {
    "title": "set_flag",
    "description": "Sets the flag.",
    "type": "object",
    "properties": {"flag": {"type": "boolean"}},
    "required": ["flag"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    with tiny_engine(model_path, texts=3, **EXACT) as running:
        yield running


@pytest.fixture(scope="module")
def alone(model_path: Path) -> Iterator[Llama]:
    with tiny_llama(model_path, **EXACT) as model:
        yield model


@pytest.fixture
def chat(server: Any) -> Any:
    return chat_models.ChatOpenAI(
        base_url=server.address,
        api_key="any",
        model="tiny",
        temperature=0.0,
        max_tokens=20,
        max_retries=0,
        logit_bias=NO_END,
        stream_usage=True,
    )


def test_an_answer_is_the_model_s(chat: Any, alone: Llama) -> None:
    alone.reset()
    messages: Any = [
        {"role": "system", "content": MESSAGES[0][1]},
        {"role": "user", "content": MESSAGES[1][1]},
    ]
    expected = alone.create_chat_completion(
        messages, max_tokens=20, temperature=0.0, repeat_penalty=1.1, logit_bias={2: -100.0}
    )
    answer = chat.invoke(MESSAGES)
    assert answer.content == expected["choices"][0]["message"]["content"]
    assert answer.usage_metadata["total_tokens"] == expected["usage"]["total_tokens"]
    assert "cache_read" in answer.usage_metadata["input_token_details"]


def test_a_stream_is_the_plain_answer(chat: Any) -> None:
    plain = chat.invoke(MESSAGES)
    chunks = list(chat.stream(MESSAGES))
    assert "".join(chunk.content for chunk in chunks) == plain.content
    used = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert [each["output_tokens"] for each in used] == [20]


def test_a_batch_is_answered_at_once(chat: Any) -> None:
    questions = [f"what is {n} and {n}" for n in range(6)]
    plain = [chat.invoke(question).content for question in questions]
    assert [answer.content for answer in chat.batch(questions)] == plain

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(chat.ainvoke(question) for question in questions))

    assert [answer.content for answer in asyncio.run(all_of_them())] == plain


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: Any, method: str) -> None:
    chat = chat.model_copy(update={"max_tokens": 60, "logit_bias": None})
    answer = chat.with_structured_output(FLAG_SCHEMA, method=method).invoke(MESSAGES)
    assert answer in ({"flag": True}, {"flag": False})
