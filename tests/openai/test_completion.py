"""Text completion against llama_cpp's own, where that is right, and against naive programs."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp import LlamaGrammar, LlamaRAMCache, LogitsProcessorList, StoppingCriteriaList
from llama_cpp.llama_tokenizer import LlamaHFTokenizer

from pyh2o import Llama
from pyh2o.errors import ContextLimitError
from pyh2o.generation.finish import FINISH_TRAINED_CONTEXT
from pyh2o.openai.completion import CompletionRequest
from pyh2o.text import detokenizer as detokenizer_module
from pyh2o.text.prompt import InfillTokens
from same_results import assert_equal
from spacing_tokenizer import SpacingTokenizer
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

TRAINED_CONTEXT = 512
WINDOW = 256
SMALL_WINDOW = 128
# More threads than one only wait for each other in so small a model.
QUIET: dict[str, Any] = {"verbose": False, "n_threads": 1, "n_threads_batch": 1}
BOS, EOS = 1, 2
# Token of a byte in the tiny models.
BYTE_0 = 3
NO_END = {EOS: -100.0}
# llama_cpp is right where no character takes several tokens and no byte is invalid. If BOS comes
# amid a text, it streams log probabilities of the wrong tokens from there on.
ONLY_ASCII = {BYTE_0 + byte: -100.0 for byte in range(128, 256)} | {BOS: -100.0}


@pytest.fixture
def dice(rng: np.random.Generator) -> random.Random:
    return random.Random(int(rng.integers(2**32)))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(
        write_tiny_gguf(path, seed=1, n_ctx_train=TRAINED_CONTEXT, chat_template=CHAT_TEMPLATE)
    )


@pytest.fixture(scope="module")
def stock(model_path: str) -> Iterator[llama_cpp.Llama]:
    model = llama_cpp.Llama(model_path, n_ctx=WINDOW, logits_all=True, **QUIET)
    yield model
    model.close()


@pytest.fixture(scope="module")
def full(model_path: str) -> Iterator[Llama]:
    """Eviction turned off."""
    model = Llama(model_path, n_ctx=WINDOW, evict=False, logits_all=True, **QUIET)
    yield model
    model.close()


@pytest.fixture(scope="module")
def roomy(model_path: str) -> Iterator[Llama]:
    """Evicts, but from texts longer than the window only, and with llama.cpp's own rounding."""
    settings = {"n_ctx": WINDOW, "hh": 0.5, "recent": 0.5, "attention": "ops"}
    model = Llama(model_path, logits_all=True, **settings, **QUIET)
    yield model
    model.close()


@pytest.fixture(params=["full", "roomy"])
def ours(request: pytest.FixtureRequest) -> Llama:
    model: Llama = request.getfixturevalue(request.param)
    return model


@pytest.fixture
def evicting(model_path: str) -> Iterator[Llama]:
    model = Llama(model_path, n_ctx=SMALL_WINDOW, hh=0.25, recent=0.25, **QUIET)
    yield model
    model.close()


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    """Its positions are learned, so that texts end with those it was trained on."""
    path = write_tiny_gguf(
        tmp_path_factory.mktemp("ending") / "tiny.gguf",
        seed=1,
        n_ctx_train=TRAINED_CONTEXT,
        arch_variant="learned_positions",
    )
    model = Llama(str(path), n_ctx=SMALL_WINDOW, hh=0.25, recent=0.25, **QUIET)
    yield model
    model.close()


class Script:
    """A logits processor that makes the model say these tokens, and then end."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = iter([*tokens, EOS])

    def __call__(self, ids: Any, scores: Any) -> Any:
        scores[:] = -1e9
        scores[next(self.tokens, EOS)] = 0
        return scores


def says(*parts: str | int) -> dict[str, Any]:
    """Arguments to make a tiny model say this: a letter or a token for each token."""
    return {"logits_processor": LogitsProcessorList([Script(*script(*parts))]), "max_tokens": None}


def script(*parts: str | int) -> list[int]:
    """Tokens of letters, or of their bytes."""
    tokens: list[int] = []
    for part in parts:
        tokens += [part] if isinstance(part, int) else [BYTE_0 + byte for byte in part.encode()]
    return tokens


def complete(model: llama_cpp.Llama, given: str | Sequence[int], /, **arguments: Any) -> Any:
    """A completion from scratch, so that it does not depend on the tests before."""
    model.reset()
    return model.create_completion(given, **arguments)


def text_of(result: Any) -> str:
    text: str = result["choices"][0]["text"]
    return text


def streamed(model: llama_cpp.Llama, given: str | Sequence[int], /, **arguments: Any) -> list[Any]:
    return list(complete(model, given, stream=True, **arguments))


def joined(chunks: list[Any]) -> str:
    return "".join(text_of(chunk) for chunk in chunks)


def test_another_tokenizer_completes_as_llama_cpp_does(model_path: str) -> None:
    stock = llama_cpp.Llama(model_path, n_ctx=WINDOW, **QUIET)
    pieces = [stock.detokenize([token]) for token in range(stock.n_vocab())]
    tokenizer = LlamaHFTokenizer(SpacingTokenizer(pieces))
    ours = Llama(model_path, n_ctx=WINDOW, evict=False, tokenizer=tokenizer, **QUIET)
    stock.tokenizer_ = tokenizer
    words = stock._model.tokenize(b"A prompt", add_bos=True, special=False)
    # Many spaces, whose fate depends on what is before them.
    arguments = {"max_tokens": 60, "seed": 3, "logit_bias": {**ONLY_ASCII, 259: 6.0}}
    expected = complete(stock, words, **arguments)
    assert text_of(expected).count(" ") > 5
    assert_equal(expected, complete(ours, words, **arguments))
    assert joined(streamed(ours, words, **arguments)) == text_of(expected)


# ---------------------------------------------------------------------------------------------
# Equal to llama_cpp
# ---------------------------------------------------------------------------------------------


def test_a_request_has_the_parent_s_arguments() -> None:
    parent = inspect.signature(llama_cpp.Llama._create_completion).parameters.values()
    expected = {each.name: each.default for each in parent if each.name != "self"}
    fields = dataclasses.fields(CompletionRequest)
    assert [field.name for field in fields] == list(expected)
    for field in fields[1:]:
        assert field.default == (expected[field.name] if field.name != "stop" else ())


def only_letters(ids: Any, scores: Any) -> Any:
    scores[:260] = -1e9
    return scores


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "negative temperature": {"temperature": -1.0},
    "sampling options": {"top_k": 10, "top_p": 0.7, "typical_p": 0.9},
    "min p": {"top_k": 0, "top_p": 1.0, "min_p": 0.4},
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.4},
    "mirostat 1": {"mirostat_mode": 1, "mirostat_tau": 3.0},
    "mirostat 2": {"mirostat_mode": 2, "mirostat_eta": 0.2},
    "one token": {"max_tokens": 1},
    "name": {"model": "a name"},
    "echo": {"echo": True},
    "end": {"logit_bias": {**ONLY_ASCII, EOS: 6.0}, "max_tokens": None},
    "log probabilities": {"logprobs": 3},
    "own log probability": {"logprobs": 0},
    "grammar": {"grammar": LlamaGrammar.from_string('root ::= ("yes" | "no")+', verbose=False)},
    "processor": {"logits_processor": LogitsProcessorList([only_letters]), "logit_bias": None},
    "criteria": {"stopping_criteria": StoppingCriteriaList([lambda ids, _: len(ids) >= 23])},
}


# With a prompt of tokens, llama_cpp cannot echo, and takes their number for one of characters.
TOKEN_CASES = {name: case for name, case in CASES.items() if not {"echo", "logprobs"} & {*case}}


@pytest.mark.parametrize("arguments", CASES.values(), ids=list(CASES))
def test_results_equal_llama_cpp_s(
    stock: llama_cpp.Llama, ours: Llama, arguments: dict[str, Any]
) -> None:
    check_against(stock, ours, "A prompt", arguments)


@pytest.mark.parametrize("arguments", TOKEN_CASES.values(), ids=list(TOKEN_CASES))
def test_results_for_tokens_equal_llama_cpp_s(
    stock: llama_cpp.Llama, full: Llama, arguments: dict[str, Any]
) -> None:
    check_against(stock, full, [1, 40, 300, 41], arguments)


def check_against(
    stock: llama_cpp.Llama, ours: Llama, given: str | list[int], arguments: dict[str, Any]
) -> None:
    arguments = {"max_tokens": 25, "seed": 11, "logit_bias": ONLY_ASCII, **arguments}
    expected = complete(stock, given, **arguments)
    assert_equal(expected, complete(ours, given, **arguments))
    assert_equal(streamed(stock, given, **arguments), streamed(ours, given, **arguments))
    if arguments["max_tokens"] is None:
        assert expected["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("logprobs", [None, 2])
def test_stop_strings_equal_llama_cpp_s(
    stock: llama_cpp.Llama, ours: Llama, dice: random.Random, logprobs: int | None
) -> None:
    arguments: dict[str, Any] = {"max_tokens": 40, "logit_bias": {**ONLY_ASCII, **NO_END}}
    arguments |= {"seed": dice.randrange(2**32), "logprobs": logprobs}
    text = text_of(complete(stock, "A prompt", **arguments))
    start = dice.randrange(3, len(text) - 4)
    stop = text[start : start + dice.randint(1, 4)]
    # Begins to come, again and again, but never does.
    decoys = [text[at : at + 3] + "\0" for at in dice.sample(range(len(text) - 3), k=5)]
    for stops in (stop, [*decoys, stop], decoys):
        expected = complete(stock, "A prompt", stop=stops, **arguments)
        assert_equal(expected, complete(ours, "A prompt", stop=stops, **arguments))
        chunks = streamed(ours, "A prompt", stop=stops, **arguments)
        assert_equal(streamed(stock, "A prompt", stop=stops, **arguments), chunks)
        assert joined(chunks) == text_of(expected)


def test_characters_of_several_tokens_equal_llama_cpp_s(
    stock: llama_cpp.Llama, ours: Llama, dice: random.Random
) -> None:
    text = "".join(dice.choices("ab é☺\U0001f600", k=40))
    for stop in (None, "\0", "b"):
        results = [complete(model, "A", stop=stop, **says(text)) for model in (stock, ours)]
        assert_equal(*results)
        assert text_of(results[0]) == (text.partition("b")[0] if stop == "b" else text)
        assert_equal(*(streamed(model, "A", stop=stop, **says(text)) for model in (stock, ours)))


def test_answers_without_a_seed_equal_llama_cpp_s(stock: llama_cpp.Llama, ours: Llama) -> None:
    texts = []
    for model in (stock, ours):
        model.set_seed(123)
        answers = [complete(model, "A prompt", logit_bias=ONLY_ASCII) for _ in range(3)]
        texts.append([text_of(answer) for answer in answers])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_a_full_window_ends_as_in_llama_cpp(stock: llama_cpp.Llama, full: Llama) -> None:
    for max_tokens in (None, 0, -1, 10_000):
        arguments = {"max_tokens": max_tokens, "seed": 2, "logit_bias": {**ONLY_ASCII, **NO_END}}
        expected = complete(stock, "A prompt", **arguments)
        assert expected["usage"]["total_tokens"] == WINDOW
        assert expected["choices"][0]["finish_reason"] == "length"
        assert_equal(expected, complete(full, "A prompt", **arguments))


@pytest.mark.parametrize("extra", [{}, {"logprobs": True, "top_logprobs": 2}], ids=["", "logprobs"])
def test_chat_equals_llama_cpp_s(
    stock: llama_cpp.Llama, ours: Llama, extra: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": "Hello?"}]
    arguments = {"seed": 4, "max_tokens": 20, "logit_bias": ONLY_ASCII, **extra}
    answers = []
    for model in (stock, ours):
        model.reset()
        answer = model.create_chat_completion(messages, **arguments)
        model.reset()
        answers.append([answer, *model.create_chat_completion(messages, stream=True, **arguments)])
    assert_equal(*answers)


def test_log_probabilities_of_an_echo(stock: llama_cpp.Llama, ours: Llama) -> None:
    arguments = {"seed": 4, "max_tokens": 5, "logit_bias": ONLY_ASCII, "logprobs": 2, "echo": True}
    expected = complete(stock, "A prompt", **arguments)
    actual = complete(ours, "A prompt", **arguments)
    # llama_cpp counts a space before the prompt that the text does not have.
    offsets = expected["choices"][0]["logprobs"]["text_offset"]
    assert offsets[:3] == [0, 1, 2]
    expected["choices"][0]["logprobs"]["text_offset"] = [max(0, each - 1) for each in offsets]
    assert_equal(expected, actual)


@pytest.mark.parametrize("given", ["A prompt", "", "<s>A prompt", [5, 6, 7]])
@pytest.mark.filterwarnings("ignore:.*BOS:RuntimeWarning", "ignore:.*duplicate:RuntimeWarning")
def test_the_prompt_s_tokens_equal_llama_cpp_s(
    stock: llama_cpp.Llama, ours: Llama, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    fed = [fed_tokens(model, monkeypatch, given) for model in (stock, ours)]
    assert fed[0] == fed[1]


def fed_tokens(
    model: llama_cpp.Llama, monkeypatch: pytest.MonkeyPatch, given: Any, **arguments: Any
) -> list[int]:
    """The prompt that reaches `generate`."""
    fed: list[int] = []

    def fake(tokens: Sequence[int], **_: Any) -> Iterator[int]:
        fed.extend(tokens)
        yield EOS

    with monkeypatch.context() as patch:
        patch.setattr(model, "generate", fake)
        model.create_completion(given, **arguments)
    return fed


# ---------------------------------------------------------------------------------------------
# Equal to a naive program where llama_cpp is not right
# ---------------------------------------------------------------------------------------------


def naive_completion(
    model: llama_cpp.Llama, given: str, stops: Sequence[str], max_tokens: int, seed: int
) -> tuple[str, int, str]:
    """Text, number of tokens and finish reason, decoding everything again for each token."""
    model.reset()
    model.set_seed(seed)
    tokens: list[int] = []
    # The default of create_completion; that of generate is another one.
    for token in model.generate(model.tokenize(given.encode()), temp=0.8):
        if token == EOS:
            return model.detokenize(tokens).decode(errors="ignore"), len(tokens), "stop"
        tokens.append(token)
        data = model.detokenize(tokens)
        found = min((at for stop in stops if (at := data.find(stop.encode())) >= 0), default=-1)
        if found >= 0:
            return data[:found].decode(errors="ignore"), len(tokens), "stop"
        if len(tokens) == max_tokens:
            return data.decode(errors="ignore"), len(tokens), "length"
    raise AssertionError("the generator ended")


def test_broken_characters_and_stop_strings(
    stock: llama_cpp.Llama, ours: Llama, dice: random.Random
) -> None:
    """The model's text is full of bytes that are no UTF-8."""
    for _ in range(10):
        max_tokens, seed = dice.randint(1, 100), dice.randrange(2**32)
        whole, _, _ = naive_completion(stock, "A prompt", [], 100, seed)
        starts = dice.choices(range(len(whole)), k=dice.randint(0, 4)) if whole else []
        stops = [whole[start : start + dice.randint(1, 4)] for start in starts]
        text, n_tokens, reason = naive_completion(stock, "A prompt", stops, max_tokens, seed)

        arguments = {"max_tokens": max_tokens, "stop": stops, "seed": seed}
        result = complete(ours, "A prompt", **arguments)
        assert result["choices"][0]["text"] == text
        assert result["choices"][0]["finish_reason"] == reason
        assert result["usage"]["completion_tokens"] == n_tokens
        chunks = streamed(ours, "A prompt", **arguments)
        assert joined(chunks) == text
        assert chunks[-1]["choices"][0]["finish_reason"] == reason


def test_max_tokens_is_exact(ours: Llama) -> None:
    """Even inside a character, and after an empty prompt."""
    result = complete(ours, "A prompt", **says("☺☺") | {"max_tokens": 4})
    assert text_of(result) == "☺"
    assert result["usage"]["completion_tokens"] == 4
    result = complete(ours, "", **says("abcdef") | {"max_tokens": 4})
    assert text_of(result) == "abcd"
    assert result["usage"] == {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}


def test_an_empty_prompt_begins_the_text(ours: Llama) -> None:
    """The space that the tokenizer puts before a text is not part of it."""
    assert text_of(complete(ours, "", **says(" a b"))) == "a b"
    assert joined(streamed(ours, "", **says(" a b"))) == "a b"
    assert text_of(complete(ours, "A", **says(" a b"))) == " a b"


def test_the_first_stop_string_in_the_text_counts(ours: Llama) -> None:
    both = ours.tokenize(b"bc", add_bos=False)[-1]
    assert ours.detokenize([both]) == b"bc"
    result = complete(ours, "A", stop=["c", "b"], **says("a", both))
    assert text_of(result) == "a"


def test_an_empty_stop_string_is_none(ours: Llama) -> None:
    assert text_of(complete(ours, "A", stop="", **says("abc"))) == "abc"
    assert text_of(complete(ours, "A", stop=["", "c"], **says("abc"))) == "ab"


def test_stop_strings_may_be_a_tuple(ours: Llama) -> None:
    """llama_cpp takes no notice of any then."""
    assert text_of(complete(ours, "A", stop=("c", "d"), **says("abc"))) == "ab"


def test_text_held_back_is_not_lost(ours: Llama) -> None:
    arguments = {"stop": "☺☺☺", **says("a☺☺")}
    assert joined(streamed(ours, "A", **arguments)) == "a☺☺"
    arguments = {"stop": "☺!", **says("a", BYTE_0 + 0xFF, "b☺☺", BYTE_0 + 0xE2)}
    assert joined(streamed(ours, "A", **arguments)) == "ab☺☺"


def test_a_chunk_comes_with_its_token(ours: Llama) -> None:
    ours.reset()
    chunks = ours.create_completion("A prompt", stream=True, logit_bias=ONLY_ASCII, seed=1)
    next(chunks)
    assert ours.n_tokens == len(ours.tokenize(b"A prompt"))
    next(chunks)
    assert ours.n_tokens == len(ours.tokenize(b"A prompt")) + 1


def test_each_token_is_decoded_once(ours: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    real = detokenizer_module.llama_token_to_piece

    def counting(vocab: Any, token: int, *rest: Any) -> int:
        decoded.append(token)
        return int(real(vocab, token, *rest))

    monkeypatch.setattr(detokenizer_module, "llama_token_to_piece", counting)
    result = complete(ours, "A prompt", max_tokens=100, stop=["never\0"], logit_bias=NO_END)
    assert result["usage"]["completion_tokens"] == 100
    assert len(decoded) == 100


def test_log_probabilities_of_characters_of_several_tokens(ours: Llama) -> None:
    """A chunk has an entry for each of its tokens, and all chunks together those of the result."""
    text = "aébc☺"
    result = complete(ours, "Aé", logprobs=2, **says(text))
    logprobs = result["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "", "", "b", "c", "", "", ""]
    assert logprobs["text_offset"] == [2, 3, 3, 4, 5, 6, 6, 6]
    chunks = streamed(ours, "Aé", logprobs=2, **says(text))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    assert [len(part["tokens"]) for part in parts] == [1, 2, 1, 1, 3]
    assert_equal(logprobs, {key: [x for part in parts for x in part[key]] for key in logprobs})


def test_the_echo_of_tokens_is_their_text(ours: Llama) -> None:
    tokens = ours.tokenize(b"A prompt")
    result = complete(ours, tokens, max_tokens=3, echo=True, logprobs=1, logit_bias=ONLY_ASCII)
    assert text_of(result).startswith("A prompt")
    assert result["choices"][0]["logprobs"]["text_offset"][-3] == len("A prompt")


def test_logit_bias_joins_the_processors(ours: Llama) -> None:
    processors = LogitsProcessorList([only_letters])
    arguments = {"logits_processor": processors, "max_tokens": 10, "temperature": 0.0}
    only_z = {ours.tokenize(b"z", add_bos=False)[-1]: 1e9}
    assert text_of(complete(ours, "A", logit_bias=only_z, **arguments)) == "z" * 10
    still_banned = {BYTE_0 + ord("!"): 1000.0}
    assert "!" not in text_of(complete(ours, "A", logit_bias=still_banned, **arguments))
    assert processors == [only_letters]


def test_criteria_are_not_asked_after_the_end(ours: Llama) -> None:
    """A criterion that is met later, such as a time, must not undo a stop string."""
    asked: list[int] = []

    def fourth_time(ids: Any, logits: Any) -> bool:
        asked.append(len(ids))
        return len(asked) >= 4

    criteria = StoppingCriteriaList([fourth_time])
    result = complete(ours, "A", stopping_criteria=criteria, stop="c", **says("abcdef"))
    assert text_of(result) == "ab"
    assert len(asked) == 3


# ---------------------------------------------------------------------------------------------
# Suffixes
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spm_infill", [False, True])
def test_a_model_that_fills_gaps_sees_the_suffix(
    stock: llama_cpp.Llama, full: Llama, monkeypatch: pytest.MonkeyPatch, spm_infill: bool
) -> None:
    """In the order of llama_cpp, which has token 0 in the place of all three marks."""
    for model in (stock, full):
        monkeypatch.setattr(model, "spm_infill", spm_infill)
    for suffix in ("", "after"):
        monkeypatch.setattr(InfillTokens, "of", lambda llama: InfillTokens(0, 0, 0))
        expected = fed_tokens(stock, monkeypatch, "before", suffix=suffix)
        if suffix:
            # It takes two tokens off to drop the sign before a suffix, but here that has four.
            at = expected.index(BYTE_0 + 0x98)
            assert expected.pop(at) == BYTE_0 + 0x98
            assert expected.pop(at) == BYTE_0 + 0xBA
        assert fed_tokens(full, monkeypatch, "before", suffix=suffix) == expected
    monkeypatch.setattr(InfillTokens, "of", lambda llama: InfillTokens(5, 6, 7))
    fed = fed_tokens(full, monkeypatch, "", suffix="")
    assert fed == ([1, 6, 5, 7] if spm_infill else [1, 5, 6, 7])


def test_any_other_model_has_the_suffix_appended(
    full: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = complete(full, "before", seed=1)
    result = complete(full, "before", suffix=" after", seed=1)
    assert text_of(result) == text_of(plain) + " after"
    assert result["usage"] == plain["usage"]
    echoed = complete(full, "before", suffix=" after", seed=1, echo=True)
    assert text_of(echoed) == "before" + text_of(plain) + " after"


# ---------------------------------------------------------------------------------------------
# Refusals and warnings
# ---------------------------------------------------------------------------------------------


def test_log_probabilities_need_the_logits(evicting: Llama) -> None:
    with pytest.raises(ValueError, match="logits_all=True"):
        evicting.create_completion("A prompt", logprobs=1)


def test_a_prompt_needs_a_token(ours: Llama) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        ours.create_completion([])


@pytest.mark.parametrize("token", [-1, 384])
def test_a_logit_bias_needs_a_token_of_the_model(ours: Llama, token: int) -> None:
    with pytest.raises(ValueError, match=f"token {token},.*0 to 383"):
        ours.create_completion("A prompt", logit_bias={token: 1.0})


def test_two_bos_tokens_are_warned_of(ours: Llama) -> None:
    with pytest.warns(RuntimeWarning, match="two BOS"):
        ours.create_completion("<s>A prompt", max_tokens=1)


def test_a_prompt_must_leave_a_position(full: Llama, ending: Llama) -> None:
    """The message is what llama_cpp's server looks for, and has a cure."""
    message = r"^Requested tokens \(256\) exceed context window of 256: .*raise n_ctx"
    with pytest.raises(ContextLimitError, match=message):
        full.create_completion([5] * WINDOW)
    full.create_completion([5] * (WINDOW - 1), max_tokens=1)
    message = r"^Requested tokens \(512\) exceed context window of 512: .*trained"
    with pytest.raises(ContextLimitError, match=message):
        ending.create_completion([5] * TRAINED_CONTEXT)
    ending.create_completion([5] * (TRAINED_CONTEXT - 1), max_tokens=1)


# ---------------------------------------------------------------------------------------------
# Texts longer than the window
# ---------------------------------------------------------------------------------------------


def long_prompt(model: llama_cpp.Llama) -> list[int]:
    tokens: list[int] = model.tokenize(b"once upon a time there was a window " * 20)[:300]
    assert len(tokens) == 300 > SMALL_WINDOW
    return tokens


def test_a_text_may_outgrow_the_window(evicting: Llama) -> None:
    tokens = long_prompt(evicting)
    result = complete(evicting, tokens, max_tokens=150, logit_bias=NO_END)
    assert result["usage"] == {"prompt_tokens": 300, "completion_tokens": 150, "total_tokens": 450}
    assert result["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", [None, 0, 10_000])
def test_the_trained_context_ends_a_text(ending: Llama, max_tokens: int | None) -> None:
    tokens = long_prompt(ending)
    arguments = {"max_tokens": max_tokens, "logit_bias": NO_END, "seed": 1}
    result = complete(ending, tokens, **arguments)
    assert result["choices"][0]["finish_reason"] == FINISH_TRAINED_CONTEXT == "trained_context"
    # The last token needs no position.
    assert TRAINED_CONTEXT <= result["usage"]["total_tokens"] <= TRAINED_CONTEXT + 1
    chunks = streamed(ending, tokens, **arguments)
    assert chunks[-1]["choices"][0]["finish_reason"] == "trained_context"
    assert joined(chunks) == text_of(result)


def test_criteria_end_a_text_with_stop(evicting: Llama) -> None:
    criteria = StoppingCriteriaList([lambda ids, _: len(ids) >= 310])
    arguments = {"stopping_criteria": criteria, "max_tokens": None, "logit_bias": NO_END}
    result = complete(evicting, long_prompt(evicting), **arguments)
    assert result["choices"][0]["finish_reason"] == "stop"
    assert result["usage"]["completion_tokens"] == 10


# ---------------------------------------------------------------------------------------------
# The prompt cache
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_states_are_cached_as_in_llama_cpp(
    stock: llama_cpp.Llama, full: Llama, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    arguments = {"seed": 8, "max_tokens": 10, "logit_bias": ONLY_ASCII, "stream": stream}
    keys, answers, loads = [], [], []
    real_load = llama_cpp.Llama.load_state
    for model in (stock, full):
        monkeypatch.setattr(model, "load_state", lambda s, m=model: loads.append(real_load(m, s)))
        cache = LlamaRAMCache()
        monkeypatch.setattr(model, "cache", cache)
        for given in ("A prompt", "Another one", "A prompt"):
            result = complete(model, given, **arguments)
            answers.append(list(result) if stream else [result])
        keys.append(list(cache.cache_state))
    assert_equal(answers[:3], answers[3:])
    assert keys[0] == keys[1]
    assert len(loads) == 4


def test_a_verbose_model_tells_of_the_cache(
    full: Llama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(full, "verbose", True)
    monkeypatch.setattr(full, "cache", LlamaRAMCache())
    complete(full, "A prompt", max_tokens=2)
    complete(full, "A prompt", max_tokens=2)
    messages = [line for line in capsys.readouterr().err.splitlines() if "prompt cache" in line]
    n_prompt = len(full.tokenize(b"A prompt"))
    assert messages == [
        "prompt cache: nothing to re-use",
        f"prompt cache: state after {n_prompt + 2} tokens saved",
        f"prompt cache: state with {n_prompt} of the prompt's tokens loaded",
        f"prompt cache: state after {n_prompt + 2} tokens saved",
    ]
