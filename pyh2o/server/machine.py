"""Memory of this machine and models on it, for the page's choice of a model."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ..core.recommended import recommend
from ..models.names import list_models, readable_name, whole_name
from .answers import models_of
from .requests import CheckedRoute
from .served_model import ServedModel

machine_routes = APIRouter(route_class=CheckedRoute)


@machine_routes.get("/v1/machine")
def _machine(request: Request) -> dict[str, Any]:
    sources = models_of(request).sources
    served = [
        {
            "name": source.name,
            "bytes": source.identity.bytes if source.identity else source.needed_bytes,
            "writes": not source.embeds,
            **(source.model.senses if isinstance(source.model, ServedModel) else {}),
        }
        for source in sources
    ]
    names = {source.name for source in sources}
    others = [model for model in list_models() if whole_name(model.path.stem) not in names]
    packaged = [
        {"title": model.packaged.title, "name": model.name, "file_bytes": model.bytes}
        for model in others
        if model.packaged and not model.fetched
    ]
    recommended = recommend().record()
    return {
        **recommended,
        "served": served,
        "here": [
            {"name": readable_name(each.name), "bytes": each.bytes}
            for each in others
            if each.fetched
        ],
        "models": [*packaged, *recommended["models"]],
    }
