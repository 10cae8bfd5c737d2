"""Eviction settings: fractions, counts and invalid values."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pyh2o.cache.settings import DEFAULT_POLICY, Budget, EvictionSettings, saved_names
from pyh2o.errors import SettingsError
from pyh2o.policies import Snap


def test_fractions_refer_to_the_window() -> None:
    budget = EvictionSettings(hh=0.1, recent=0.1, recall=0).resolve(8192, 8192)
    assert (budget.heavy, budget.recent, budget.rows) == (819, 819, 1638)


def test_counts_are_used_as_given() -> None:
    settings = EvictionSettings(hh=256, recent=1, pinned=4, slack=7, recall=0)
    budget = settings.resolve(2048, 8192)
    assert budget == Budget(settings, window=2048, heavy=256, recent=1, slack=7, n_pos=8192)
    assert (budget.rows, budget.capacity, budget.cells) == (261, 268, 512)


def test_numpy_integers_are_counts() -> None:
    counts = {"hh": 100, "recent": 100, "pinned": 4, "slack": 7, "recall": 9, "recall_mib": 5}
    settings = EvictionSettings(**{name: np.int64(n) for name, n in counts.items()})  # type: ignore[arg-type]
    assert settings == EvictionSettings(**counts)  # type: ignore[arg-type]
    json.dumps(settings.resolve(1000, 8192).saved())


@pytest.mark.parametrize(
    ("settings", "heavy", "recent", "recall"),
    [
        ({"hh": 100, "recent": 100}, 75, 100, 25),
        ({"hh": 100, "recent": 100, "recall": 0}, 100, 100, 0),
        ({"hh": 100, "recent": 100, "recall": 0.06}, 40, 100, 60),
        ({"hh": 100, "recent": 100, "recall": 130}, 0, 70, 130),
        ({"hh": 0, "recent": 100}, 0, 88, 12),
        ({"hh": 0, "recent": 3}, 0, 3, 0),
        ({"hh": 10, "recent": 10, "recall": 19}, 0, 1, 19),
    ],
    ids=str,
)
def test_retrieved_rows_reduce_the_heavy_rows(
    settings: dict[str, object], heavy: int, recent: int, recall: int
) -> None:
    asked = EvictionSettings(pinned=4, **settings)  # type: ignore[arg-type]
    budget = asked.resolve(1000, 8192)
    assert (budget.heavy, budget.recent, budget.recall) == (heavy, recent, recall)
    assert budget.rows == 4 + heavy + recent
    assert budget.cells == budget.capacity


@pytest.mark.parametrize(
    ("window", "recall", "found"),
    [(8192, None, 204), (10240, None, 256), (131072, None, 256), (131072, 0.02, 2621)],
)
def test_default_retrieval_has_a_maximum(window: int, recall: float | None, found: int) -> None:
    """The remaining rows stay in the cache."""
    budget = EvictionSettings(recall=recall).resolve(window, window)
    assert budget.recall == found
    assert budget.rows == 2 * (window // 10) - found


@pytest.mark.parametrize("recall", [None, 0, 0.02, 30, 180])
@pytest.mark.parametrize("positions", [8192, 1000])
@pytest.mark.parametrize("rows", [(100, 100), (0, 200), (0.5, 0.5)], ids=str)
def test_saved_settings_give_the_same_row_counts(
    recall: float | None, positions: int, rows: tuple[float, float]
) -> None:
    budget = EvictionSettings(hh=rows[0], recent=rows[1], recall=recall).resolve(1000, positions)
    saved = budget.saved()
    again = {name: saved[key] for name, key in saved_names().items()}
    other = EvictionSettings(**again).resolve(1000, positions)
    assert replace(other, settings=budget.settings) == budget
    assert other.saved() == saved


def test_default_slack_fills_the_last_block_of_cells() -> None:
    for window in (512, 2048, 8192, 100_000):
        budget = EvictionSettings().resolve(window, 100_000)
        assert budget.capacity == budget.cells
        least = max(64, budget.rows // 20)
        assert least <= budget.slack < least + 256


@pytest.mark.parametrize(
    ("settings", "window", "n_pos", "slack"),
    [
        ({}, 8192, 8192, 512),
        ({}, 100_000, 100_000, 992),  # larger than the default anyway
        ({"slack": 1}, 8192, 8192, 1),
        ({"slack": 100}, 8192, 8192, 100),
        ({}, 512, 8192, 512 - 90),
        ({}, 8192, 1600, 1600 - 1434),
        ({"hh": 0, "recent": 1.0, "recall": 0}, 512, 8192, 256),
    ],
    ids=str,
)
def test_default_slack_of_layers_on_a_gpu_is_larger(
    settings: dict[str, object], window: int, n_pos: int, slack: int
) -> None:
    """Whole batches, as far as window and positions allow; heavy rows are not reduced."""
    asked = EvictionSettings(**settings)  # type: ignore[arg-type]
    budget = asked.resolve(window, n_pos, on_gpu=True)
    assert budget.slack == slack
    assert budget.rows == asked.resolve(window, n_pos).rows


def test_the_whole_window_is_a_valid_budget() -> None:
    for hh, recent in ((0.5, 0.5), (0, 1.0)):
        budget = EvictionSettings(hh=hh, recent=recent).resolve(2048, 8192)
        assert (budget.rows, budget.recall) == (1792, 256)
        whole = EvictionSettings(hh=hh, recent=recent, recall=0).resolve(2048, 8192)
        assert whole.rows == 2048


def test_a_budget_beyond_the_positions_is_refused() -> None:
    budget = EvictionSettings(hh=0.5, recent=0.5, recall=0).resolve(2048, 2048)
    assert (budget.capacity, budget.recent, budget.slack) == (2048, 1024, 256)
    with pytest.raises(SettingsError, match="need more positions than the 2048"):
        EvictionSettings(hh=0.3, recent=0.3, recall=0).resolve(8192, 2048)


def test_a_small_fraction_is_at_least_one_row() -> None:
    assert EvictionSettings(hh=0.001, recent=0.001).resolve(100, 8192).rows == 2
    assert EvictionSettings(recall=0.001).resolve(100, 8192).recall == 1


def test_equal_policies_are_stored_with_the_same_text() -> None:
    for text in ("snap", "snap:queries=32", " snap : pool = 5 ", Snap()):
        settings = EvictionSettings(policy=text)  # type: ignore[arg-type]
        assert settings == EvictionSettings(policy=Snap())
        assert settings.policy == Snap()
    assert str(EvictionSettings().policy) == DEFAULT_POLICY


def test_saved_settings_are_valid_json() -> None:
    """Names and values in session files, which must not change."""
    settings = EvictionSettings(pinned=4, policy=Snap(pool=7), attention="ops", prefill="exact")
    saved = settings.resolve(1000, 8192).saved()
    assert saved == {
        "heavy": 100,  # including retrieved rows
        "recent": 100,
        "pinned": 4,
        "slack": 77,
        "policy": "snap:pool=7",
        "recall": 25,
        "recall_type": "q8_0",
        "n_pos": 8192,
    }
    assert json.loads(json.dumps(saved)) == saved


def test_a_window_without_room_for_text_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"16 tokens is too small: .* at least 32, or 0"):
        EvictionSettings().resolve(16, 8192)
    budget = EvictionSettings().resolve(32, 8192)
    assert (budget.rows, budget.recall) == (6, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "best"}, "unknown policy 'best': give one of h2o, "),
        ({"policy": "snap:pool=2"}, "snap: pool is 2: give an odd number"),
        ({"policy": None}, "policy is None: give a text"),
        ({"hh": 1.5}, "hh is 1.5: give a fraction of the window up to 1.0, or"),
        ({"recent": 0}, "recent is 0"),
        ({"hh": 0.0, "recent": 0.0}, "recent is 0"),
        ({"hh": -1}, "hh is -1"),
        ({"recent": -0.5}, "recent is -0.5"),
        ({"hh": 0.9, "recent": 0.9}, "larger than the window of 1000"),
        ({"hh": 2000}, "larger than the window of 1000"),
        ({"hh": 0.5, "recent": 0.5, "pinned": 4}, "larger than the window of 1000"),
        ({"pinned": -1}, "pinned is -1"),
        ({"pinned": 1.5}, "pinned is 1.5: give a count of 0 or more"),
        ({"slack": 0}, "slack is 0"),
        ({"slack": 1.5}, "slack is 1.5: give 1 or more cells"),
        ({"prefill_mib": 0.5}, "prefill_mib is 0.5: give 1 or more MiB"),
        ({"recall": -1}, "recall is -1: give"),
        ({"recall": 1.5}, "recall is 1.5: give"),
        ({"recall": 200}, "recall of 200 rows leaves no recent row of heavy 100 + recent 100"),
        ({"recall_type": "q5_0"}, "recall_type is 'q5_0': give one of f32, f16, q8_0, q4_0"),
        ({"recall_mib": 0}, "recall_mib is 0: give 1 or more MiB"),
        ({"hh": float("nan")}, "hh is nan"),
        ({"hh": True}, "hh is True: give"),
        ({"hh": "many"}, "hh is 'many'"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError) as error:
        EvictionSettings(**settings).resolve(1000, 8192)  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "\n" not in str(error.value)
