"""A result file that grows with every measured unit and that a later run continues.

Its "basis" is what all its units have in common: a run with another basis is refused.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyh2o.errors import SettingsError
from pyh2o.system.files import replacement

FORMAT = "pyh2o eval"

# A measurement of one cache, as JSON.
Unit = dict[str, Any]


class ResultFile:
    """Units of one measurement by name, written to disk immediately.

    Attributes:
        units: those measured so far, by this run and by earlier ones.
        folder: for large temporary files.
    """

    def __init__(
        self, path: Path | None, kind: str, basis: Mapping[str, Any], machine: Mapping[str, Any]
    ) -> None:
        """Start a file, or continue an existing one.

        Args:
            path: of the JSON; None keeps everything in memory.
            kind: of measurement: the name of its command.
            basis: settings that make units comparable, with names for users.
            machine: where this run takes place.

        Raises:
            SettingsError: the file is something else, or its units have another basis.
        """
        self._path = path
        self._head = json.loads(json.dumps({"format": FORMAT, "kind": kind, "basis": basis}))
        self._machine = dict(machine)
        self.units: dict[str, Unit] = {}
        self.folder = Path(tempfile.gettempdir()) if path is None else path.absolute().parent
        if path is not None and path.exists():
            self._read(path)

    def add(self, name: str, unit: Unit) -> None:
        """Add a unit and write the file."""
        self.units[name] = unit
        if self._path is not None:
            data = {**self._head, "machine": self._machine, "units": self.units}
            text = json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
            with replacement(self._path, prefix=".pyh2o-eval-") as file:
                file.write(text.encode("utf-8", errors="replace"))

    def _read(self, path: Path) -> None:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            mine = data["format"] == FORMAT and data["kind"] == self._head["kind"]
            basis, self.units = {**data["basis"]}, {**data["units"]}
        except (ValueError, LookupError, TypeError):
            mine = False
        if not mine:
            raise SettingsError(f"{path} is not a file of this measurement: give another --json")
        own = self._head["basis"]
        for name in {**own, **basis}:
            if basis.get(name) != own.get(name):
                raise SettingsError(
                    f"{path} was measured with {name} {basis.get(name)}, and this run has "
                    f"{own.get(name)}: give the same, or another --json"
                )
