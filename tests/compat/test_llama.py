"""`pyh2o.Llama` as its users see it, on a tiny random model."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyh2o import Conversation, Llama
from pyh2o.errors import (
    ModelError,
    NativeError,
    SettingsError,
    TextError,
    UnsupportedModelError,
)
from pyh2o.models.header import read_header
from pyh2o.policies import H2O
from pyh2o.sessions.story import Story
from pyh2o.writing.sampling import Sampling
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import tiny_llama

N_CTX_TRAIN = 400


MODEL: dict[str, Any] = {"seed": 4, "n_ctx_train": N_CTX_TRAIN, "chat_template": CHAT_TEMPLATE}


@pytest.fixture
def llm(path: Path) -> Llama:
    return tiny_llama(path, n_ctx=100, hh=0.1, recent=0.1)


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """A model whose positions are learned, so that its texts end where they end."""
    path = write_tiny_gguf(
        tmp_path_factory.mktemp("ending") / "tiny.gguf",
        seed=4,
        n_ctx_train=N_CTX_TRAIN,
        chat_template=CHAT_TEMPLATE,
        arch_variant="learned_positions",
    )
    return tiny_llama(path, n_ctx=100, hh=0.1, recent=0.1)


def test_a_policy_is_an_object_or_its_text(path: Path) -> None:
    for policy in (H2O(), "h2o"):
        with tiny_llama(path, policy=policy) as llm:
            assert llm.kv.policy == "h2o"
            assert pickle.loads(pickle.dumps(llm)).kv.policy == "h2o"
    with pytest.raises(SettingsError, match="unknown policy 'best'"):
        tiny_llama(path, policy="best")


def test_scaled_positions_reach_to_the_window(path: Path) -> None:
    plain = tiny_llama(path, n_ctx=800)
    scaled = tiny_llama(path, n_ctx=800, rope_freq_scale=0.5)
    for llm in (plain, scaled, pickle.loads(pickle.dumps(scaled))):
        llm.eval([5] * 700)
    assert plain.kv.rebases > 0
    assert scaled.kv.rebases == 0


def test_settings_are_printed_when_verbose(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_llama(path, n_ctx=100, verbose=True)
    shown = capfd.readouterr().err
    assert "budget 20 (10 heavy + 10 recent) · 0 evicted · 0.2 MiB of 0.2 MiB full" in shown
    assert "K 0.1 + V 0.1 + scores 0.0 MiB · window 100 · policy h2o" in shown
    assert "pinned 0 · slack 236" in shown


@pytest.mark.parametrize("variant", ["sliding_window", "gemma4"])
@pytest.mark.parametrize("evict", [True, False])
def test_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], variant: str, evict: bool
) -> None:
    """llama.cpp warns of full caches of layers that see a window, or have other sizes."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=4, n_layer=4, arch_variant=variant)
    gc.collect()  # models of other tests, which may say that they end
    capfd.readouterr()
    with tiny_llama(path, n_ctx=100, evict=evict) as llm:
        llm.eval([5] * 20)
    assert capfd.readouterr() == ("", "")


def test_heavy_hitters_are_the_best_scores(llm: Llama) -> None:
    llm.eval(np.random.default_rng(3).integers(3, 200, 350).tolist())
    best = llm.heavy_hitters(10)
    assert [hit.score for hit in best] == sorted((hit.score for hit in best), reverse=True)
    held = {int(position) for layer in range(3) for position in llm.kv_rows(layer)[0].ravel()}
    assert len(llm.heavy_hitters(1000)) == len(held)
    for hit in best:
        assert hit.token == llm.input_ids[hit.position]
        assert hit.text == llm.detokenize([hit.token], special=True).decode(errors="replace")
        assert 1 <= hit.rows <= 6

    positions, scores = llm.kv_rows(1)
    top = llm.heavy_hitters(1, layer=1, head=0)[0]
    assert (top.position, top.rows) == (positions[0][scores[0].argmax()], 1)
    assert top.score == pytest.approx(scores[0].max())
    with pytest.raises(NativeError):
        llm.heavy_hitters(layer=3)
    with pytest.raises(IndexError):
        llm.heavy_hitters(head=2)


def test_progress_is_reported(path: Path) -> None:
    loading: list[float] = []
    reading: list[tuple[int, int]] = []
    llm = tiny_llama(
        path,
        n_batch=64,
        load_progress=loading.append,
        prompt_progress=lambda done, total: reading.append((done, total)),
    )
    assert loading[-1] == 1.0
    llm.eval([5] * 150)
    llm.eval([5])
    assert reading == [(n, 150) for n in (0, 64, 128, 150)]


def test_error_in_a_progress_callback_reaches_the_caller(path: Path) -> None:
    def stop(_fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_llama(path, load_progress=stop)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_ctx": -1}, "n_ctx is -1: give 0"),
        ({"n_ctx": 16}, "at least 32"),
        ({"hhh": 0.1}, "unknown argument hhh: did you mean hh?"),
        ({"n_thread": 1}, "unknown argument n_thread: did you mean n_threads?"),
        ({"n_batch": -1}, "n_batch is -1: give 1 or more tokens"),
        ({"n_batch": 1.5}, "n_batch is 1.5: give 1 or more tokens"),
        ({"n_ubatch": 0}, "n_ubatch is 0: give 1 or more tokens"),
        ({"n_threads_batch": -3}, "n_threads_batch is -3: give 1 to 512, or None"),
        ({"n_threads": 100_000}, "n_threads is 100000: give 1 to 512, or None"),
        ({"rope_freq_base": float("nan")}, "rope_freq_base is nan"),
        ({"rope_freq_base": -1.0}, "rope_freq_base is -1.0"),
        ({"yarn_beta_fast": float("inf")}, "yarn_beta_fast is inf"),
        ({"type_k": 10}, r"type_k is 10, .* give 0 \(f32\), 1 \(f16\), 8 \(q8_0\)"),
        ({"type_v": 99}, "type_v is 99"),
        ({"type_k": 10, "evict": False}, "type_k is 10"),
        ({"type_k": 1.0}, "type_k is 1.0"),
        ({"yarn_ext_factor": None}, "yarn_ext_factor is None"),
        ({"rope_freq_base": ""}, "rope_freq_base is ''"),
    ],
)
def test_nonsense_is_refused(path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Llama(str(path), **{"n_threads": 1, "n_threads_batch": 1, **settings})


def test_positions_that_cannot_be_scaled(ending: Llama) -> None:
    """They are learned: there are none beyond those that the model was trained with."""
    with pytest.raises(SettingsError, match=f"no rotary positions to scale: .* {N_CTX_TRAIN}"):
        tiny_llama(Path(ending.model_path), n_ctx=2 * N_CTX_TRAIN, rope_freq_scale=0.5)
    with tiny_llama(Path(ending.model_path), n_ctx=100, rope_freq_scale=0.5) as llm:
        llm.eval([5] * N_CTX_TRAIN)


def test_embeddings_use_the_full_cache(path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="evicts nothing: set evict=False"):
        llm = tiny_llama(path, n_ctx=128, embedding=True)
    assert not llm.evicting
    assert len(llm.embed("once upon a time")) > 0
    with pytest.raises(TextError):
        llm.embed(["once", LONE])


def test_a_file_whose_texts_are_damaged_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "damaged.gguf"
    data = write_tiny_gguf(file, seed=1, n_layer=1).read_bytes()
    file.write_bytes(data.replace(b"tiny random", b"tiny \xffandom"))
    for read in (tiny_llama, read_header):
        with pytest.raises(ModelError, match="the file is damaged") as error:
            read(file)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfoo %}", "endfoo"),
        ("{% raw %}{{ messages[0].content }}{% endraw %}", "Unknown statement: raw"),
        ("{% for i in range(10**9) %}x{% endfor %}", r"Unexpected token"),
        ("{{ 'a' * 10000000 }}", "it takes too much time or memory"),
    ],
)
def test_only_chats_need_a_chat_template(tmp_path: Path, template: str, reason: str) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, n_layer=1, chat_template=template)
    with tiny_llama(file, n_ctx=100) as llm:
        assert llm("Once", max_tokens=2)["usage"]["completion_tokens"]
        story = Story(llm, "Once")
        list(story.write(2))
        assert story.written
        chat: list[Any] = [{"role": "user", "content": "Hi"}]
        for ask in (llm.create_chat_completion, lambda *_: Conversation(llm)):
            message = rf"(?m)^the model's chat template cannot be used \(.*{reason}.*model file$"
            with pytest.raises(UnsupportedModelError, match=message) as error:
                ask(chat)
            assert "chat_format" in vars(error.value)["__notes__"][0]
            assert "\n" not in str(error.value)
        llm.chat_format = "chatml"
        assert llm.create_chat_completion(chat, max_tokens=1)["choices"]
        Conversation(llm)


def test_integers_of_numpy_are_integers(path: Path) -> None:
    """A seed of NumPy failed only in the next call that had none."""
    numbers: dict[str, Any] = {"n_ctx": 100, "n_batch": 32, "type_k": 1, "seed": 3}
    texts = []
    for given in (numbers, {name: np.int64(n) for name, n in numbers.items()}):
        with Llama(str(path), n_threads=np.int32(1), n_threads_batch=1, **given) as llm:
            texts.append([llm("A", max_tokens=9)["choices"][0]["text"] for _ in range(2)])
            seed: Any = type(given["seed"])(5)
            answers = [llm("A", max_tokens=type(seed)(9), seed=seed), llm("A", max_tokens=9)]
            texts[-1] += [answer["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 2


@pytest.mark.parametrize(
    "name", ["seed", "n_ctx", "n_threads", "n_batch", "main_gpu", "last_n_tokens_size", "pinned"]
)
@pytest.mark.parametrize("value", [1.5, "1"])
def test_what_is_no_integer_is_refused_by_name(path: Path, name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=rf"^{name} is {value!r}: "):
        Llama(str(path), **{name: value})
    if name == "seed":
        with tiny_llama(path, n_ctx=100) as llm:
            for use in (llm.set_seed, lambda seed: llm("A", seed=seed)):
                with pytest.raises(SettingsError, match=r"^seed is"):
                    use(value)
            with pytest.raises(SettingsError, match=r"^max_tokens is"):
                llm("A", max_tokens=value)
            assert llm("A", max_tokens=2)["choices"]


@pytest.mark.parametrize("seed", [-1, 2**32 - 1])
def test_some_seeds_choose_a_new_one(path: Path, seed: int) -> None:
    texts = set()
    for given in ({"seed": seed}, {"seed": seed}, {}):
        with tiny_llama(path, n_ctx=100, **given) as llm:
            for asked in ({}, {"seed": seed}, {"seed": seed}):
                texts.add(llm("A", max_tokens=12, **asked)["choices"][0]["text"])
    assert len(texts) == 9


LONE = "a\ud800"
ASKED: list[Any] = [{"role": "user", "content": "Hi"}]
SAID: list[Any] = [{"role": "user", "content": LONE}]


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm(LONE),
        lambda llm: llm("Once", stop=["a", LONE]),
        lambda llm: next(llm("Once", stop=LONE, stream=True)),
        lambda llm: llm.create_chat_completion(SAID),
        lambda llm: llm.create_chat_completion(ASKED, chat_template_kwargs={"a": LONE}),
        lambda llm: llm.create_chat_completion(ASKED, stop=LONE),
        lambda llm: [setattr(llm, "chat_format", "chatml"), llm.create_chat_completion(SAID)],
        lambda llm: Conversation(llm, system=LONE),
        lambda llm: next(Conversation(llm).say(LONE)),
        lambda llm: Story(llm, LONE),
        lambda llm: Story(llm, "Once", until=[LONE]),
        lambda llm: Story(llm, "Once", memory=LONE),
        lambda llm: Story(llm, "Once", echo=True).edit(LONE),
        lambda _: Sampling(dry_sequence_breakers=(LONE,)),
    ],
)
def test_a_text_that_is_not_unicode_is_refused(llm: Llama, use: Any) -> None:
    said = r"^the text is not Unicode: remove the lone surrogate '\\ud800'$"
    with pytest.raises(TextError, match=said):
        use(llm)
