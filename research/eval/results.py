"""A file of results that grows with every unit that is measured, and that a later run goes on with.

It has what all its units have in common under "basis": a run whose basis is another is refused.
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

# What was measured of one cache at once, fit for JSON.
Unit = dict[str, Any]


class ResultFile:
    """Units of one measurement by their names, on the disk as soon as they are there.

    Attributes:
        units: those measured so far, by this run and by earlier ones.
        folder: where large files can be put while something is measured.
    """

    def __init__(
        self, path: Path | None, kind: str, basis: Mapping[str, Any], machine: Mapping[str, Any]
    ) -> None:
        """Begin a file, or go on with the one that is there.

        Args:
            path: of the JSON; None keeps everything in memory.
            kind: of measurement: the name of its command.
            basis: settings without which units cannot be compared, by the names that people know.
            machine: where this run takes place.

        Raises:
            SettingsError: the file is something else, or its units were measured otherwise.
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
            raise SettingsError(
                f"{path} exists and is no file of this measurement: give another --json"
            )
        own = self._head["basis"]
        for name in {**own, **basis}:
            if basis.get(name) != own.get(name):
                raise SettingsError(
                    f"{path} was measured with {name} {basis.get(name)}, and this run has "
                    f"{own.get(name)}: give the same, or another --json"
                )
