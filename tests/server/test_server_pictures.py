"""Pictures in requests of all dialects, for a model with a projector and for one without."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from good_bodies import CHAT
from many_texts import at_once, tiny_engine
from needed import needed
from pyh2o.engine import Engine
from tiny_pictures import write_models
from tiny_projector import N_PATCHES, png

loopback = needed("loopback", name="the server's packages")

BUDGET: dict[str, Any] = {"n_ctx": 1024, "hh": 256, "recent": 256}
QUESTION = "what do you see in that picture?"
DRAWING = {"max_tokens": 12, "seed": 3}


def in_base64(number: int) -> str:
    return base64.b64encode(png(number)).decode()


def image_url(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{in_base64(number)}"}}


def asked(number: int) -> list[dict[str, Any]]:
    """A message with a picture, as OpenAI's clients send it."""
    return [{"role": "user", "content": [image_url(number), {"type": "text", "text": QUESTION}]}]


@pytest.fixture(scope="module")
def seeing_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model, mmproj = write_models(tmp_path_factory.mktemp("seer"))
    with tiny_engine(model, mmproj=str(mmproj), texts=2, **BUDGET) as engine:
        yield engine


@pytest.fixture(scope="module")
def seeing(seeing_engine: Engine) -> Iterator[Any]:
    with loopback.LoopbackServer(seeing_engine) as running:
        yield running


def chat(server: Any, messages: list[Any], **more: Any) -> Any:
    reply = server.post(CHAT, {"messages": messages, **DRAWING, **more})
    assert reply.status == 200, reply.body
    return reply.json


def text_of(result: Any) -> str:
    text: str = result["choices"][0]["message"]["content"]
    return text


def test_a_chat_about_a_picture_is_not_read_again(seeing: Any) -> None:
    first = chat(seeing, asked(1))
    assert first["usage"]["prompt_tokens"] > N_PATCHES
    said = {"role": "assistant", "content": text_of(first)}
    again = chat(seeing, [*asked(1), said, {"role": "user", "content": "and now?"}])
    n_before = first["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= n_before
    other = chat(seeing, asked(2))
    assert other["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < N_PATCHES
    assert text_of(other) != text_of(first)


def test_answers_about_two_pictures_at_once(seeing: Any) -> None:
    alone = [text_of(chat(seeing, asked(number))) for number in (3, 4)]
    works = [lambda number=number: text_of(chat(seeing, asked(number))) for number in (3, 4)]
    assert at_once(works) == alone


def test_every_dialect_sends_the_same_picture(seeing: Any) -> None:
    told = chat(seeing, asked(5))
    answer, n_tokens = text_of(told), told["usage"]["prompt_tokens"]
    text, data = {"type": "text", "text": QUESTION}, in_base64(5)
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "image", "source": source}, text]
    drawing = {"model": "tiny", "max_tokens": 12, "seed": 3, "stream": False}
    options = {"num_predict": 12, "seed": 3}

    counted = seeing.post(
        "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": blocks}]}
    )
    assert counted.json == {"input_tokens": n_tokens}
    message = {"role": "user", "content": QUESTION, "images": [data]}
    ollama = {"model": "tiny", "stream": False, "options": options}
    reply = seeing.post("/api/chat", {**ollama, "messages": [message]})
    assert reply.json["message"]["content"] == answer
    reply = seeing.post("/api/generate", {**ollama, "prompt": QUESTION, "images": [data]})
    assert reply.json["response"] == answer
    url = f"data:image/png;base64,{data}"
    content = [
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": QUESTION},
    ]
    sent = {"input": [{"role": "user", "content": content}], "max_output_tokens": 12}
    assert seeing.post("/v1/responses", sent).json["usage"]["input_tokens"] == n_tokens
    result = {"type": "tool_result", "tool_use_id": "a", "content": blocks}
    sent = {"messages": [{"role": "user", "content": [result]}], **drawing}
    assert seeing.post("/v1/messages", sent).status == 200


def test_clients_are_told_that_it_sees(seeing: Any, server: Any) -> None:
    for each, sees in ((seeing, True), (server, False)):
        modalities = each.get("/props").json["modalities"]
        assert modalities == {"vision": sees, "audio": False}
        shown = each.post("/api/show", {"model": "tiny"}).json
        assert ("vision" in shown["capabilities"]) == sees


AUDIO = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (
            {"type": "image_url", "image_url": "https://a.example/a.png"},
            "only data: URLs are supported",
        ),
        ({"type": "image_url", "image_url": "file:///etc/passwd"}, "only data: URLs are supported"),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,??"}},
            "not valid base64",
        ),
        ({"type": "image_url"}, "unsupported part"),
        ({"type": "image_url", "image_url": "data:image/png;base64,aGVsbG8="}, "give JPEG, PNG"),
        (AUDIO, "give JPEG, PNG"),
        ({"type": "video_url", "video_url": "data:,"}, "unsupported part"),
    ],
)
def test_what_is_no_picture_is_refused(part: dict[str, Any], says: str, seeing: Any) -> None:
    reply = seeing.post(CHAT, {"messages": [{"role": "user", "content": [part]}], **DRAWING})
    assert reply.status == 400
    assert reply.error["param"].startswith("messages")
    assert says in reply.error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_without_a_projector_says_so(server: Any, stream: bool) -> None:
    bodies: dict[str, Any] = {
        CHAT: {"messages": asked(1)},
        "/api/generate": {"prompt": "a", "images": [in_base64(1)]},
    }
    for route, body in bodies.items():
        sent = {"model": "tiny", "max_tokens": 3, "stream": stream, **body}
        reply = server.post(route, sent)
        assert reply.status == 400, (route, reply.body)
        assert b"without a projector for pictures and sound: load one" in reply.body
