"""What is told of a server's work: figures for Prometheus, and what the places of texts hold."""

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

# How often a route was answered with a status.
Answered = Counter[tuple[str, int]]


# Of each model that writes: what its engine says of itself.
GAUGES = {
    "requests_running": ("Requests that have a place.", "n_running"),
    "requests_waiting": ("Requests that wait for a place.", "n_waiting"),
    "places": ("Texts that can be read and written at once.", "n_slots"),
    "stored_texts": ("Texts without a place that are in memory.", "stored.texts"),
    "stored_bytes": ("Bytes that they take.", "stored.bytes"),
}
COUNTERS = {
    "cached_prompt_tokens": (
        "Tokens of prompts that were in the cache, and not read again.", "usage.cached"
    ),
    "generated_tokens": ("Tokens drawn, the ends of texts among them.", "usage.sampled"),
    "batches": ("Batches decoded.", "batches.batches"),
    "batch_texts": ("Texts in all batches, each as often as it was in one.", "batches.texts"),
    "batch_tokens": ("Tokens in all batches.", "batches.tokens"),
    "batch_seconds": ("Seconds that the batches took.", "batches.seconds"),
    "texts_moved_out": ("Texts that lost their place.", "stored.moved_out"),
    "texts_moved_in": ("Texts that came back into a place.", "stored.moved_in"),
    "texts_dropped": ("Texts dropped to make room for others.", "stored.dropped"),
}  # fmt: skip


class AnswerCounter:
    """An application around another one, which counts what that answers."""

    def __init__(self, app: ASGIApp, answered: Answered) -> None:
        self._app = app
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as the other application does."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # any other path would be a line of its own, for ever
                route = getattr(scope.get("route"), "path", "none")
                self._answered[route, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted)


class Figures:
    """The figures of a server, as `prometheus_client` collects them."""

    def __init__(self, models: ServedModels, answered: Answered) -> None:
        self._models = models
        self._answered = answered

    def collect(self) -> Iterator[Metric]:
        """All figures; waits for the batches that are in the making."""
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
            GaugeMetricFamily, "cache_bytes", "Bytes of the caches and archives of all places."
        )
        for name, engine in engines.items():
            with suppress(ClosedError):  # to make room for another one
                caches = [place.kv for place in engine.report()]
                total = sum(kv.bytes_total + kv.bytes_archive for kv in caches)
                n_bytes.add_metric([name], total)
        yield n_bytes


def _of_models(family: Callable[..., Any], name: str, meaning: str) -> Any:
    return family(f"pyh2o_{name}", meaning, labels=["model"])


def kv_json(models: ServedModels) -> dict[str, Any]:
    """What each place holds, for clients; waits for the batches that are in the making."""
    places: list[dict[str, Any]] = []
    for model in models.loaded():
        if not isinstance(model, ServedModel):
            continue
        with suppress(ClosedError):  # to make room for another one
            places += [
                {
                    "model": model.name,
                    "place": number,
                    "state": "running" if place.running else "idle",
                    "tokens": place.kv.position,
                    "rows": place.kv.used,
                    "archived": place.kv.archived,
                    "recalled": [list(span) for span in place.recalled],
                    "bytes": place.kv.bytes_total + place.kv.bytes_archive,
                }
                for number, place in enumerate(model.engine.report())
            ]
    return {"object": "list", "data": places}
