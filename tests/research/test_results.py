"""Files of results: written at once, gone on with, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from measured import results
from pyh2o.errors import SettingsError


def test_results_are_on_the_disk_at_once(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    file = results(target)
    assert not target.exists()
    file.add("one", {"value": 1.5, "nll": [0.1, 0.2]})
    again = results(target)
    assert again.units == {"one": {"value": 1.5, "nll": [0.1, 0.2]}}
    again.add("two", {})
    assert json.loads(target.read_text())["units"] == {**file.units, "two": {}}
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


def damage(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_text("mine"), "exists and is no file of this measurement"),
        (lambda path: path.write_text("[1]"), "exists and is no file of this measurement"),
        (damage(lambda data: data.update(format="x")), "is no file of this measurement"),
        (damage(lambda data: data.update(kind="y")), "is no file of this measurement"),
        (damage(lambda data: data["basis"].update({"--seed": 2})), "with --seed 2, and .* has 1"),
        (damage(lambda data: data["basis"].update(a="b")), "with a b, and this run has None"),
        (damage(lambda data: data.pop("units")), "is no file of this measurement"),
    ],
)
def test_files_that_do_not_fit(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    target = tmp_path / "a.json"
    results(target).add("one", {})
    change(target)
    content = target.read_bytes()
    with pytest.raises(SettingsError, match=message):
        results(target)
    assert target.read_bytes() == content
