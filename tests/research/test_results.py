"""Files of results: written at once, gone on with, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from measured import results
from pyh2o.errors import SettingsError


def test_results_are_on_the_disk_at_once(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    file = results(target, with_arrays=True)
    assert not target.exists()
    file.add("one", {"value": 1.5}, {"nll": np.arange(3)})
    again = results(target, with_arrays=True)
    assert again.units == {"one": {"value": 1.5}}
    np.testing.assert_array_equal(again.arrays("one")["nll"], [0, 1, 2])
    assert again.has("one", "nll")
    assert not again.has("one", "kl")
    assert not json.loads(target.read_text())["complete"]
    again.finish({"tokens": 3}, [{"mean": 1}], ("a note",), complete=True)
    data = json.loads(target.read_text())
    assert data["complete"]
    assert (data["summary"], data["notes"]) == ([{"mean": 1}], ["a note"])
    assert data["units"] == {"one": {"value": 1.5}}


def damage(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_text("mine"), "exists and is no file of pyh2o eval"),
        (lambda path: path.write_text("[1]"), "exists and is no file of pyh2o eval"),
        (damage(lambda data: data.update(format="x")), "exists and is no file of pyh2o eval"),
        (damage(lambda data: data.update(version=2)), "has format version 2"),
        (damage(lambda data: data.update(kind="y")), "is of `pyh2o eval y`"),
        (damage(lambda data: data["basis"].update({"--seed": 2})), "with --seed 2, and .* has 1"),
        (damage(lambda data: data["basis"].update(a="b")), "with a b, and this run has null"),
        (damage(lambda data: data.pop("units")), "is damaged"),
        (lambda path: path.with_suffix(".npz").write_bytes(b"PK\x03\x04"), "a.npz is damaged"),
    ],
)
def test_files_that_do_not_fit(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    target = tmp_path / "a.json"
    results(target, with_arrays=True).add("one", {}, {"nll": np.arange(3)})
    change(target)
    content = target.read_bytes()
    with pytest.raises(SettingsError, match=message):
        results(target, with_arrays=True)
    assert target.read_bytes() == content


def test_arrays_of_something_else_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_text("mine")
    with pytest.raises(SettingsError, match=r"a\.npz exists and .*a\.json does not"):
        results(tmp_path / "a.json", with_arrays=True)
    results(tmp_path / "a.json")
