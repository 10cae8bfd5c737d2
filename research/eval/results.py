"""A file of results that grows with every unit that is measured, and that a later run goes on with.

The JSON has what all its units have in common under "basis": a run whose basis is another is
refused. Arrays, which are too large for JSON, lie beside it in a compressed .npz file.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyh2o.errors import SettingsError
from pyh2o.system.files import replacement

FORMAT = "pyh2o eval"
FORMAT_VERSION = 1

_TEMPORARY = ".pyh2o-eval-"

Unit = dict[str, Any]
Arrays = Mapping[str, npt.NDArray[Any]]


class ResultFile:
    """Units of one measurement by their names, on the disk as soon as they are there.

    Attributes:
        units: those measured so far, by this run and by earlier ones.
    """

    def __init__(
        self,
        path: Path | None,
        kind: str,
        basis: Mapping[str, Any],
        machine: Mapping[str, Any],
        *,
        with_arrays: bool = False,
    ) -> None:
        """Begin a file, or go on with the one that is there.

        Args:
            path: of the JSON; None keeps everything in memory.
            kind: of measurement: the name of its command.
            basis: settings without which units cannot be compared, by the names that people know.
            machine: where this run takes place.
            with_arrays: whether units will have arrays.

        Raises:
            SettingsError: the file is something else, or its units were measured otherwise.
        """
        self._path = path
        self._kind = kind
        self._basis = json.loads(json.dumps(basis))
        self._machine = dict(machine)
        self._settings: dict[str, Any] = {}
        self._summary: list[Unit] = []
        self._notes: list[str] = []
        self.units: dict[str, Unit] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        if path is not None and path.exists():
            self._read(path)
        elif with_arrays and self._arrays_path is not None and self._arrays_path.exists():
            raise SettingsError(
                f"{self._arrays_path} exists and {path} does not, whose arrays it would hold: give "
                "another --json"
            )

    @property
    def folder(self) -> Path:
        """Where large files can be put while something is measured."""
        return Path(tempfile.gettempdir()) if self._path is None else self._path.parent

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a unit."""
        prefix = f"{name}/"
        return {
            key.removeprefix(prefix): array
            for key, array in self._arrays.items()
            if key.startswith(prefix)
        }

    def has(self, name: str, *arrays: str) -> bool:
        """Whether a unit is there, with its arrays."""
        return name in self.units and all(f"{name}/{key}" in self._arrays for key in arrays)

    def add(self, name: str, unit: Unit, arrays: Arrays | None = None) -> None:
        """Add a unit and write the file."""
        self.units[name] = unit
        for key, array in (arrays or {}).items():
            self._arrays[f"{name}/{key}"] = array
        if arrays:
            self._write_arrays()
        self._write(complete=False)

    def finish(
        self,
        settings: Mapping[str, Any],
        summary: list[Unit],
        notes: tuple[str, ...],
        *,
        complete: bool,
    ) -> None:
        """Write what the units come to.

        Args:
            settings: what was asked for.
            summary: figures of the tables.
            notes: what to know when reading them.
            complete: whether all was measured that was asked for.
        """
        self._settings, self._summary, self._notes = dict(settings), summary, list(notes)
        self._write(complete=complete)

    @property
    def _arrays_path(self) -> Path | None:
        return None if self._path is None else self._path.with_suffix(".npz")

    def _write(self, *, complete: bool) -> None:
        if self._path is None:
            return
        data = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "kind": self._kind,
            "basis": self._basis,
            "machine": self._machine,
            "complete": complete,
            "settings": self._settings,
            "notes": self._notes,
            "summary": self._summary,
            "units": self.units,
        }
        text = json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        with replacement(self._path, prefix=_TEMPORARY) as file:
            file.write(text.encode("utf-8", errors="replace"))

    def _write_arrays(self) -> None:
        if self._arrays_path is not None:
            with replacement(self._arrays_path, prefix=_TEMPORARY) as file:
                np.savez_compressed(file, **self._arrays)  # type: ignore[arg-type]

    def _read(self, path: Path) -> None:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            data = None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise SettingsError(f"{path} exists and is no file of pyh2o eval: give another --json")
        if data.get("version") != FORMAT_VERSION:
            raise SettingsError(
                f"{path} has format version {data.get('version')}, and this pyh2o reads "
                f"{FORMAT_VERSION}: give another --json"
            )
        if data.get("kind") != self._kind:
            raise SettingsError(
                f"{path} is of `pyh2o eval {data.get('kind')}`: give another --json"
            )
        basis, units = data.get("basis"), data.get("units")
        if not isinstance(basis, dict) or not isinstance(units, dict):
            raise SettingsError(f"{path} is damaged (it has no basis or no units): remove it")
        for name in {**self._basis, **basis}:
            theirs, own = basis.get(name), self._basis.get(name)
            if theirs != own:
                raise SettingsError(
                    f"{path} was measured with {name} {_shown(theirs)}, and this run has "
                    f"{_shown(own)}: give the same, or another --json"
                )
        self.units = units
        self._arrays = self._read_arrays()

    def _read_arrays(self) -> dict[str, npt.NDArray[Any]]:
        path = self._arrays_path
        if path is None or not path.exists():
            return {}
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise SettingsError(f"{path} is damaged ({error}): remove it") from error


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
