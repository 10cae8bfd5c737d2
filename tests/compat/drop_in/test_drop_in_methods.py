"""The other methods: each with both models, and with a long text in a small cache."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFWriter

from drop_in_cases import (
    LONG_PROMPT,
    MESSAGES,
    PROMPT,
    ROOMY,
    SMALL,
    WINDOW,
)
from needed import needed
from pyh2o import Llama
from pyh2o.errors import PyH2OError, StateError
from same_results import assert_equal
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama, tiny_parent
from tiny_tokens import BOS, ONLY_ASCII


def call_the_model(llm: llama_cpp.Llama, text: str) -> Any:
    return llm(text, max_tokens=10, seed=1, logit_bias=ONLY_ASCII)


def chat_in_openai_s_classes(llm: llama_cpp.Llama, text: str) -> Any:
    needed("openai")
    arguments = {"max_tokens": 10, "seed": 1, "logit_bias": ONLY_ASCII}
    messages = [{"role": "user", "content": text}]
    plain = llm.create_chat_completion_openai_v1(messages, **arguments)
    llm.reset()
    return [plain, *llm.create_chat_completion_openai_v1(messages, stream=True, **arguments)]


def tokens_and_text(llm: llama_cpp.Llama, text: str) -> Any:
    plain, special = (llm.tokenize(text.encode(), special=special) for special in (False, True))
    without_bos = llm.tokenize(text.encode(), add_bos=False)
    texts = [
        llm.detokenize(plain),
        llm.detokenize(special, special=True),
        llm.detokenize(without_bos, prev_tokens=[BOS]),
        llm.tokenizer().decode(plain),
    ]
    return [plain, special, without_bos, texts]


def eval_and_sample(llm: llama_cpp.Llama, text: str) -> Any:
    """The loop of programs that draw their own tokens."""
    llm.set_seed(5)
    llm.eval(llm.tokenize(text.encode()))
    drawn: list[int] = []
    for _ in range(10):
        drawn.append(llm.sample(temp=0.9, top_k=20))
        llm.eval([drawn[-1]])
    return [drawn, llm.n_tokens, list(llm.eval_tokens)[-5:]]


def generate_and_go_on(llm: llama_cpp.Llama, text: str) -> Any:
    """`generate` from a prompt, then on from where it is, then another text."""
    tokens = llm.tokenize(text.encode())
    llm.set_seed(6)
    first = list(itertools.islice(llm.generate(tokens, temp=0.9), 5))
    more = list(itertools.islice(llm.generate([20, 21], temp=0.9, reset=False), 5))
    other = list(itertools.islice(llm.generate([BOS, 40, 41], temp=0.9), 5))
    return [first, more, other, llm.n_tokens]


def send_to_the_generator(llm: llama_cpp.Llama, text: str) -> Any:
    generator = llm.generate(llm.tokenize(text.encode()), temp=0.0)
    drawn = [next(generator)]
    drawn.append(generator.send([30, 31, 32]))
    drawn.append(next(generator))
    return [drawn, llm.input_ids[: llm.n_tokens][-5:].tolist()]


def logits(llm: llama_cpp.Llama, text: str) -> Any:
    llm.eval(llm.tokenize(text.encode()))
    return [llm.scores[llm.n_tokens - 1], llm.eval_logits[-1]]


def sizes_and_marks(llm: llama_cpp.Llama, _text: str) -> Any:
    sizes = [llm.n_ctx(), llm.n_embd(), llm.n_vocab(), llm.context_params.n_ctx]
    marks = [llm.token_bos(), llm.token_eos(), llm.token_nl()]
    return [sizes, marks, llm.metadata["general.architecture"], llm.chat_format, llm.model_path]


def save_and_load(llm: llama_cpp.Llama, text: str) -> Any:
    """Both ways on from a saved state."""
    llm.eval(llm.tokenize(text.encode()))
    state = llm.save_state()
    ways = []
    for token in (40, 41):
        llm.load_state(state)
        llm.eval([token])
        ways.append([llm.n_tokens, llm.sample(temp=0.0), llm.scores[llm.n_tokens - 1].copy()])
    return ways


METHODS: list[Callable[[llama_cpp.Llama, str], Any]] = [
    call_the_model,
    chat_in_openai_s_classes,
    tokens_and_text,
    eval_and_sample,
    generate_and_go_on,
    send_to_the_generator,
    logits,
    sizes_and_marks,
    save_and_load,
]


@pytest.mark.parametrize("method", METHODS)
def test_methods_equal_the_parent_s(
    path: Path, method: Callable[[llama_cpp.Llama, str], Any]
) -> None:
    parent = tiny_parent(path, n_ctx=WINDOW, logits_all=True)
    with contextlib.closing(parent), tiny_llama(path, logits_all=True, **ROOMY) as ours:
        assert_equal(method(parent, PROMPT), method(ours, PROMPT))


def test_a_schema_that_is_not_there(small: Llama) -> None:
    with pytest.raises(ValueError, match="no schema"):
        small.create_chat_completion(MESSAGES, response_format={"type": "json_schema"})


def test_tokens_of_many_bytes_have_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama_cpp loses tokens of more than 32."""
    word = "abcdefghij" * 4
    real = GGUFWriter.add_token_list

    def with_a_long_token(writer: GGUFWriter, tokens: list[str]) -> None:
        real(writer, [*tokens[:-1], word])

    monkeypatch.setattr(GGUFWriter, "add_token_list", with_a_long_token)
    with tiny_llama(write_tiny_gguf(tmp_path / "long.gguf", seed=1), **SMALL) as llm:
        token = llm.n_vocab() - 1
        before, after = llm.tokenize(b"one"), llm.tokenize(b"two", add_bos=False)
        assert llm.detokenize([*before, token, *after]) == b"one" + word.encode() + b" two"
        assert llm.detokenize([BOS, token], special=True) == b"<s>" + word.encode()
        only = {"logit_bias": {token: 1000.0}, "max_tokens": 2}
        assert llm("one", **only)["choices"][0]["text"] == word * 2


@pytest.mark.parametrize("settings", [ROOMY, {"n_ctx": WINDOW, "evict": False}], ids=str)
def test_nothing_is_drawn_from_the_logits_of_another_text(
    path: Path, settings: dict[str, Any]
) -> None:
    """A state has no logits. In a new context, llama_cpp's class ends the process."""
    with tiny_llama(path, **settings) as llm, tiny_llama(path, **settings) as new:
        llm.eval([BOS, 40, 41, 42])
        state, expected = llm.save_state(), llm.sample(temp=0.0)
        llm.eval([50, 51, 52])
        llm.load_state(state)
        new.load_state(state)
        for each in (llm, new):
            for draw in (
                functools.partial(each.sample, temp=0.0),
                functools.partial(next, each.generate([], temp=0.0, reset=False)),
            ):
                with pytest.raises(StateError, match="no logits to sample from") as error:
                    draw()
                assert "\n" not in str(error.value)
            assert next(each.generate([BOS, 40, 41, 42], temp=0.0)) == expected
            each.reset()
            with pytest.raises(StateError, match="no logits to sample from"):
                each.sample()


@pytest.mark.parametrize("number", [-1, 384, 99_999])
def test_numbers_that_are_no_tokens_have_no_text(path: Path, number: int) -> None:
    """llama.cpp ends the process."""
    with tiny_llama(path, logits_all=True, **SMALL) as llm:
        for use in (
            lambda: llm.detokenize([40, number]),
            lambda: llm.create_completion([BOS, number], logprobs=1),
            lambda: llm.create_completion([BOS, number], echo=True),
            lambda: llm.create_completion([BOS, number]),
        ):
            with pytest.raises(PyH2OError, match=str(number)) as error:
                use()
            assert "\n" not in str(error.value)
        assert llm("A", max_tokens=3)["choices"]


def test_a_prompt_is_any_iterable(path: Path) -> None:
    """As in llama_cpp, whose `eval_tokens` is a deque."""
    prompt = [BOS, 40, 41]
    with tiny_llama(path, **SMALL) as llm:
        for each in (prompt, tuple(prompt), deque(prompt), iter(prompt), np.array(prompt)):
            assert list(itertools.islice(llm.generate(each, temp=0.0), 3))
            assert llm.input_ids[:3].tolist() == prompt


def test_embeddings_equal_the_parent_s(path: Path) -> None:
    settings: dict[str, Any] = {"n_ctx": WINDOW, "embedding": True}
    texts = ["once upon a time", "a prompt", LONG_PROMPT]
    results = []
    for llm in (tiny_parent(path, **settings), tiny_llama(path, evict=False, **settings)):
        with contextlib.closing(llm):
            embedded = [llm.embed(texts), llm.embed(texts[0], normalize=True)]
            results.append([*embedded, llm.create_embedding(texts[:2], model="name")])
    assert_equal(*results)


def test_no_texts_have_no_embeddings(path: Path) -> None:
    with tiny_llama(path, evict=False, n_ctx=WINDOW, embedding=True) as llm:
        assert llm.embed([]) == []
        assert llm.embed(input=[], return_count=True) == ([], 0)
        assert llm.create_embedding([])["data"] == []
        assert len(llm.embed(["once", "upon"])) == 2
    with tiny_llama(path, **SMALL) as llm, pytest.raises(RuntimeError, match="embedding=True"):
        llm.embed([])
