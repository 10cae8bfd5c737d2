"""Log probabilities of tokens that are parts of characters, or that have the same text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyh2o import Llama
from pyh2o.writing.logprobs import LogprobRecorder, completion_logprobs
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import tiny_llama
from tiny_tokens import BOS, BYTE_0, EOS

MESSAGES: Any = [{"role": "user", "content": "Hello?"}]


@pytest.fixture(params=[None, "chatml"], ids=["the file's template", "llama_cpp's"])
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> Llama:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, chat_template=CHAT_TEMPLATE)
    return tiny_llama(path, n_ctx=128, chat_format=request.param)


def likeliest(llm: Llama, n: int) -> list[tuple[str, list[int]]]:
    """Names and bytes of the tokens that the text most likely goes on with."""
    order = np.argsort(llm.text.logits[-1], kind="stable")[::-1][:n].tolist()
    found = [llm.detokenize([token], special=True) for token in order]
    escaped = ["bytes:" + "".join(f"\\x{byte:02x}" for byte in data) for data in found]
    is_part = [max(data) > 127 for data in found]
    names = [e if p else data.decode() for e, p, data in zip(escaped, is_part, found, strict=True)]
    return [(name, [*data]) for name, data in zip(names, found, strict=True)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n_top", [None, 0, 1, 8])
def test_parts_of_characters_are_told_apart(llm: Llama, n_top: int | None, stream: bool) -> None:
    """All had the text "" before, and of five one was left."""
    asked: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
    choice = llm.create_completion("A", logprobs=n_top or 0, **asked)["choices"][0]
    expected = likeliest(llm, 8)
    names = [name for name, _ in expected]
    assert sum(name.startswith("bytes:") for name in names) > 2
    assert choice["logprobs"]["tokens"] == names[:1]
    assert [[*top] for top in choice["logprobs"]["top_logprobs"]] == [names[: n_top or 1]]

    result = llm.create_chat_completion(
        MESSAGES, logprobs=True, top_logprobs=n_top, stream=stream, **asked
    )
    chunks = list(result) if stream else [result]
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    [token] = [token for each in found if each for token in each["content"]]
    expected = likeliest(llm, 8)
    assert (token["token"], token["bytes"]) == expected[0]
    top = token["top_logprobs"]
    assert [(each["token"], each["bytes"]) for each in top] == expected[: n_top or 0]
    assert [each["logprob"] for each in top] == sorted((t["logprob"] for t in top), reverse=True)


def test_a_token_that_is_not_among_the_alternatives(llm: Llama) -> None:
    """A completion has it too, a chat has as many alternatives as were asked for."""
    name, token = r"bytes:\xf4", BYTE_0 + 0xF4
    asked: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "logit_bias": {token: 1000.0}}
    [top] = llm.create_completion("A", logprobs=2, **asked)["choices"][0]["logprobs"][
        "top_logprobs"
    ]
    assert [*top] == [*dict(likeliest(llm, 2)), name]
    chat = llm.create_chat_completion(MESSAGES, logprobs=True, top_logprobs=2, **asked)
    [found] = chat["choices"][0]["logprobs"]["content"]
    assert (found["token"], found["bytes"]) == (name, [0xF4])
    assert [each["token"] for each in found["top_logprobs"]] == [*dict(likeliest(llm, 2))]


def test_tokens_of_one_text_have_names_of_their_own() -> None:
    """Such as a letter and its byte; special tokens have that of the vocabulary."""
    pieces = {
        BOS: b"",
        EOS: b"",
        3: b"A",
        4: b"A",
        5: b"A",
        6: b"\xf0\x9f",
        7: "☺".encode(),
        8: b"",
    }
    parts: Any = SimpleNamespace(piece=pieces.__getitem__, feed=pieces.__getitem__)
    model: Any = SimpleNamespace(
        token_bos=lambda: BOS,
        detokenize=lambda tokens, special: b"<%d>" % tokens[0] * (tokens[0] < 3),
    )
    recorder = LogprobRecorder(model, parts, 8, 0)
    for token in (4, 6):
        recorder.record(token, np.arange(9, dtype=np.single))
    columns = completion_logprobs(recorder.take())
    assert columns["tokens"] == ["A", r"bytes:\xf0\x9f"]
    one, other = (top or {} for top in columns["top_logprobs"])
    first, last = ["token_id:8", "☺", r"bytes:\xf0\x9f"], ["token_id:3", "<2>", "<1>"]
    assert [*one] == [*first, r"bytes:\x41", "A", *last]
    assert [*other] == [*first, "A", r"bytes:\x41", *last]
    assert [*one.values()] == sorted(one.values(), reverse=True)
