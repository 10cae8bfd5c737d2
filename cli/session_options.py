"""Goes on with a session without being told again how it was started."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from pyh2o.cache.settings import UNLIMITED_MIB, EvictionSettings, saved_names
from pyh2o.errors import SettingsError
from pyh2o.models import models_folder
from pyh2o.policies import POLICIES

from .errors import InputError
from .options import KVType, RunOptions


def typed_options(context: typer.Context) -> set[str]:
    """Names of the options that the user typed on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def saved_options(
    options: RunOptions,
    given: Collection[str],
    header: Mapping[str, Any],
    *,
    reread: bool,
    changes: str = "system prompt and sampling",
) -> RunOptions:
    """The options that a session was made with, but for those that were given.

    Args:
        options: the options as they are, with defaults.
        given: names of those that the user typed. One that differs from the session's stays, and
            the session is then refused with the reason.
        header: of the session file.
        reread: whether the session's text is read again, under any model and cache.
        changes: what can be given to any session, for a person.

    Raises:
        InputError: one was given that the session would pass over.
    """
    model, settings, places = (header.get(name) for name in ("model", "settings", "places"))
    if not isinstance(model, dict) or not isinstance(settings, dict):
        return options  # damaged, which is found out when it is loaded
    no_evict = settings.get("evict") is False
    passed_over = set(saved_names()) if no_evict and not reread else set[str]()
    if isinstance(places, dict) and places.get("fair_turns") is False:
        passed_over.add("fair_turns")
    typed = sorted(passed_over.intersection(given))
    if typed:
        raise InputError(
            f"--{typed[0].replace('_', '-')} cannot be given to this session: model and cache stay "
            f"what they were, {changes} can be changed; start a new session for it"
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


def with_limit(options: RunOptions) -> RunOptions:
    """With the usual limit of an archive in memory, where the options have none."""
    if options.eviction.recall_mib != UNLIMITED_MIB:
        return options
    return replace(options, eviction=replace(options.eviction, recall_mib=None))


def sampling_given(options: RunOptions, given: Collection[str]) -> dict[str, Any]:
    """The settings of sampling that were typed, by their names in `Sampling`."""
    return {name: value for name, value in vars(options.sampling).items() if name in given}


def _eviction(
    settings: EvictionSettings, given: Collection[str], saved: Mapping[str, Any]
) -> EvictionSettings:
    """Those that were saved, but for what was given."""
    values = {
        name: saved[saved_name]
        for name, saved_name in saved_names().items()
        if name not in given and saved_name in saved
    }
    if str(values.get("policy", "h2o")).partition(":")[0] not in POLICIES:
        del values["policy"]  # a class in some file: whoever wants that gives the file again
    try:
        return replace(settings, **values)
    except SettingsError:
        return settings  # damaged, as above


def _find(model: dict[str, Any]) -> Path | None:
    """The model file, where it was or where models are."""
    name = str(model.get("file") or "")
    places = [Path(str(model.get("path") or name)), models_folder() / name, Path(name)]
    return next((place.absolute() for place in places if name and place.is_file()), None)
