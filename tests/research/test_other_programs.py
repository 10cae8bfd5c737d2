"""OpenVINO GenAI beside this runtime, without its package."""

from __future__ import annotations

import pytest

from pyh2o.errors import MissingPackageError, SettingsError
from research.speed import openvino
from research.speed.openvino import eviction_parts


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino, "find_spec", lambda name: None)
    named = r"openvino-genai: .* -m pip install 'pyh2o-llm\[openvino\]'"
    with pytest.raises(MissingPackageError, match=named):
        openvino.check_packages()


@pytest.mark.parametrize(
    ("rows", "parts"),
    [(96, (32, 32, 96)), (127, (32, 32, 96)), (128, (32, 64, 128)), (1638, (32, 800, 1632))],
)
def test_budget_in_whole_blocks(rows: int, parts: tuple[int, int, int]) -> None:
    assert eviction_parts(rows) == parts


def test_budget_of_less_than_three_blocks() -> None:
    with pytest.raises(SettingsError, match="a --budget of 96 rows or more"):
        eviction_parts(95)
