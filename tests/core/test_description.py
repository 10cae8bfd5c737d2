"""A model's description without its weights equals that of the loaded model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pyh2o.cache.native import MAX_POSITIONS, Layer, layer_of
from pyh2o.cache.settings import DEFAULT_POLICY, EvictionSettings
from pyh2o.cache.statistics import KVStatistics
from pyh2o.core.description import LARGEST_WINDOW_BY_DEFAULT, CacheBytes, describe_model
from pyh2o.core.estimate import text_bytes
from pyh2o.errors import ModelError, NativeError
from tiny_gguf import write_tiny_gguf
from tiny_llama import stored_as, tiny_llama

# Arguments of the tiny models, one per kind of memory with eviction.
EVICTED: dict[str, dict[str, Any]] = {
    "llama": {},
    "frequency_factors": {},
    "longrope": {},
    "learned_positions": {},
    "sliding_window": {"n_layer": 4},
    "gemma3n": {"n_layer": 22},
    "gemma4": {"n_layer": 4},
    "gemma4_experts": {"n_layer": 4},
    "gpt_oss": {"n_layer": 4},
    "llama4": {"n_layer": 4},
    "qwen2vl": {},
    "qwen35": {"n_layer": 4},
    "lfm2": {"n_layer": 4},
    "mla": {"head_size": 64},
    "falcon-h1": {},
    "nemotron_h": {"n_layer": 4},
}
REFUSED = {
    "recurrent": "the model is recurrent",
    "alibi": "ALiBi",
    "encoder": "no causal KV cache",
}


def tiny(tmp_path: Path, arch_variant: str, **sizes: Any) -> Path:
    sizes = {**EVICTED.get(arch_variant, {}), **sizes}
    return write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, arch_variant=arch_variant, **sizes)


def kinds(path: Path) -> str:
    """Return the kind of memory of each layer."""
    return " ".join(map(_kind, describe_model(path).layers))


def _kind(layer: Layer) -> str:
    parts = ["state"] if layer.recurrent else []
    if layer.rows_of is not None and layer.rows_of != layer.number:
        parts.append(f"of{layer.rows_of}")
    elif layer.window is not None:
        parts.append(f"{'chunk' if layer.chunked else 'window'}{layer.window}")
    elif layer.grows:
        parts.append("grows")
    return "+".join(parts) or "nothing"


@pytest.mark.parametrize(
    ("arch_variant", "expected"),
    [
        ("llama", "grows grows grows"),
        ("sliding_window", "window64 grows window64 grows"),
        ("gemma3n", "window64 grows " * 10 + "of18 of19"),
        ("gemma4", "window64 grows of0 of1"),
        ("llama4", "chunk8192 chunk8192 chunk8192 grows"),
        ("qwen35", "state state state grows"),
        ("lfm2", "state grows state grows"),
        ("falcon-h1", "state+grows state+grows state+grows"),
        ("nemotron_h", "state grows nothing state"),
        ("recurrent", "state state state"),
        ("mla", "grows grows grows"),
        ("encoder", ""),
    ],
)
def test_layers_are_described_by_kind(tmp_path: Path, arch_variant: str, expected: str) -> None:
    assert kinds(tiny(tmp_path, arch_variant)) == expected


def test_layers_are_described_with_their_heads(tmp_path: Path) -> None:
    layers = describe_model(tiny(tmp_path, "gemma4_experts")).layers
    shapes = [(layer.kv_heads, layer.head_size_k, layer.head_size_v) for layer in layers]
    assert shapes == [(2, 32, 32), (1, 64, 64)] * 2
    layer, *_ = describe_model(tiny(tmp_path, "recurrent")).layers
    assert (layer.kv_heads, layer.head_size_k, layer.head_size_v) == (0, 0, 0)


def test_layers_equal_those_of_a_loaded_model(tmp_path: Path) -> None:
    path = tiny(tmp_path, "gemma3n")
    with tiny_llama(path) as llm:
        address = llm.text.model.address
        layers = [layer_of(address, number) for number in range(llm.text.n_layer)]
        for number in (-1, llm.text.n_layer):
            with pytest.raises(NativeError):
                layer_of(address, number)
    assert tuple(layers) == describe_model(path).layers


# Other arguments of `tiny_llama`.
DEFAULTS: dict[str, Any] = {"policy": DEFAULT_POLICY, "recall": None}


def taken(kv: KVStatistics) -> CacheBytes:
    scores = kv.bytes_scores if kv.evicting else 0
    growing = kv.bytes_k + kv.bytes_v
    return CacheBytes(kv.cells, growing, kv.bytes_window, kv.bytes_recurrent, scores)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("arch_variant", EVICTED)
def test_memory_equals_that_of_a_loaded_model(
    tmp_path: Path, arch_variant: str, kv_type: str
) -> None:
    path = tiny(tmp_path, arch_variant)
    limited = EvictionSettings(recall_mib=1024)
    found = describe_model(path, limited, n_ctx=3000, kv_type=kv_type)
    settings: dict[str, Any] = {"n_ctx": 3000, **DEFAULTS, **stored_as(kv_type), "recall_mib": 1024}
    with tiny_llama(path, **settings) as llm:
        assert found.evicting == taken(llm.kv)
        assert found.budget == llm.kv.limits
        assert found.goes_on == (llm.text.position_limit == MAX_POSITIONS)
    with tiny_llama(path, evict=False, **settings) as llm:
        assert found.full == taken(llm.kv)
    assert found.full is not None
    assert found.evicting is not None
    assert found.budget is not None
    states = found.full.recurrent
    text = text_bytes(found.layers, found.budget, kv_type=kv_type, recurrent=states)
    assert text.evicting == found.evicting.total
    if not found.full.window:  # of the window only, as in llama-server
        assert {"f16": text.full, "q8_0": text.full_q8_0}[kv_type] == found.full.total


@pytest.mark.parametrize("arch_variant", ["sliding_window", "mla"])
def test_memory_of_the_archive(tmp_path: Path, arch_variant: str) -> None:
    path = tiny(tmp_path, arch_variant)
    with tiny_llama(path, n_ctx=1024, recall=None) as llm:
        llm.eval([7] * 1000)
        a_page = llm.kv.bytes_archive // -(-llm.kv.archived // 128)
        found = describe_model(path, n_ctx=1024)
        assert found.budget is not None
        text = text_bytes(found.layers, found.budget)
        assert text.archive == a_page * -(-(1024 - found.budget.recent) // 128)


@pytest.mark.parametrize(
    "settings",
    [
        {"hh": 100, "recent": 50, "pinned": 4, "slack": 1},
        {"recall": 0.05, "policy": "snap:queries=32"},
        {"policy": "snap:pool=1"},
        {"n_ctx": 64},
    ],
)
def test_settings_change_the_memory(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = tiny(tmp_path, "sliding_window")
    with tiny_llama(path, **{**DEFAULTS, **settings}) as llm:
        expected = taken(llm.kv)
    n_ctx = settings.pop("n_ctx", 0)
    assert describe_model(path, EvictionSettings(**settings), n_ctx=n_ctx).evicting == expected


def test_the_default_window_is_the_trained_context_or_the_maximum(tmp_path: Path) -> None:
    assert describe_model(tiny(tmp_path, "llama", n_ctx_train=2000)).window == 2000
    found = describe_model(tiny(tmp_path, "llama", n_ctx_train=10**6))
    assert (found.trained_context, found.window) == (10**6, LARGEST_WINDOW_BY_DEFAULT)


@pytest.mark.parametrize(
    ("arch_variant", "expected", "goes_on"),
    [
        ("llama", "rotary", True),
        ("normed_after_rope", "rotary", False),
        ("qwen2vl", "several per token", True),
        ("learned_positions", "learned", False),
        ("nemotron_h", "none", True),
        ("alibi", "none", None),
    ],
)
def test_positions_are_described(
    tmp_path: Path, arch_variant: str, expected: str, goes_on: bool | None
) -> None:
    found = describe_model(tiny(tmp_path, arch_variant))
    assert (found.positions, found.goes_on) == (expected, goes_on)


@pytest.mark.parametrize("arch_variant", REFUSED)
def test_refused_models_have_a_reason(tmp_path: Path, arch_variant: str) -> None:
    found = describe_model(tiny(tmp_path, arch_variant))
    assert found.refused is not None
    assert REFUSED[arch_variant] in found.refused
    assert "\n" not in found.refused
    assert found.evicting is found.budget is found.goes_on is None


def test_a_model_with_windows_only_is_refused(tmp_path: Path) -> None:
    found = describe_model(tiny(tmp_path, "sliding_window", n_layer=1))
    assert found.refused is not None
    assert "every layer with a KV cache has an attention window" in found.refused


def test_settings_that_the_model_refuses_have_a_reason(tmp_path: Path) -> None:
    path = tiny(tmp_path, "llama", head_size=20)
    found = describe_model(path, EvictionSettings(recall_type="q4_0"))
    assert found.refused is not None
    assert "the block size of the archive's type" in found.refused
    assert found.full is not None


def test_the_description_is_valid_json(tmp_path: Path) -> None:
    record = json.loads(json.dumps(describe_model(tiny(tmp_path, "qwen35")).record()))
    assert record["architecture"] == "qwen35"
    assert [layer["recurrent"] for layer in record["layers"]] == [True, True, True, False]
    assert record["full"]["total"] == record["full"]["growing"] + record["full"]["recurrent"]
    assert record["budget"]["recent"] == 409
    refused = describe_model(tiny(tmp_path, "encoder")).record()
    assert refused["full"] is refused["evicting"] is refused["budget"] is None


def test_weights_are_not_read(tmp_path: Path) -> None:
    small = tiny(tmp_path, "llama")
    large = write_tiny_gguf(tmp_path / "large.gguf", seed=1, n_layer=4, n_ff=16_000)
    code = (
        "import resource, sys\n"
        "from pyh2o.core.description import describe_model\n"
        "for path in sys.argv[1:]:\n"
        "    describe_model(path)\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    command = [sys.executable, "-c", code, str(small), str(large)]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    before, after = (int(line) * 1024 for line in done.stdout.split())
    assert large.stat().st_size > 90 * 2**20
    assert after - before < 10 * 2**20


def test_a_row_that_is_not_a_whole_number_of_blocks_is_refused(tmp_path: Path) -> None:
    path = tiny(tmp_path, "llama", head_size=16)
    with pytest.raises(ModelError, match="head size"):
        describe_model(path, kv_type="q8_0")


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    describe_model(tiny(tmp_path, "sliding_window"), n_ctx=2000)
    assert capfd.readouterr() == ("", "")
