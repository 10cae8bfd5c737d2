"""Prometheus metrics of a server, and the state of its slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ClosedError
from .models import ServedModels
from .served_model import ServedModel

# Number of responses by route and status.
Answered = Counter[tuple[str, int]]

# Metrics of each model that generates text: help, and attribute of the engine.
GAUGES = {
    "requests_running": ("Requests in a slot.", "n_running"),
    "requests_waiting": ("Requests waiting for a slot.", "n_waiting"),
    "slots": ("Slots, each of which serves one request at a time.", "n_slots"),
    "stored_texts": ("Snapshots of texts in the prefix cache.", "stored.texts"),
    "stored_bytes": ("Bytes of these snapshots.", "stored.bytes"),
}
COUNTERS = {
    "cached_prompt_tokens": ("Prompt tokens found in the cache.", "usage.cached"),
    "generated_tokens": ("Tokens sampled, including end tokens.", "usage.sampled"),
    "batches": ("Batches decoded.", "batches.batches"),
    "batch_texts": ("Texts in all batches: a text counts once per batch.", "batches.texts"),
    "batch_tokens": ("Tokens in all batches.", "batches.tokens"),
    "batch_seconds": ("Seconds spent decoding batches.", "batches.seconds"),
    "texts_moved_out": ("Texts moved from their slot to the prefix cache.", "stored.moved_out"),
    "texts_moved_in": ("Texts restored from the prefix cache to a slot.", "stored.moved_in"),
    "texts_dropped": ("Texts dropped from the prefix cache to free memory.", "stored.dropped"),
}  # fmt: skip


class AnswerCounter:
    def __init__(self, app: ASGIApp, answered: Answered) -> None:
        self._app = app
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # unknown paths share one label: their number has no limit
                route = getattr(scope.get("route"), "path", "none")
                self._answered[route, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted)


class Figures:
    def __init__(self, models: ServedModels, answered: Answered) -> None:
        self._models = models
        self._answered = answered

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, after the current batch."""
        responses = CounterMetricFamily(
            "pyh2o_responses", "Responses, by route and status.", labels=["route", "status"]
        )
        for (route, status), n in sorted(self._answered.copy().items()):
            responses.add_metric([route, str(status)], n)
        yield responses
        loaded = _of_models(GaugeMetricFamily, "model_loaded", "Whether the model is loaded.")
        for source in self._models.sources:
            loaded.add_metric([source.name], source.model is not None)
        yield loaded
        models = self._models.loaded()
        prompts = _of_models(CounterMetricFamily, "prompt_tokens", "Tokens of prompts.")
        for model in models:
            prompts.add_metric([model.name], model.prompt_tokens)
        yield prompts
        engines = {model.name: model.engine for model in models if isinstance(model, ServedModel)}
        for family, figures in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for figure, (meaning, where) in figures.items():
                metric = _of_models(family, figure, meaning)
                for name, engine in engines.items():
                    metric.add_metric([name], attrgetter(where)(engine))
                yield metric
        n_bytes = _of_models(
            GaugeMetricFamily, "cache_bytes", "Bytes of the caches and archives of all slots."
        )
        for name, engine in engines.items():
            with suppress(ClosedError):  # closed to free memory for another model
                caches = [slot.kv for slot in engine.report()]
                total = sum(kv.bytes_total + kv.bytes_archive for kv in caches)
                n_bytes.add_metric([name], total)
        yield n_bytes


def _of_models(family: Callable[..., Any], name: str, meaning: str) -> Any:
    return family(f"pyh2o_{name}", meaning, labels=["model"])


def kv_json(models: ServedModels) -> dict[str, Any]:
    """Return the state of each slot as JSON, after the current batch."""
    slots: list[dict[str, Any]] = []
    for model in models.loaded():
        if not isinstance(model, ServedModel):
            continue
        with suppress(ClosedError):  # closed to free memory for another model
            slots += [
                {
                    "model": model.name,
                    "slot": number,
                    "state": "running" if slot.running else "idle",
                    "tokens": slot.kv.position,
                    "rows": slot.kv.used,
                    "archived": slot.kv.archived,
                    "recalled": [list(span) for span in slot.recalled],
                    "bytes": slot.kv.bytes_total + slot.kv.bytes_archive,
                }
                for number, slot in enumerate(model.engine.report())
            ]
    return {"object": "list", "data": slots}
