"""Restore the options of a session that is resumed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from pyh2o.cache.settings import EvictionSettings, saved_names
from pyh2o.errors import SettingsError
from pyh2o.models import models_folder
from pyh2o.policies import POLICIES

from .errors import InputError
from .options import KVType, RunOptions


def typed_options(context: typer.Context) -> set[str]:
    """Return the names of the options that were typed on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def saved_options(
    options: RunOptions,
    given: Collection[str],
    header: Mapping[str, Any],
    *,
    changes: str = "system prompt and sampling",
) -> RunOptions:
    """Return the options of a session, overridden by those that were typed.

    Args:
        options: options with defaults.
        given: names of the typed options. If one differs from the session's, its text is read
            again.
        header: the settings of the text in the database.
        changes: settings that any session can change, for the error message.

    Raises:
        InputError: the session would ignore a typed option.
    """
    model, settings, places = (header.get(name) for name in ("model", "settings", "places"))
    if not isinstance(model, dict) or not isinstance(settings, dict):
        return options  # a damaged file: loading it reports the error
    no_evict = settings.get("evict") is False
    ignored = set[str]()
    if isinstance(places, dict) and places.get("fair_turns") is False:
        ignored.add("fair_turns")
    typed = sorted(ignored.intersection(given))
    if typed:
        raise InputError(
            f"--{typed[0].replace('_', '-')} cannot be changed in this session, only {changes} "
            "can: start a new session"
        )
    no_evict = no_evict and not saved_names().keys() & given
    saved: dict[str, Any] = {
        "eviction": _eviction(options.eviction, given, settings),
        "no_evict": no_evict,
    }
    if "ctx" in settings:
        saved["ctx"] = settings["ctx"]
    if settings.get("type_k") in KVType.__members__:
        saved["kv_type"] = KVType(settings["type_k"])
    if found := _find(model):
        saved["model"] = found
    return replace(options, **{name: saved[name] for name in saved if name not in given})


def sampling_given(options: RunOptions, given: Collection[str]) -> dict[str, Any]:
    """Return the sampling settings that were typed, by their names in `Sampling`."""
    return {name: value for name, value in vars(options.sampling).items() if name in given}


def _eviction(
    settings: EvictionSettings, given: Collection[str], saved: Mapping[str, Any]
) -> EvictionSettings:
    """Return the saved settings, overridden by those that were typed."""
    values = {
        name: saved[saved_name]
        for name, saved_name in saved_names().items()
        if name not in given and saved_name in saved
    }
    if str(values.get("policy", "h2o")).partition(":")[0] not in POLICIES:
        del values["policy"]  # a class in a file, which the user must give again
    try:
        return replace(settings, **values)
    except SettingsError:
        return settings  # a damaged file


def _find(model: dict[str, Any]) -> Path | None:
    """Return the path of the model file, at its old place or in the models folder."""
    name = str(model.get("file") or "")
    places = [Path(str(model.get("path") or name)), models_folder() / name, Path(name)]
    return next((place.absolute() for place in places if name and place.is_file()), None)
