"""The models in a repository of the hub, and the choice among their quantisations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePosixPath

from ..errors import ModelError
from .names import part_of, whole_name

PREFERRED = "Q4_K_M"

_QUANTISATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|FP?16|F32))(?=$|[-.])", re.IGNORECASE
)
# Other files: projectors for images, and statistics that quantisations were made with.
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True)
class HubFile:
    """A file of a repository; the hub may not have its hash."""

    path: str
    bytes: int
    sha256: str | None

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


@dataclass(frozen=True)
class HubModel:
    """A model of a repository.

    Attributes:
        path: in the repository, without ".gguf" and the number of the part.
        quantisation: in capitals; "" if the name has none.
        files: one, or all parts in order.
    """

    path: str
    quantisation: str
    files: tuple[HubFile, ...]

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def models_of(files: Iterable[HubFile]) -> list[HubModel]:
    """Return the complete models among the files of a repository, the smallest first."""
    found = [each for each in files if each.path.lower().endswith(".gguf")]
    found = sorted((each for each in found if not _NO_MODEL.search(each.name)), key=_place)
    models: dict[str, HubModel] = {}
    for (path, n_parts), group in groupby(found, key=lambda each: _place(each)[:2]):
        parts = tuple(group)
        if [_place(part)[2] for part in parts] == [*range(1, n_parts + 1)]:
            # a single file is preferred to parts of the same model
            models.setdefault(path, HubModel(path, quantisation_of(path), parts))
    return sorted(models.values(), key=lambda model: model.bytes)


def quantisation_of(path: str) -> str:
    """Return the quantisation in a file's name, or else in its folder's, or ""."""
    for name in reversed(PurePosixPath(path).parts):
        if found := _QUANTISATION.findall(name):
            return _label(found[-1])
    return ""


def choose(models: Sequence[HubModel], wanted: str | None) -> HubModel:
    """Return the model with a quantisation or file name; by default `PREFERRED` or the only one."""
    if wanted is None and len(models) == 1:
        return models[0]
    wanted = wanted or PREFERRED
    found = [each for each in models if each.quantisation == _label(wanted)]
    found = found or [each for each in models if _is_called(each, wanted)]
    problem = f"several models match {wanted}" if found else f"it has no {wanted}"
    if len(found) == 1:
        return found[0]
    choices = ", ".join(f"{_choice(each, models)} ({each.bytes / 1e9:.1f} GB)" for each in models)
    raise ModelError(f"{problem}: add one of these after a colon: {choices}")


def _place(file: HubFile) -> tuple[str, int, int]:
    """Return the path of a file's model, the number of its files, and which one this is."""
    stem = file.path[: -len(".gguf")]
    part, n_parts = part_of(stem)
    return whole_name(stem), n_parts, part


def _label(text: str) -> str:
    return text.upper().replace("FP16", "F16")


def _is_called(model: HubModel, wanted: str) -> bool:
    name = wanted.casefold().removesuffix(".gguf")
    return whole_name(name) in (model.name.casefold(), model.path.casefold())


def _choice(model: HubModel, models: Sequence[HubModel]) -> str:
    """Return a model's quantisation, or its path if another model has the same one."""
    same = [each for each in models if each.quantisation == model.quantisation]
    return model.quantisation if model.quantisation and len(same) == 1 else model.path
