"""What this machine has for whoever chooses a model: its memory, and models beside those served."""

from __future__ import annotations

from typing import Any

import psutil
from fastapi import APIRouter, Request

from ..models.names import list_models, whole_name
from ..system.memory import available_bytes, memory_limits
from .answers import models_of
from .requests import CheckedRoute

machine_routes = APIRouter(route_class=CheckedRoute)


@machine_routes.get("/v1/machine")
def _machine(request: Request) -> dict[str, Any]:
    sources = models_of(request).sources
    names = {source.name for source in sources}
    served = [
        {
            "name": source.name,
            "state": "served",
            "bytes": source.identity.bytes if source.identity else source.needed_bytes,
            "writes": not source.embeds,
        }
        for source in sources
    ]
    others = [
        {
            "name": model.name,
            "state": "here" if model.fetched else "to fetch",
            "bytes": model.bytes,
            "title": model.packaged.title if model.packaged else model.name,
            "command": model.packaged.fetch_command if model.packaged else "",
        }
        for model in list_models()
        if whole_name(model.path.stem) not in names
    ]
    limits = (limit.bytes for limit in memory_limits())
    return {
        "memory": min((psutil.virtual_memory().total, *limits)),
        "free": available_bytes(),
        "models": [*served, *others],
    }
