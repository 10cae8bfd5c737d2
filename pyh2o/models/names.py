"""Which models there are, and which of them a name means."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from ..system.home import expanded
from .folder import models_folder
from .packaged import DEMO, PACKAGED, PackagedModel

# How llama.cpp names the files of a model in several; it is given the first. Some that were cut
# after they had a name have its ending twice.
_PART = re.compile(r"(?:\.gguf)?-(\d{5})-of-(\d{5})$")
_SUFFIX = ".gguf"


@dataclass(frozen=True)
class ModelFile:
    """A model of the models folder, or one that can be fetched into it.

    Attributes:
        path: the GGUF file, the first of a model in several.
        bytes: of all its files.
        fetched: whether it is there.
        packaged: where it comes from, if that is a package.
    """

    path: Path
    bytes: int
    fetched: bool
    packaged: PackagedModel | None = None

    @property
    def name(self) -> str:
        """What the command line calls it."""
        return self.packaged.name if self.packaged else whole_name(self.path.stem)


def whole_name(stem: str) -> str:
    """The name of a model of which a file has this name, without the ending."""
    return _PART.sub("", stem)


def readable_name(name: str) -> str:
    """A file's name as Unicode: bytes that are not UTF-8 are replaced."""
    return os.fsencode(name).decode(errors="replace")


def part_of(stem: str) -> tuple[int, int]:
    """Which file of how many this is, counted from 1: (1, 1) for a model in one."""
    found = _PART.search(stem)
    return (int(found[1]), int(found[2])) if found else (1, 1)


def demo_model_path() -> Path:
    """Where the demo model is once it is fetched."""
    return DEMO.path


def find_model(wanted: str | os.PathLike[str] | None) -> Path:
    """The model file that is wanted; nothing is downloaded.

    Whether the file holds a model is for `Llama` to find out.

    Args:
        wanted: a path, or the name of a model of `list_models`, of which an unambiguous beginning
            is enough, or None for the demo model. A file that is called like a model comes first.

    Raises:
        ModelError: the name of no model, or the beginning of several, or a model that can be
            fetched is wanted, and is not fetched yet.
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
    """The models that can be fetched, then every other one of the models folder by name."""
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
    """What `find_model` knows the models by that are there."""
    return [model.name for model in list_models() if model.fetched]


def _there(model: PackagedModel) -> Path:
    """Where a model is that can be fetched.

    Raises:
        ModelError: it is not fetched yet.
    """
    if not model.path.is_file():
        called = "the demo model" if model.name == DEMO.name else f"the model {model.name}"
        raise ModelError(
            f"{called} is not here yet: run `{model.fetch_command}`, or give --model FILE"
        )
    return model.path


def _named(text: str) -> Path | None:
    """The model that a name, its file's name or the beginning of one of them means.

    Raises:
        ModelError: it may be several, or is not fetched yet.
    """
    models = {name: model for model in list_models() for name in (model.path.stem, model.name)}
    is_file_name = text.lower().endswith(_SUFFIX)
    wanted = text.casefold().removesuffix(_SUFFIX)
    exact = [model for name, model in models.items() if name.casefold() == wanted]
    begun = [model for name, model in models.items() if name.casefold().startswith(wanted)]
    # With the ending it is the name of a file, and those are given in full.
    found = set(exact or ([] if is_file_name else begun))
    found = {model for model in found if model.fetched} or found
    if len(found) > 1:
        names = " or ".join(sorted(model.name for model in found))
        raise ModelError(f"{text} may be {names}: give more of the name")
    for model in found:
        return model.path if model.packaged is None else _there(model.packaged)
    return None


def _bytes_of(first: Path, n_parts: int) -> int:
    """The size of a model of which this is the first file, as far as it is there."""
    names = (first.name.replace("-00001-of-", f"-{part:05}-of-") for part in range(1, n_parts + 1))
    parts = [first.with_name(name) for name in names]
    return sum(part.stat().st_size for part in parts if part.is_file())
