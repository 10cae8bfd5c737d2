"""A policy in Python keeps the reference's rows everywhere, and its errors are reported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import pytest

from many_texts import llama_in, tiny_engine
from oracle import assert_same_steps, clear_steps, read
from pyh2o import Llama
from pyh2o.cache.settings import Attention
from pyh2o.errors import PolicyError, SettingsError, StateError
from pyh2o.policies import NATIVE_POLICIES, FloatArray, HeadRows, Need, Policy, parse_policy
from research.reference import ReferenceLlama
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, random_tokens, stored_as, tiny_llama

HEAVY, RECENT, SLACK = 14, 9, 7
N_LAYER, N_VOCAB, N_POS = 3, 384, 96
CACHE: dict[str, Any] = {"hh": HEAVY, "recent": RECENT, "slack": SLACK, "n_ctx": 128}

NEEDS: tuple[Need, ...] = get_args(Need)
MODEL: dict[str, Any] = {"seed": 3, "n_layer": N_LAYER, "n_ctx_train": N_POS}


@dataclass(frozen=True)
class LastQueries(Policy):
    """Uses every available input in its score."""

    needs: ClassVar[tuple[Need, ...]] = NEEDS

    queries_seen: int = 5
    power: float = 0.5

    @property
    def n_queries(self) -> int:
        return self.queries_seen

    @property
    def half_life(self) -> float:
        return 40.0

    def score(self, rows: HeadRows) -> FloatArray:
        products = np.abs(rows.queries.sum(axis=(0, 1)) @ rows.keys.T) * rows.scale
        scores: FloatArray = (rows.attention + rows.squares) / rows.ages**self.power
        return scores + rows.query_attention + products * rows.value_norms / 100


IN_A_FILE = """
from dataclasses import dataclass
from pyh2o.policies import Policy

@dataclass(frozen=True)
class OfOwn(Policy):
    needs = ("attention",)
    power: float = 1.0

    def score(self, rows):
        return rows.attention / rows.ages**self.power
"""


@pytest.fixture
def in_a_file(tmp_path: Path) -> str:
    # same name as a standard module
    file = tmp_path / "random.py"
    file.write_text(IN_A_FILE)
    return f"{file}:OfOwn"


def llama_of(path: Path, policy: Policy | str, **settings: Any) -> Llama:
    return tiny_llama(path, policy=policy, logits_all=True, **{**CACHE, **EXACT_ROWS, **settings})


def reference_of(path: Path, policy: Policy | str) -> ReferenceLlama:
    return ReferenceLlama.from_gguf(
        path, heavy=HEAVY, recent=RECENT, slack=SLACK, n_pos=N_POS, policy=policy
    )


@pytest.mark.parametrize("attention", ["auto", "ops"])
@pytest.mark.parametrize("is_file", [False, True], ids=["of a test", "of a file"])
def test_a_python_policy_equals_the_reference(
    path: Path, rng: np.random.Generator, in_a_file: str, is_file: bool, attention: Attention
) -> None:
    policy = f"{in_a_file}:power=0.7" if is_file else LastQueries(power=0.7)
    steps, reference = clear_steps(reference_of(path, policy), rng, [5] * 42, margin=2e-6)
    llm = llama_of(path, policy, attention=attention, n_ubatch=5, flash_attn=attention != "ops")
    assert_same_steps(llm, steps, logits=5e-4, scores=2e-4)
    assert llm.kv.compactions == reference.n_compactions > 10
    assert llm.kv.rebases > 0
    assert not is_file or llm.kv.policy == policy


@pytest.mark.parametrize("policy", NATIVE_POLICIES)
def test_python_selects_rows_as_the_library_does(
    path: Path, rng: np.random.Generator, policy: type[Policy]
) -> None:
    """A subclass is another policy, which no library computes."""
    tokens = random_tokens(rng, 200)
    mine, native = (llama_of(path, kind()) for kind in (type("Mine", (policy,), {}), policy))
    for llm in (mine, native):
        llm.eval(tokens)
    for layer in range(N_LAYER):
        np.testing.assert_array_equal(mine.kv_rows(layer)[0], native.kv_rows(layer)[0])
    np.testing.assert_array_equal(mine.scores[199], native.scores[199])


class Recording(LastQueries):
    """Records its inputs."""

    seen: ClassVar[list[HeadRows]] = []

    def score(self, rows: HeadRows) -> FloatArray:
        self.seen.append(rows)
        return super().score(rows)


@pytest.fixture
def seen() -> Iterator[list[HeadRows]]:
    Recording.seen.clear()
    yield Recording.seen
    Recording.seen.clear()


def test_a_policy_gets_the_same_inputs_as_in_the_reference(
    path: Path, rng: np.random.Generator, seen: list[HeadRows]
) -> None:
    steps, _ = clear_steps(reference_of(path, Recording()), rng, [5] * 24, margin=2e-6)
    seen.clear()
    reference = reference_of(path, Recording())
    llm = llama_of(path, Recording(), n_ubatch=5)
    llm.text.cache.pin(2)
    reference.pin(2)
    for step in steps:
        read(reference, step.tokens)
    theirs = {(each.layer, each.head, each.newest): each for each in seen}
    seen.clear()
    for step in steps:
        llm.eval(step.tokens)
    assert len(seen) > 50
    for mine in seen:
        other = theirs[mine.layer, mine.head, mine.newest]
        for item in fields(HeadRows):
            if item.name not in ("rope_frequencies", "keys", "queries"):
                mine_is, other_is = getattr(mine, item.name), getattr(other, item.name)
                np.testing.assert_allclose(mine_is, other_is, atol=2e-4, err_msg=item.name)
        np.testing.assert_allclose(mine.rope_frequencies, other.rope_frequencies, rtol=1e-5)
        np.testing.assert_allclose(mine.keys, other.keys, atol=1e-3)
        np.testing.assert_allclose(mine.queries, other.queries, atol=1e-3)


@pytest.mark.parametrize(
    ("variant", "kv_type"),
    [*product(("llama", "neox", "partial"), ("f32", "q8_0")), ("mla", "f32")],
)
def test_keys_of_one_token_differ_only_by_rotation(
    tmp_path: Path, seen: list[HeadRows], variant: str, kv_type: str
) -> None:
    """For any pairing of elements, and any mixing by the cache."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, arch_variant=variant, head_size=32)
    llm = llama_of(path, Recording(), **stored_as(kv_type))
    llm.eval([7] * 40)
    rows = next(each for each in seen if each.layer == 0)
    turns = np.exp(1j * (rows.positions - rows.positions[0])[:, None] * rows.rope_frequencies)
    as_complex = rows.keys[:, 0::2] + 1j * rows.keys[:, 1::2]
    rounding = 1e-4 if kv_type == "f32" else 0.03
    np.testing.assert_allclose(
        as_complex, as_complex[0] * turns, atol=rounding * np.abs(as_complex).max()
    )


@dataclass(frozen=True)
class Failing(Policy):
    """Fails from a position of the text on, while enabled."""

    error: ClassVar[Callable[[], BaseException] | None] = None

    start: int = 60

    needs: ClassVar[tuple[Need, ...]] = ("attention",)

    def score(self, rows: HeadRows) -> FloatArray:
        if Failing.error is not None and rows.newest >= self.start:
            raise Failing.error()
        return rows.attention


Errors = Callable[[Callable[[], BaseException] | None], None]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Errors:
    return lambda error: monkeypatch.setattr(Failing, "error", error)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("by nothing"), KeyboardInterrupt(), RuntimeError("of a policy")]
)
def test_an_exception_of_a_policy_is_raised(
    path: Path, rng: np.random.Generator, failing: Errors, error: BaseException
) -> None:
    """The text continues as if nothing had happened."""
    tokens = random_tokens(rng, 120)
    llm, other = (llama_of(path, Failing()) for _ in range(2))
    failing(lambda: error)
    with pytest.raises(type(error)) as caught:
        llm.eval(tokens)
    assert caught.value is error
    assert 50 < llm.n_tokens <= 70
    with pytest.raises(type(error)):
        next(llm.generate([*tokens[: llm.n_tokens], 5]))
    failing(None)
    llm.eval(tokens[llm.n_tokens :])
    other.eval(tokens)
    np.testing.assert_array_equal(llm.scores[119], other.scores[119])


def test_an_exception_of_a_policy_is_raised_from_a_larger_cache(
    path: Path, rng: np.random.Generator, failing: Errors
) -> None:
    tokens = random_tokens(rng, 90)
    llm, other = (llama_of(path, Failing(), prefill="exact") for _ in range(2))
    failing(lambda: ZeroDivisionError("by nothing"))
    with pytest.raises(ZeroDivisionError):
        llm.eval(tokens)
    failing(None)
    llm.eval([9])
    other.eval(tokens)
    other.eval([9])
    np.testing.assert_array_equal(llm.scores[90], other.scores[90])


def test_an_exception_of_a_policy_is_raised_from_pins(
    path: Path, rng: np.random.Generator, failing: Errors
) -> None:
    """Pins restore rows from the archive."""
    llm = llama_of(path, Failing(), recall=4)
    llm.eval(random_tokens(rng, 80))
    failing(lambda: ZeroDivisionError("by nothing"))
    with pytest.raises(ZeroDivisionError):
        llm.pin_spans([(20, 24)])
    failing(None)
    llm.pin_spans([(20, 24)])
    assert {20, 21, 22, 23} <= set(llm.kv_rows(0)[0][0].tolist())


@dataclass(frozen=True)
class Wrong(Policy):
    gives: ClassVar[Callable[[int], Any]]

    def score(self, rows: HeadRows) -> FloatArray:
        scores: FloatArray = Wrong.gives(rows.positions.size)
        return scores


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (
            lambda n: np.zeros(n - 1),
            r"score\(\) returns float64 \[29\] for 30 rows: return one number",
        ),
        (lambda n: np.zeros((n, 1)), r"returns float64 \[30, 1\] for 30 rows"),
        (lambda _n: None, r"returns object \[\] for 30 rows"),
        (lambda n: np.zeros(n, complex), r"returns complex128 \[30\]"),
        (lambda n: ["high"] * n, r"returns <U4 \[30\] for 30 rows"),
        (
            lambda n: np.full(n, np.nan),
            "returns 21 scores of 30 in layer 0, KV head 0, that are not finite",
        ),
        (lambda n: np.full(n, -np.inf), "not finite float32 numbers"),
        (lambda n: np.full(n, 1e39), "not finite float32 numbers"),
        (lambda n: np.where(np.arange(n) == 5, np.nan, 0), "returns 1 scores of 30"),
    ],
)
def test_invalid_scores_are_refused(
    path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    gives: Callable[[int], Any],
    message: str,
) -> None:
    monkeypatch.setattr(Wrong, "gives", staticmethod(gives), raising=False)
    tokens = random_tokens(rng, 60)
    with pytest.raises(PolicyError, match=message) as error:
        llama_of(path, Wrong()).eval(tokens)
    assert "\n" not in str(error.value)
    with pytest.raises(PolicyError, match=message):
        read(reference_of(path, Wrong()), tokens)


def test_scores_of_mandatory_rows_are_ignored(
    path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_old(n: int) -> FloatArray:
        return np.where(np.arange(n) < n - RECENT, np.arange(n), np.nan)

    monkeypatch.setattr(Wrong, "gives", staticmethod(of_old), raising=False)
    llm = llama_of(path, Wrong())
    llm.eval(random_tokens(rng, 60))
    assert np.isfinite(llm.kv_rows(0)[1]).all()


def test_a_text_whose_policy_fails_does_not_stop_others(
    path: Path, rng: np.random.Generator, failing: Errors
) -> None:
    failing(lambda: ZeroDivisionError("by nothing"))
    with tiny_engine(path, texts=2, policy=Failing(), **CACHE) as engine:

        def read(n: int) -> int:
            with llama_in(engine, [], n_new=n) as llm:
                for token in random_tokens(rng, n):
                    llm.eval([token])
                return llm.n_tokens

        with ThreadPoolExecutor(2) as threads:
            short, long = threads.submit(read, 58), threads.submit(read, 90)
            assert short.result() == 58
            with pytest.raises(ZeroDivisionError):
                long.result()


def test_a_state_of_another_policy_is_refused(path: Path, in_a_file: str) -> None:
    one = llama_of(path, LastQueries(power=0.7))
    one.eval([1, 2, 3])
    state = one.save_state()
    for policy in (LastQueries(), Recording(power=0.7), in_a_file, "h2o"):
        with pytest.raises(StateError, match="state does not fit"):
            llama_of(path, policy).load_state(state)
    llama_of(path, LastQueries(power=0.7)).load_state(state)


def test_a_file_is_loaded_once_and_hides_no_module(in_a_file: str) -> None:
    import random

    policy = parse_policy(in_a_file)
    assert parse_policy(f" {in_a_file} ") == policy
    assert str(policy) == in_a_file
    assert parse_policy(f"{in_a_file}:power=2") == replace(policy, power=2)  # type: ignore[call-arg]
    assert policy.full_text == "random:OfOwn:power=1"
    assert sys.modules["random"] is random


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, r"no such file .*mine\.py: give a policy as FILE\.py:CLASS"),
        ("raise OSError(2, 'no')", r"mine\.py cannot be loaded: FileNotFoundError: .*no"),
        ("class Mine(:", r"mine\.py cannot be loaded: SyntaxError: invalid syntax"),
        ("Mine = 3", r"mine\.py has no class Mine that derives from pyh2o\.policies\.Policy"),
        ("class Mine: pass", "has no class Mine"),
        ("class Mine(Policy): pass", r"mine\.py: Mine has no method score\(rows\): define one"),
        ("class Mine(Policy):\n    needs = ('key',)", "needs key: give some of attention, squares"),
        (
            "@dataclass(frozen=True)\nclass Mine(Policy):\n    text: str = ''\n"
            "    def score(self, rows): pass",
            "mine:Mine: the default of text is .*: give a number or a bool",
        ),
    ],
)
def test_files_without_a_policy_are_refused_with_a_one_line_error(
    tmp_path: Path, code: str | None, message: str
) -> None:
    file = tmp_path / "mine.py"
    if code is not None:
        imports = "from dataclasses import dataclass\nfrom pyh2o.policies import Policy\n"
        file.write_text(imports + code)
    with pytest.raises(SettingsError, match=message) as error:
        parse_policy(f"{file}:Mine")
    assert "\n" not in str(error.value)


def test_a_custom_policy_is_not_confused_with_a_library_policy(path: Path) -> None:
    class Mine(Failing):
        name = "h2o"

    assert str(Mine()).startswith(f"{__name__}:test_a_custom_policy")
    assert parse_policy("h2o") != Mine()
