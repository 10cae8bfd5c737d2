"""Files of results: resumed, or refused where another run has written them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from measured import results
from pyh2o.errors import SettingsError


def test_file_of_another_run_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    results(target).add("one", {"nll": [0.1, 0.2]})
    assert results(target).units == {"one": {"nll": [0.1, 0.2]}}
    data = json.loads(target.read_text())
    for changed in ({**data, "basis": {"--seed": 2}}, {**data, "kind": "y"}, []):
        content = json.dumps(changed)
        target.write_text(content)
        with pytest.raises(SettingsError, match=r"with --seed 2|is not a file of this measurement"):
            results(target)
        assert target.read_text() == content
