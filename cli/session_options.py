"""Goes on with a session without being told again how it was started."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import typer

from pyh2o.cache.settings import Positions
from pyh2o.generation.sampling import Sampling
from pyh2o.models import models_folder

from .options import KVType, RunOptions

# Options by the names that session files have for the settings of the cache.
CACHE = {
    "ctx": "ctx",
    "hh": "heavy",
    "recent": "recent",
    "pinned": "pinned",
    "slack": "slack",
    "policy": "policy",
    "positions": "positions",
}
SAMPLING = {"temperature": "temp"}


def typed_options(context: typer.Context) -> set[str]:
    """Names of the options that the user typed on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def options_of_header(
    options: RunOptions, given: Collection[str], header: Mapping[str, Any]
) -> RunOptions:
    """The options that a session was made with, but for those that were given.

    Args:
        options: the options as they are, with defaults.
        given: names of those that the user typed. One that differs from the session's stays, and
            the session is then refused with the reason.
        header: of the session file.
    """
    model, settings = header.get("model"), header.get("settings")
    if not isinstance(model, dict) or not isinstance(settings, dict):
        return options  # damaged, which is found out when it is loaded
    saved: dict[str, Any] = {
        option: settings[name] for option, name in CACHE.items() if name in settings
    }
    saved["no_evict"] = settings.get("evict") is False
    if settings.get("type_k") in KVType.__members__:
        saved["kv_type"] = KVType(settings["type_k"])
    if settings.get("positions") in get_args(Positions):
        saved["positions"] = settings["positions"]
    if found := _find(model):
        saved["model"] = found
    return replace(options, **{name: saved[name] for name in saved if name not in given})


def sampling_given(options: RunOptions, given: Collection[str]) -> dict[str, Any]:
    """The settings of sampling that were typed, by their names in `Sampling`."""
    options_of = {field.name: SAMPLING.get(field.name, field.name) for field in fields(Sampling)}
    return {
        name: getattr(options, option) for name, option in options_of.items() if option in given
    }


def _find(model: dict[str, Any]) -> Path | None:
    """The model file, where it was or where models are."""
    name = str(model.get("file") or "")
    places = [Path(str(model.get("path") or name)), models_folder() / name, Path(name)]
    return next((place.absolute() for place in places if name and place.is_file()), None)
