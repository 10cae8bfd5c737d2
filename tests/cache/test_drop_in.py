"""Everything that programs do with `llama_cpp.Llama`, done with `pyh2o.Llama`.

First with a budget that covers the text: all results equal the parent's. Then with texts that are
longer than the cache: the same calls work and keep their own promises.

The random model says anything, in any bytes. Where llama_cpp is right, that is where no character
takes several tokens, the two are compared; tests/openai/test_completion.py has the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFWriter
from llama_cpp import LlamaGrammar, LlamaRAMCache, LogitsProcessorList, StoppingCriteriaList
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from needed import needed
from pyh2o import Llama
from pyh2o.errors import ClosedError
from same_results import assert_equal
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import tiny_llama, tiny_parent

WINDOW = 256
# Rows for all of a text up to the window, and a cache that is smaller than the texts. The first is
# compared with the parent, and so has the parent's attention: ours rounds less.
ROOMY: dict[str, Any] = {"n_ctx": WINDOW, "hh": 0.5, "recent": 0.5, "attention": "ops"}
SMALL: dict[str, Any] = {"n_ctx": WINDOW, "hh": 24, "recent": 24, "slack": 16}

BOS, EOS, BYTE_0 = 1, 2, 3
NO_END = {EOS: -100.0}
ONLY_ASCII = {BYTE_0 + byte: -100.0 for byte in range(128, 256)} | {BOS: -100.0}

PROMPT = "A prompt"
LONG_PROMPT = "Once upon a time there was a window. " * 12
MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
]
LONG_MESSAGES: Any = [MESSAGES[0], {"role": "user", "content": LONG_PROMPT}]

FLAG_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"flag": {"type": "boolean"}, "name": {"type": "string", "maxLength": 4}},
    "required": ["flag", "name"],
}
FUNCTION: Any = {"name": "set_flag", "parameters": FLAG_SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
TOOL_CHOICE: Any = {"type": "function", "function": {"name": "set_flag"}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf",
        seed=3,
        n_ctx_train=1024,
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="module")
def parent(path: Path) -> Iterator[llama_cpp.Llama]:
    with contextlib.closing(tiny_parent(path, n_ctx=WINDOW, logits_all=True)) as model:
        yield model


@pytest.fixture(scope="module")
def roomy(path: Path) -> Iterator[Llama]:
    with tiny_llama(path, logits_all=True, **ROOMY) as model:
        yield model


@pytest.fixture(scope="module")
def small(path: Path) -> Iterator[Llama]:
    with tiny_llama(path, logits_all=True, **SMALL) as model:
        yield model


def only_letters(_ids: Any, scores: Any) -> Any:
    scores[:260] = -1e9
    return scores


def until(n_tokens: int) -> StoppingCriteriaList:
    """Stops when the text has so many tokens."""
    return StoppingCriteriaList([lambda ids, _: len(ids) >= n_tokens])


# ---------------------------------------------------------------------------------------------
# Completions and chats: the same requests to the parent, and with a long text to a small cache
# ---------------------------------------------------------------------------------------------

COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.4},
    "mirostat": {"mirostat_mode": 2},
    "stop string": {"stop": "a"},
    "stop strings": {"stop": ["xyz", "b", "ad"]},
    "log probabilities": {"logprobs": 3},
    "echo": {"echo": True},
    "grammar": {"grammar": LlamaGrammar.from_string('root ::= ("yes" | "no")+', verbose=False)},
    "logits processor": {
        "logits_processor": LogitsProcessorList([only_letters]),
        "logit_bias": None,
    },
    "stopping criteria": {"stopping_criteria": until(1000)},
    "name": {"model": "a name"},
}

CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stop": ["a", "b"]},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "JSON": {"response_format": {"type": "json_object"}, "max_tokens": 60},
    "JSON of a schema": {
        "response_format": {"type": "json_object", "schema": FLAG_SCHEMA},
        "max_tokens": 120,
    },
    "tool": {"tools": [TOOL], "tool_choice": TOOL_CHOICE, "max_tokens": 120},
    "function": {
        "functions": [FUNCTION],
        "function_call": {"name": "set_flag"},
        "max_tokens": 120,
    },
    "tools to choose from": {"tools": [TOOL], "tool_choice": "auto"},
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("case", COMPLETIONS)
def test_completions_equal_the_parent_s(
    parent: llama_cpp.Llama, roomy: Llama, case: str, stream: bool
) -> None:
    expected, actual = (complete(llm, PROMPT, case, stream) for llm in (parent, roomy))
    assert_equal(expected, actual)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("case", CHATS)
def test_chats_equal_the_parent_s(
    parent: llama_cpp.Llama, roomy: Llama, case: str, stream: bool
) -> None:
    expected, actual = (chat(llm, MESSAGES, case, stream) for llm in (parent, roomy))
    assert_equal(expected, actual)


@pytest.mark.parametrize("case", COMPLETIONS)
def test_completions_of_texts_longer_than_the_cache(small: Llama, case: str) -> None:
    result = complete(small, LONG_PROMPT, case)
    assert_evicted(small)
    n_prompt = len(small.tokenize(LONG_PROMPT.encode()))
    assert_usage(result["usage"], n_prompt, most=40)
    choice = result["choices"][0]
    assert choice["finish_reason"] in ("stop", "length")
    text = choice["text"]
    if case == "echo":
        assert text.startswith(LONG_PROMPT)
        text = text[len(LONG_PROMPT) :]
    if case == "grammar":
        assert text.startswith(("yes", "no", "y", "n"))
    assert_equal(result, complete(small, LONG_PROMPT, case))

    chunks = complete(small, LONG_PROMPT, case, stream=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize("case", CHATS)
def test_chats_longer_than_the_cache(small: Llama, case: str) -> None:
    result = chat(small, LONG_MESSAGES, case)
    assert_evicted(small)
    assert result["usage"]["prompt_tokens"] > small.kv.capacity
    assert_usage(result["usage"], result["usage"]["prompt_tokens"], most=120)
    message = result["choices"][0]["message"]
    assert_equal(result, chat(small, LONG_MESSAGES, case))

    chunks = chat(small, LONG_MESSAGES, case, stream=True)
    if case in ("tool", "function"):
        call = message["tool_calls"][0]["function"]
        assert call["name"] == "set_flag"
        assert_follows_schema(call["arguments"])
        streamed = [
            call["function"]["arguments"]
            for chunk in chunks
            for call in chunk["choices"][0]["delta"].get("tool_calls") or []
        ]
        assert "".join(streamed) == call["arguments"]
    else:
        contents = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert "".join(contents) == message["content"]
        assert chunks[-1]["choices"][0]["finish_reason"] == result["choices"][0]["finish_reason"]
    if case == "JSON of a schema":
        assert_follows_schema(message["content"])


def complete(llm: llama_cpp.Llama, given: Any, case: str, stream: bool = False) -> Any:
    """A completion from scratch; the chunks of a stream as a list."""
    llm.reset()
    arguments = {"max_tokens": 40, "seed": 11, "logit_bias": ONLY_ASCII, **COMPLETIONS[case]}
    result = llm.create_completion(given, stream=stream, **arguments)
    return list(result) if stream else result


def chat(llm: llama_cpp.Llama, messages: Any, case: str, stream: bool = False) -> Any:
    """A chat completion from scratch; the chunks of a stream as a list."""
    llm.reset()
    arguments = {"max_tokens": 40, "seed": 12, "logit_bias": ONLY_ASCII, **CHATS[case]}
    result = llm.create_chat_completion(messages, stream=stream, **arguments)
    return list(result) if stream else result


def assert_evicted(llm: Llama) -> None:
    assert llm.n_tokens > llm.kv.capacity
    assert llm.kv.used <= llm.kv.capacity


def assert_usage(usage: dict[str, int], n_prompt: int, most: int) -> None:
    assert usage["prompt_tokens"] == n_prompt
    assert 0 < usage["completion_tokens"] <= most
    assert usage["total_tokens"] == n_prompt + usage["completion_tokens"]


def assert_follows_schema(content: str) -> None:
    answer = json.loads(content)
    assert isinstance(answer["flag"], bool)
    assert isinstance(answer["name"], str)


# ---------------------------------------------------------------------------------------------
# The other methods: each with both models, and with a long text in a small cache
# ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("method", METHODS)
def test_methods_with_texts_longer_than_the_cache(
    path: Path, method: Callable[[llama_cpp.Llama, str], Any]
) -> None:
    """The results are the same each time."""
    results = []
    for _ in range(2):
        with tiny_llama(path, logits_all=True, **SMALL) as llm:
            results.append(method(llm, LONG_PROMPT))
            assert llm.kv.used <= llm.kv.capacity
    assert_equal(*results)


def test_a_suffix_is_appended(small: Llama) -> None:
    """llama_cpp fills the gap before it with token 0, where a model has no tokens for that."""
    arguments = {"max_tokens": 5, "seed": 1, "logit_bias": NO_END}
    small.reset()
    plain = small(LONG_PROMPT, **arguments)["choices"][0]["text"]
    small.reset()
    assert small(LONG_PROMPT, suffix=" The end.", **arguments)["choices"][0]["text"] == (
        plain + " The end."
    )


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_schema_in_openai_s_words(small: Llama, stream: bool) -> None:
    """llama_cpp takes no notice of it."""
    formats = [
        {"type": "json_object", "schema": FLAG_SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "flag", "schema": FLAG_SCHEMA}},
    ]
    answers = []
    for response_format in formats:
        small.reset()
        answer = small.create_chat_completion(
            LONG_MESSAGES, response_format=response_format, max_tokens=120, stream=stream, seed=3
        )
        answers.append(list(answer) if stream else answer)
    assert_equal(*answers)
    if not stream:
        assert_follows_schema(answers[1]["choices"][0]["message"]["content"])


def test_a_schema_that_is_not_there(small: Llama) -> None:
    with pytest.raises(ValueError, match="no schema"):
        small.create_chat_completion(MESSAGES, response_format={"type": "json_schema"})


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_an_ending_openai_s_classes_do_not_know(tmp_path: Path, stream: bool) -> None:
    needed("openai")
    path = write_tiny_gguf(
        tmp_path / "ending.gguf",
        seed=1,
        n_ctx_train=300,
        chat_template=CHAT_TEMPLATE,
        arch_variant="learned_positions",
    )
    with tiny_llama(path, **SMALL) as llm:
        arguments: dict[str, Any] = {"messages": MESSAGES, "logit_bias": NO_END, "stream": stream}
        plain = llm.create_chat_completion(**arguments)
        last = list(plain)[-1] if stream else plain
        assert last["choices"][0]["finish_reason"] == "trained_context"
        result = llm.create_chat_completion_openai_v1(**arguments)
        last = list(result)[-1] if stream else result
        assert last.choices[0].finish_reason == "length"


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


@pytest.mark.parametrize("n_tokens", [5, 20, 60])
def test_the_same_call_twice_gives_the_same_answer(path: Path, n_tokens: int) -> None:
    """Although rows were evicted after the prompt, by what the first answer paid attention to."""
    with tiny_llama(path, **SMALL) as llm:
        for length in range(200, 220):
            prompt = llm.tokenize(LONG_PROMPT.encode())[:length]
            arguments = {"max_tokens": n_tokens, "temperature": 0.0, "logit_bias": NO_END}
            first, second = (llm.create_completion(prompt, **arguments) for _ in range(2))
            assert_equal(first, second)


def test_another_seed_gives_another_text(small: Llama) -> None:
    small.reset()
    texts = {small(LONG_PROMPT, seed=seed)["choices"][0]["text"] for seed in range(5)}
    assert len(texts) == 5


def test_embeddings_equal_the_parent_s(path: Path) -> None:
    settings: dict[str, Any] = {"n_ctx": WINDOW, "embedding": True}
    texts = ["once upon a time", "a prompt", LONG_PROMPT]
    results = []
    for llm in (tiny_parent(path, **settings), tiny_llama(path, **settings)):
        with contextlib.closing(llm):
            embedded = [llm.embed(texts), llm.embed(texts[0], normalize=True)]
            results.append([*embedded, llm.create_embedding(texts[:2], model="name")])
    assert_equal(*results)


# ---------------------------------------------------------------------------------------------
# Speculative decoding
# ---------------------------------------------------------------------------------------------


def greedy(llm: llama_cpp.Llama, prompt: Sequence[int], n_tokens: int) -> list[int]:
    return list(itertools.islice(llm.generate(prompt, temp=0.0), n_tokens))


def test_drafts_change_no_token(path: Path) -> None:
    prompt = [BOS, *[30, 31, 32, 33, 34] * 10]
    drafts = LlamaPromptLookupDecoding(num_pred_tokens=10)
    texts = []
    for llm in (
        tiny_parent(path, n_ctx=WINDOW),
        tiny_parent(path, n_ctx=WINDOW, draft_model=drafts),
        tiny_llama(path, draft_model=drafts, **ROOMY),
    ):
        with contextlib.closing(llm):
            texts.append(greedy(llm, prompt, 150))
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("counts", [{}, {"recent": 4}, {"recent": 4, "slack": 1}], ids=str)
def test_drafts_change_no_token_until_rows_are_evicted(path: Path, counts: dict[str, int]) -> None:
    """From then on wrong drafts have a say, too: their attention stays in the scores.

    They can always be taken back, because no compaction comes amid them.
    """
    settings = {**SMALL, **counts}
    prompt = [BOS, *[30, 31, 32, 33, 34] * 8]
    drafts = LlamaPromptLookupDecoding(num_pred_tokens=10)
    with (
        tiny_llama(path, **settings) as plain,
        tiny_llama(path, draft_model=drafts, **settings) as drafting,
    ):
        expected, actual = (greedy(llm, prompt, 150) for llm in (plain, drafting))
        n_same = plain.kv.capacity - len(prompt)
        assert actual[:n_same] == expected[:n_same]
        assert drafting.kv.compactions == plain.kv.compactions > 0
        assert drafting.kv.used <= drafting.kv.capacity
        assert drafting.input_ids[len(prompt) : len(prompt) + 149].tolist() == actual[:149]
        if settings["slack"] == 1:
            assert actual == expected


def test_drafts_are_taken(path: Path) -> None:
    """Several tokens are evaluated at once where they repeat the text."""
    evaluated: list[int] = []
    drafts = LlamaPromptLookupDecoding(num_pred_tokens=10)
    with tiny_llama(path, draft_model=drafts, **{**SMALL, "slack": 80}) as llm:
        prompt = llm.tokenize(b"yes no yes no ")
        grammar = LlamaGrammar.from_string('root ::= ("yes no ")+', verbose=False)
        llm.prompt_progress = lambda done, _total: evaluated.append(done)
        tokens = list(itertools.islice(llm.generate(prompt, temp=0.0, grammar=grammar), 200))
        assert llm.detokenize(tokens) == (b"yes no " * 200)[: len(llm.detokenize(tokens))]
        assert max(evaluated[1:]) == 11
        assert llm.kv.compactions > 0
        assert len(evaluated) < 50
        assert llm.draft_model is not None
        llm.draft_model = None
        assert len(greedy(llm, prompt, 5)) == 5


# ---------------------------------------------------------------------------------------------
# LoRA
# ---------------------------------------------------------------------------------------------


def write_lora(path: Path) -> Path:
    """A random adapter of rank 4 for the queries and the feed-forward layers of a tiny model."""
    rng = np.random.default_rng(8)
    writer = GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    for name, n_out, n_in in (("attn_q", 128, 128), ("ffn_up", 192, 128)):
        for layer in range(3):
            tensor = f"blk.{layer}.{name}.weight"
            down, up = rng.standard_normal((4, n_in)), rng.standard_normal((n_out, 4))
            writer.add_tensor(f"{tensor}.lora_a", (down / np.sqrt(n_in)).astype(np.float32))
            writer.add_tensor(f"{tensor}.lora_b", up.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_lora_adapter_equals_the_parent_s(
    path: Path, parent: llama_cpp.Llama, tmp_path: Path
) -> None:
    lora = {"lora_path": str(write_lora(tmp_path / "lora.gguf")), "lora_scale": 0.5}
    stock = tiny_parent(path, n_ctx=WINDOW, logits_all=True, **lora)
    with contextlib.closing(stock), tiny_llama(path, logits_all=True, **ROOMY, **lora) as ours:
        results = [complete(llm, PROMPT, "log probabilities") for llm in (stock, ours)]
    assert_equal(*results)
    plain = complete(parent, PROMPT, "log probabilities")
    assert results[0]["choices"][0]["text"] != plain["choices"][0]["text"]


def test_a_lora_adapter_with_a_text_longer_than_the_cache(
    path: Path, small: Llama, tmp_path: Path
) -> None:
    lora = write_lora(tmp_path / "lora.gguf")
    with tiny_llama(path, logits_all=True, lora_path=str(lora), **SMALL) as llm:
        result = complete(llm, LONG_PROMPT, "greedy")
        assert_evicted(llm)
    assert result["choices"] != complete(small, LONG_PROMPT, "greedy")["choices"]


# ---------------------------------------------------------------------------------------------
# Making, copying and ending a model
# ---------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------
# The prompt cache
# ---------------------------------------------------------------------------------------------


def reading(llm: Llama) -> list[int]:
    """Collects how many tokens are read for each prompt from now on."""
    counts: list[int] = []

    def count(done: int, total: int) -> None:
        if done == total:
            counts.append(total)

    llm.prompt_progress = count
    return counts


ANSWER: dict[str, Any] = {"max_tokens": 10, "temperature": 0.0, "logit_bias": NO_END}


@pytest.mark.parametrize("settings", [ROOMY, SMALL], ids=["roomy", "small"])
def test_the_prompt_cache_spares_reading_a_text_again(path: Path, settings: dict[str, Any]) -> None:
    """An answer from a loaded state is the one from the text that was never left."""
    with tiny_llama(path, **settings) as llm, tiny_llama(path, **settings) as unspoilt:
        first = llm.tokenize(LONG_PROMPT.encode())[:200]
        llm.set_cache(LlamaRAMCache())
        for each in (llm, unspoilt):
            each.create_completion(first, **ANSWER)
        llm.create_completion([BOS, *range(30, 80)], **ANSWER)
        longer = [*unspoilt.input_ids[: unspoilt.n_tokens].tolist(), 40, 41, 42]
        counts = reading(llm)
        assert_equal(
            unspoilt.create_completion(longer, **ANSWER), llm.create_completion(longer, **ANSWER)
        )
        assert counts == [3]


def test_a_cached_state_whose_rows_are_evicted_is_not_used(path: Path) -> None:
    """Where the prompt leaves the text of the state, rows are missing: it is read anew."""
    with tiny_llama(path, **SMALL) as llm, tiny_llama(path, **SMALL) as fresh:
        text = llm.tokenize(LONG_PROMPT.encode())[:200]
        llm.set_cache(LlamaRAMCache())
        llm.create_completion(text, **ANSWER)
        llm.create_completion([BOS, *range(30, 80)], **ANSWER)
        branch = [*text[:100], *range(90, 190)]
        counts = reading(llm)
        assert_equal(
            fresh.create_completion(branch, **ANSWER), llm.create_completion(branch, **ANSWER)
        )
        assert sum(counts) == 200


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (SMALL, {**SMALL, "recent": 20}),
        (SMALL, {**SMALL, "evict": False}),
        ({**SMALL, "evict": False}, SMALL),
    ],
    ids=["other counts", "full from small", "small from full"],
)
@pytest.mark.parametrize("logits_all", [False, True])
def test_a_cached_state_of_other_settings_is_not_used(
    path: Path, saved: dict[str, Any], loaded: dict[str, Any], logits_all: bool
) -> None:
    """Caches may be shared by models that do not fit each other."""
    cache = LlamaRAMCache()
    with tiny_llama(path, logits_all=logits_all, **saved) as llm:
        text = llm.tokenize(LONG_PROMPT.encode())[:200]
        llm.set_cache(cache)
        llm.create_completion(text, **ANSWER)
    with (
        tiny_llama(path, logits_all=logits_all, **loaded) as llm,
        tiny_llama(path, logits_all=logits_all, **loaded) as fresh,
    ):
        llm.set_cache(cache)
        with pytest.warns(RuntimeWarning, match="a state in the prompt cache is left"):
            actual = llm.create_completion(text, **ANSWER)
        assert_equal(fresh.create_completion(text, **ANSWER), actual)
        more = [*text, *range(30, 60)]
        assert_equal(fresh.create_completion(more, **ANSWER), llm.create_completion(more, **ANSWER))
