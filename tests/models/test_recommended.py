"""The models that are recommended: their figures, and the choice for a machine's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from gguf_of_shape import Shape, write_gguf_of_shape
from pyh2o.cache.settings import ARCHIVE_MIB
from pyh2o.core.description import describe_model
from pyh2o.library.devices import MARGIN
from pyh2o.models import recommended
from pyh2o.models.quantisations import HubFile, choose, models_of
from pyh2o.models.recommended import KNOWN_MODELS, WINDOW, Recommendation, recommend
from tiny_gguf import write_tiny_gguf

# Of config.json of the models.
SHAPES = {
    "bartowski/Llama-3.2-1B-Instruct-GGUF": Shape(16, 32, 8, 64),
    "bartowski/Llama-3.2-3B-Instruct-GGUF": Shape(28, 24, 8, 128),
    "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF": Shape(32, 32, 8, 128),
    "bartowski/Mistral-Nemo-Instruct-2407-GGUF": Shape(40, 32, 8, 128),
    "ggml-org/gemma-3-4b-it-GGUF": Shape(34, 8, 4, 256, window=1024, full_every=6),
    "ggml-org/gemma-3-12b-it-GGUF": Shape(48, 16, 8, 256, window=1024, full_every=6),
    "ggml-org/gpt-oss-20b-GGUF:MXFP4": Shape(24, 64, 8, 64, window=128, full_every=2),
    "Qwen/Qwen3-4B-GGUF": Shape(36, 32, 8, 128),
    "Qwen/Qwen3-8B-GGUF": Shape(36, 32, 8, 128),
    "Qwen/Qwen3-14B-GGUF": Shape(40, 40, 8, 128),
}
SMALLEST, LARGEST = KNOWN_MODELS[0], KNOWN_MODELS[-1]
GIB = 2**30


def test_caches_are_those_of_the_shapes(tmp_path: Path) -> None:
    assert SHAPES.keys() == {model.name for model in KNOWN_MODELS}
    for model in KNOWN_MODELS:
        path = write_gguf_of_shape(tmp_path / "shape.gguf", SHAPES[model.name])
        found = describe_model(path, n_ctx=WINDOW)
        assert found.refused is None
        assert found.full is not None
        assert found.evicting is not None
        full = found.full.growing + found.evicting.window
        sizes = (model.full_bytes, model.evicting_bytes)
        assert sizes == (full, found.evicting.total), model.name


@pytest.mark.parametrize("variant", ["llama", "neox", "sliding_window", "gpt_oss"])
def test_a_shape_has_the_cache_of_the_model(tmp_path: Path, variant: str) -> None:
    """Of every kind that is recommended."""
    real = write_tiny_gguf(tmp_path / "a.gguf", seed=1, n_layer=4, arch_variant=variant)
    window = 0 if variant in ("llama", "neox") else 64
    shape = Shape(4, heads=4, kv_heads=2, head_size=32, window=window, full_every=2)
    other = write_gguf_of_shape(tmp_path / "b.gguf", shape)
    one, two = (describe_model(path, n_ctx=2048) for path in (real, other))
    assert (one.full, one.evicting) == (two.full, two.evicting)
    assert one.full is not None


def test_the_list_is_sound() -> None:
    sizes = [model.file_bytes for model in KNOWN_MODELS]
    assert sizes == sorted(sizes)
    for model in KNOWN_MODELS:
        assert 3 < 8 * model.file_bytes / (model.parameters * 1e9) < 6  # bits of a weight
        assert model.active <= model.parameters
    assert MARGIN == ARCHIVE_MIB * 2**20


def test_the_quantisation_is_found_among_the_files_of_its_repository() -> None:
    files = ["gpt-oss-20b-mxfp4.gguf", "eagle3-gpt-oss-20b-Q8_0.gguf"]
    models = models_of(HubFile(name, 1, "0") for name in files)
    quantisation = LARGEST.name.partition(":")[2]
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
        (12.0, (), 35, "Qwen/Qwen3-8B-GGUF"),  # larger ones fit, and are slow
        (12.0, (), 100, "Qwen/Qwen3-14B-GGUF"),
        (500.0, (), 35, LARGEST.name),  # which reads 4 of its 32 experts
        (500.0, (), 10, SMALLEST.name),
        (500.0, (), 2, SMALLEST.name),  # none is fast enough
        (7.0, (12.0,), 1, "Qwen/Qwen3-14B-GGUF"),
        (7.0, (5.0, 6.0), 1, "bartowski/Mistral-Nemo-Instruct-2407-GGUF"),
        (7.0, (1.0,), 35, "Qwen/Qwen3-8B-GGUF"),  # none fits there
    ],
)
def test_the_choice_for_memory_and_speed(
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
    assert found.gpus == (("card",) * len(gpus) if sum(gpus) > 1 else ())
    record = found.record()
    assert record["choice"] == expected
    fitting = [model["name"] for model in record["models"] if model["fits"]]
    assert fitting == [model.name for model in KNOWN_MODELS][: len(fitting)]
    speeds = [model["tokens_per_second"] for model in record["models"]]
    if expected is not None:
        assert expected in fitting
        is_measured = not found.gpus
        assert (record["bytes_per_second"] is not None, None not in speeds) == (is_measured,) * 2


def test_speed_is_what_the_memory_allows() -> None:
    """Of a mixture of experts those parameters are read that compute a token."""
    found = Recommendation(0, (), bandwidth=35e9)
    assert found.speed(SMALLEST) == pytest.approx(35e9 / (0.808e9 + 0.204e9), 0.01)
    assert found.speed(LARGEST) == pytest.approx(35e9 / (12.11e9 * 3.6 / 20.9 + 0.172e9), 0.01)
