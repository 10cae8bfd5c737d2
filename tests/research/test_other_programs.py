"""OpenVINO GenAI and Hugging Face transformers beside this runtime, without their packages."""

from __future__ import annotations

import pytest

from pyh2o.errors import MissingPackageError, SettingsError
from research.speed import openvino, transformers
from research.speed.openvino import eviction_parts


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, named in (
        (openvino, r"openvino-genai: pip install 'pyh2o-llm\[openvino\]'"),
        (transformers, r"torch.*pip install 'pyh2o-llm\[compare\]'"),
    ):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
        with pytest.raises(MissingPackageError, match=named):
            module.check_packages()
    assert not transformers.has_kvpress()


@pytest.mark.parametrize(
    ("rows", "parts"),
    [(96, (32, 32, 96)), (127, (32, 32, 96)), (128, (32, 64, 128)), (1638, (32, 800, 1632))],
)
def test_budget_in_whole_blocks(rows: int, parts: tuple[int, int, int]) -> None:
    assert eviction_parts(rows) == parts


def test_budget_of_less_than_three_blocks() -> None:
    with pytest.raises(SettingsError, match="a --budget of 96 rows or more"):
        eviction_parts(95)
