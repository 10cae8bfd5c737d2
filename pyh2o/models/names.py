"""The list of models, and looking up a model by name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from ..system.home import expanded
from .folder import models_folder
from .packaged import DEMO, PACKAGED, PackagedModel

# llama.cpp's names of the files of a model in several files. Some models that were split later have
# ".gguf" twice.
_PART = re.compile(r"(?:\.gguf)?-(\d{5})-of-(\d{5})$")
_SUFFIX = ".gguf"


@dataclass(frozen=True)
class ModelFile:
    """A model (the first of its files) in the models folder, or one that can be fetched into it."""

    path: Path
    bytes: int
    fetched: bool
    packaged: PackagedModel | None = None

    @property
    def name(self) -> str:
        """Name on the command line."""
        return self.packaged.name if self.packaged else whole_name(self.path.stem)


def whole_name(stem: str) -> str:
    """Return a model's name from the name of one of its files without ".gguf"."""
    return _PART.sub("", stem)


def readable_name(name: str) -> str:
    """Return a file's name with bytes that are not UTF-8 replaced."""
    return os.fsencode(name).decode(errors="replace")


def part_of(stem: str) -> tuple[int, int]:
    """Return which file this is, from 1, and of how many; (1, 1) for a single file."""
    found = _PART.search(stem)
    return (int(found[1]), int(found[2])) if found else (1, 1)


def demo_model_path() -> Path:
    return DEMO.path


def find_model(wanted: str | os.PathLike[str] | None) -> Path:
    """Return the path of a model; nothing is downloaded, and the file is not opened.

    Args:
        wanted: a path, or the name of a model of `list_models` or its unambiguous beginning, or
            None for the demo model. A file takes precedence over a model's name.

    Raises:
        ModelError: no or several models match, or the model is not fetched yet.
    """
    if wanted is None:
        return _there(DEMO)
    path = expanded(wanted)
    if path.is_file():
        return path
    name = os.fspath(wanted)
    if name in PACKAGED:
        return _there(PACKAGED[name])
    if not name or os.sep in name:
        return path
    found = _named(name)
    if found is None and not path.exists() and path.suffix.lower() != _SUFFIX:
        raise ModelError(
            f"there is no model {name}: give a GGUF file, or a name from `pyh2o models list`"
        )
    return found or path


def list_models() -> list[ModelFile]:
    """Return the models that can be fetched by name, then the others of the models folder."""
    models = [
        ModelFile(model.path, model.bytes, model.path.is_file(), model)
        for model in PACKAGED.values()
    ]
    known = {model.path for model in models}
    for path in sorted(models_folder().glob("[!.]*")):
        part, n_parts = part_of(path.stem)
        is_model = path.suffix.lower() == _SUFFIX and path not in known and path.is_file()
        if is_model and part == 1:
            models.append(ModelFile(path, _bytes_of(path, n_parts), fetched=True))
    return models


def model_names() -> list[str]:
    return [model.name for model in list_models() if model.fetched]


def _there(model: PackagedModel) -> Path:
    if not model.path.is_file():
        called = "the demo model" if model.name == DEMO.name else f"the model {model.name}"
        raise ModelError(
            f"{called} is not here yet: run `{model.fetch_command}`, or give --model FILE"
        )
    return model.path


def _named(text: str) -> Path | None:
    """Return the model whose name or file name is or begins with `text`."""
    models = {name: model for model in list_models() for name in (model.path.stem, model.name)}
    is_file_name = text.lower().endswith(_SUFFIX)
    wanted = text.casefold().removesuffix(_SUFFIX)
    exact = [model for name, model in models.items() if name.casefold() == wanted]
    begun = [model for name, model in models.items() if name.casefold().startswith(wanted)]
    # file names must be complete
    found = set(exact or ([] if is_file_name else begun))
    found = {model for model in found if model.fetched} or found
    if len(found) > 1:
        names = " or ".join(sorted(model.name for model in found))
        raise ModelError(f"several models match {text}: give more of the name, {names}")
    for model in found:
        return model.path if model.packaged is None else _there(model.packaged)
    return None


def _bytes_of(first: Path, n_parts: int) -> int:
    names = (first.name.replace("-00001-of-", f"-{part:05}-of-") for part in range(1, n_parts + 1))
    parts = [first.with_name(name) for name in names]
    return sum(part.stat().st_size for part in parts if part.is_file())
