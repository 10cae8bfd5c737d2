"""Recommended models: their figures, and the choice for a machine's memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from compiled import ROOT
from pyh2o.cache.settings import ARCHIVE_MIB, GPU_SLACK, EvictionSettings
from pyh2o.core import recommended
from pyh2o.core.description import describe_model
from pyh2o.core.recommended import (
    KNOWN_MODELS,
    WINDOW,
    Memory,
    Recommendation,
    recommend,
)
from pyh2o.library.devices import MARGIN
from pyh2o.models.quantisations import HubFile, choose, models_of
from tiny_gguf import write_tiny_gguf
from tiny_model import store

# Without the quantisation.
BY_TITLE = {
    model.title.partition(",")[0].removesuffix(" Instruct"): model for model in KNOWN_MODELS
}
SMALLEST, EXPERTS = KNOWN_MODELS[0], BY_TITLE["gpt-oss 20B"]
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """Fields of a model that its cache size depends on; `full_every` as in `KnownModel`."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    window: int = 0
    full_every: int = 1


def write_gguf_of_shape(path: Path, shape: Shape) -> Path:
    """Write the header of a Gemma 3 with or without windows, and a hole instead of weights."""
    n, size = 32, shape.head_size  # fields without effect on the cache
    q, kv = shape.heads * size, shape.kv_heads * size
    writer = GGUFWriter(path, "gemma3")
    store(writer, block_count=shape.layers, context_length=131_072, vocab_size=n)
    store(writer, embedding_length=n, feed_forward_length=n, layer_norm_rms_eps=1e-6)
    store(writer, head_count=shape.heads, head_count_kv=shape.kv_heads)
    store(writer, key_length=size, value_length=size, tokenizer_model="no_vocab")
    if shape.window:
        store(writer, sliding_window=shape.window, sliding_window_pattern=shape.full_every)
    matrices = {"attn_q": (q, n), "attn_k": (kv, n), "attn_v": (kv, n), "attn_output": (n, q)}
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    of_layer: dict[str, tuple[int, ...]] = {
        **matrices,
        **dict.fromkeys(("ffn_up", "ffn_gate", "ffn_down"), (n, n)),
        **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (size,)),
        **dict.fromkeys(norms, (n,)),
    }
    tensors = {"token_embd": (n, n), "output_norm": (n,)} | {
        f"blk.{i}.{name}": sizes for i in range(shape.layers) for name, sizes in of_layer.items()
    }
    n_bytes = {name: 4 * int(np.prod(sizes)) for name, sizes in tensors.items()}
    for name, sizes in tensors.items():
        writer.add_tensor_info(f"{name}.weight", sizes, np.dtype(np.float32), n_bytes[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + sum(n_bytes.values()) + 64 * len(tensors))
    return path


def test_computed_cache_sizes_equal_llama_cpps(tmp_path: Path) -> None:
    for model in KNOWN_MODELS:
        heads, windows = model.kv_heads, (model.window, model.full_every)
        shape = Shape(model.layers, heads, heads, model.head_size, *windows)
        path = write_gguf_of_shape(tmp_path / "a.gguf", shape)
        found = describe_model(path, EvictionSettings(slack=GPU_SLACK), n_ctx=WINDOW)
        assert found.full is not None
        assert found.evicting is not None
        text = model.text(WINDOW, on_gpu=True)
        sizes = (found.full.growing + found.evicting.window, found.evicting.total)
        assert (text.full, text.evicting) == sizes, model.name
        assert text == found.text(WINDOW)


@pytest.mark.parametrize("variant", ["llama", "neox", "sliding_window", "gpt_oss"])
def test_a_shape_has_the_cache_of_its_model(tmp_path: Path, variant: str) -> None:
    """For every kind of recommended model."""
    real = write_tiny_gguf(tmp_path / "a.gguf", seed=1, n_layer=4, arch_variant=variant)
    window = 0 if variant in ("llama", "neox") else 64
    shape = Shape(4, heads=4, kv_heads=2, head_size=32, window=window, full_every=2)
    other = write_gguf_of_shape(tmp_path / "b.gguf", shape)
    one, two = (describe_model(path, n_ctx=2048) for path in (real, other))
    assert (one.full, one.evicting) == (two.full, two.evicting)
    assert one.full is not None


def test_the_list_is_consistent() -> None:
    sizes = [model.file_bytes for model in KNOWN_MODELS]
    assert sizes == sorted(sizes)
    for model in KNOWN_MODELS:
        assert 3 < 8 * model.file_bytes / (model.parameters * 1e9) < 6  # bits of a weight
        assert model.active <= model.parameters
    assert MARGIN == ARCHIVE_MIB * 2**20


def test_compute_buffers_hold_the_logits_of_the_largest_vocabulary() -> None:
    """Gemma 3's logits, plus as much as all buffers of Qwen 1.5B (docs/cuda.md)."""
    assert 262_208 * GPU_SLACK * 4 + 300 * 2**20 < MARGIN


def test_codes_take_twenty_bytes_per_key_and_searching_head() -> None:
    text = BY_TITLE["Llama 3.1 8B"].text(131_072, on_gpu=True)
    a_key = text.codes / (32 * 8 / 4 * (131_072 - 13_107))
    assert 20 < a_key / 1.25 < 21  # with a quarter in reserve


def test_the_table_of_the_readme_is_current() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| k tokens"))
    cards = [int(cell.split()[0]) for cell in lines[head].split("|")[2:-1]]
    assert cards == [8, 12, 16, 24]
    table = itertools.takewhile(bool, lines[head + 2 :])
    rows = {name.strip(): cells for _, name, *cells, _ in (line.split("|") for line in table)}
    assert len(rows) == 9
    for name, cells in rows.items():
        for card, cell in zip(cards, cells, strict=True):
            found = Recommendation(Memory(card * GIB, ("card",)), WINDOW)
            full, ours = (n // 1024 for n in found.longest(BY_TITLE[name]))
            assert cell.strip() == (f"{full or '-'}→{ours}" if ours else "-"), (name, card)


def test_the_quantisation_is_a_file_of_the_repository() -> None:
    files = ["gpt-oss-20b-mxfp4.gguf", "eagle3-gpt-oss-20b-Q8_0.gguf"]
    models = models_of(HubFile(name, 1, "0") for name in files)
    quantisation = EXPERTS.name.partition(":")[2]
    assert choose(models, quantisation).name == "gpt-oss-20b-mxfp4"


@dataclass
class FakeGpu:
    name: str
    gib: float

    def free_bytes(self) -> int:
        return int(self.gib * GIB)


@pytest.mark.parametrize(
    ("main", "gpus", "rate", "expected"),
    [
        (0.5, (), 35, None),
        (1.99, (), 35, SMALLEST.name),
        (4.0, (), 35, "ggml-org/gemma-3-4b-it-GGUF"),
        (7.0, (), 35, "Qwen/Qwen3-8B-GGUF"),
        (12.0, (), 35, "Qwen/Qwen3-8B-GGUF"),  # larger models fit, but are slow
        (12.0, (), 100, "Qwen/Qwen3-14B-GGUF"),
        (500.0, (), 35, "Qwen/Qwen3-30B-A3B-GGUF"),  # reads 8 of its 128 experts
        (500.0, (), 10, SMALLEST.name),
        (500.0, (), 2, SMALLEST.name),  # none is fast enough
        (7.0, (12.0,), 1, "Qwen/Qwen3-14B-GGUF"),
        (7.0, (5.0, 6.0), 1, "bartowski/Mistral-Nemo-Instruct-2407-GGUF"),
        (7.0, (1.0,), 35, "Qwen/Qwen3-8B-GGUF"),  # none fits
    ],
)
def test_the_choice_depends_on_memory_and_speed(
    monkeypatch: pytest.MonkeyPatch,
    main: float,
    gpus: Sequence[float],
    rate: float,
    expected: str | None,
) -> None:
    devices = [FakeGpu("card", gib) for gib in gpus]
    monkeypatch.setattr(recommended, "discrete_gpus", lambda: devices)
    monkeypatch.setattr(recommended, "available_bytes", lambda: int(main * GIB))
    monkeypatch.setattr(recommended, "_bandwidth", lambda: rate * 1e9)
    found = recommend()
    assert (found.choice and found.choice.name) == expected
    assert found.memory.gpus == (("card",) * len(gpus) if sum(gpus) > 1 else ())
    record = found.record()
    assert record["choice"] == expected
    fitting = [model["name"] for model in record["models"] if model["fits"]]
    assert fitting == [model.name for model in KNOWN_MODELS][: len(fitting)]
    speeds = [model["tokens_per_second"] for model in record["models"]]
    if expected is not None:
        assert expected in fitting
        is_measured = not found.memory.gpus
        assert (record["bytes_per_second"] is not None, None not in speeds) == (is_measured,) * 2


def test_speed_is_limited_by_memory_bandwidth() -> None:
    """A mixture of experts reads only the parameters that a token uses."""
    found = Recommendation(Memory(0), WINDOW, bandwidth=35e9)
    assert found.speed(SMALLEST) == pytest.approx(35e9 / (0.808e9 + 0.221e9), 0.01)
    assert found.speed(EXPERTS) == pytest.approx(35e9 / (12.11e9 * 3.6 / 20.9 + 0.172e9), 0.01)


def test_a_card_of_another_machine_can_be_given() -> None:
    memory = Memory(16 * GIB, ("card",))
    found = recommend(memory, 131_072)
    assert found.memory == memory
    assert found.choice == EXPERTS  # the largest file
    assert recommend(Memory(GIB, ("card",))).choice is None
    for n_tokens, full in ((WINDOW, True), (131_072, False)):
        text = replace(found, n_tokens=n_tokens).text(BY_TITLE["Llama 3.1 8B"])
        assert (text.full <= found.left(BY_TITLE["Llama 3.1 8B"])) == full
    for model in KNOWN_MODELS:
        longest = found.longest(model)
        for n_tokens, name in zip(longest, ("full", "gpu"), strict=True):
            beyond = found.text(model, n_tokens + 1024)
            assert n_tokens == 131_072 or getattr(beyond, name) > found.left(model)
            assert n_tokens == 0 or getattr(found.text(model, n_tokens), name) <= found.left(model)
