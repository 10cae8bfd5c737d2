"""The options that commands share: what is typed reaches the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fake_story import FakeModel, options_of
from pyh2o.cache.settings import EvictionSettings
from pyh2o.cli.options import KVType, RunOptions
from pyh2o.policies import Snap
from pyh2o.writing.sampling import Sampling

pytestmark = pytest.mark.usefixtures("surroundings")


def test_defaults_reach_the_model(fake: FakeModel) -> None:
    given = options_of(fake)
    drawn = replace(Sampling(), seed=given.sampling.seed)
    assert given == RunOptions(eviction=EvictionSettings(), sampling=drawn)
    assert given.sampling.seed != options_of(fake).sampling.seed


def test_every_option_reaches_the_model(fake: FakeModel) -> None:
    arguments = (
        "-m m.gguf --ctx 512 --gpu-layers -1 --rpc a:1 --rpc b:2,c:3 "
        "--threads 3 --threads-batch 2 --verbose --hh 0.2 "
        "--recent 30 --pinned 4 --slack 1 --policy snap:pool=7 "
        "--prefill exact --prefill-mib 100 "
        "--no-evict --kv-type q8_0 --temp 0 --top-k 5 --top-p 0.5 --min-p 0 --repeat-penalty 1 "
        "--seed 0 --typical-p 0.9 --dry-multiplier 0.8 --dry-base 2 --dry-allowed-length 3 "
        "--dry-penalty-last-n 500 --dry-sequence-breaker . --xtc-probability 0.5 "
        "--xtc-threshold 0.2 --dry-sequence-breaker"
    )
    given = options_of(fake, *arguments.split(), "\n")
    assert given == RunOptions(
        model=Path("m.gguf"),
        ctx=512,
        gpu_layers=-1,
        rpc=["a:1", "b:2,c:3"],
        threads=3,
        threads_batch=2,
        verbose=True,
        eviction=EvictionSettings(
            hh=0.2,
            recent=30,
            pinned=4,
            slack=1,
            policy=Snap(pool=7),
            prefill="exact",
            prefill_mib=100,
        ),
        no_evict=True,
        kv_type=KVType.q8_0,
        sampling=Sampling(
            temperature=0.0,
            top_k=5,
            top_p=0.5,
            min_p=0.0,
            typical_p=0.9,
            repeat_penalty=1.0,
            seed=0,
            dry_multiplier=0.8,
            dry_base=2.0,
            dry_allowed_length=3,
            dry_penalty_last_n=500,
            dry_sequence_breakers=(".", "\n"),
            xtc_probability=0.5,
            xtc_threshold=0.2,
        ),
    )
    assert fake.sampling == given.sampling


@pytest.mark.parametrize(("text", "rows"), [("2", 2), ("1.0", 1.0), ("1e-1", 0.1), ("0", 0)])
def test_rows_are_a_fraction_or_a_count(fake: FakeModel, text: str, rows: float) -> None:
    kept = options_of(fake, "--hh", text, "--recent", "0.5").eviction
    assert (kept.hh, kept.recent) == (rows, 0.5)
    assert type(kept.hh) is type(rows)


def test_model_from_the_environment(fake: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYH2O_MODEL", "env.gguf")
    assert options_of(fake).model == Path("env.gguf")
    assert options_of(fake, "-m", "m.gguf").model == Path("m.gguf")
