"""Sampling settings: ranges, and that they survive JSON."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from pyh2o.errors import SettingsError
from pyh2o.writing.sampler import SamplerSettings
from pyh2o.writing.sampling import LARGEST_SEED, Sampling

OUT_OF_RANGE: dict[str, list[object]] = {
    "temperature": [-0.1, math.nan, math.inf, "0.8", True, None],
    "top_k": [-1, 1.5, True],
    "top_p": [1.01, -0.01],
    "min_p": [2],
    "typical_p": [math.nan],
    "repeat_penalty": [0, -1],
    "frequency_penalty": [math.inf],
    "presence_penalty": ["much"],
    "dry_multiplier": [-1],
    "dry_base": [0.9],
    "dry_allowed_length": [2.5],
    "dry_penalty_last_n": [-2],
    "dry_sequence_breakers": ["ab", [1]],
    "xtc_probability": [1.1],
    "xtc_threshold": [-0.1],
    "seed": [-2, LARGEST_SEED + 2, 1.0],
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_values_out_of_range_are_refused_by_name(name: str) -> None:
    for value in OUT_OF_RANGE[name]:
        with pytest.raises(SettingsError, match=rf"^{name} is .*: ") as caught:
            Sampling(**{name: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"top_k": 0, "top_p": 0, "min_p": 0, "typical_p": 0},
        {"top_p": 1, "min_p": 1.0, "typical_p": 1},
        {"frequency_penalty": -2, "presence_penalty": 2.0},
        {"repeat_penalty": 0.5, "seed": LARGEST_SEED},
        {"dry_multiplier": 0, "dry_base": 1, "dry_allowed_length": 0, "dry_penalty_last_n": -1},
        {"dry_sequence_breakers": [], "xtc_probability": 1, "xtc_threshold": 1},
    ],
)
def test_ends_of_the_ranges_are_taken_and_survive_json(values: dict[str, float]) -> None:
    sampling = Sampling(**values)
    assert Sampling(**json.loads(json.dumps(dataclasses.asdict(sampling)))) == sampling


def test_integers_of_numpy_are_integers() -> None:
    values = {"seed": 3, "top_k": 40, "dry_allowed_length": 2, "dry_penalty_last_n": 9}
    sampling = Sampling(**{name: np.int64(value) for name, value in values.items()})
    assert sampling == Sampling(**values)
    json.dumps(dataclasses.asdict(sampling))
    for name in (*values, "mirostat_mode", "repeat_last_n"):
        assert type(getattr(SamplerSettings(**{name: np.int32(1)}), name)) is int
        with pytest.raises(SettingsError, match=rf"^{name} is 1.5: give a whole number$"):
            SamplerSettings(**{name: 1.5})


@pytest.mark.parametrize("seed", [-1, LARGEST_SEED + 1, np.int64(-1)])
def test_some_seeds_choose_a_new_one(seed: int) -> None:
    """The record has it, so that its text can be repeated."""
    seeds = {Sampling(seed=seed).seed for _ in range(4)}
    assert len(seeds) == 4
    assert all(0 <= each <= LARGEST_SEED for each in seeds)
