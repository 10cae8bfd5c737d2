"""What is told of a server's work: figures for Prometheus, and what the places of texts hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ...engine import Engine
from ...errors import ClosedError
from .embeddings import EmbeddingModel
from .models import AnyModel, ModelSource, ServedModels
from .served_model import ServedModel

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
# How often a route was answered with a status.
Answered = Counter[tuple[str, int]]


class CountedAnswers:
    """An application around another one, which counts what that answers."""

    def __init__(self, app: Any, answered: Answered) -> None:
        self._app = app
        self._answered = answered

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request as the other application does."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # any other path would be a line of its own, for ever
                route = getattr(scope.get("route"), "path", "none")
                self._answered[route, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted)


@dataclass(frozen=True)
class _Metric:
    """One figure.

    Attributes:
        name: without the "pyh2o_" that all have.
        kind: Prometheus' word for what it does: a counter only grows.
        meaning: one line.
        samples: by what comes behind the name: labels, or the part of a summary.
    """

    name: str
    kind: str
    meaning: str
    samples: Mapping[str, float]

    def of(self, model: AnyModel | ModelSource) -> _Metric:
        """The figure of one model."""
        name = model.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        samples = {f'{part}{{model="{name}"}}': value for part, value in self.samples.items()}
        return replace(self, samples=samples)


def metrics_text(models: ServedModels, answered: Answered) -> str:
    """All figures in Prometheus' text format; waits for the batches that are in the making."""
    metrics = [_responses(answered)]
    for source in models.sources:
        loaded = float(models.is_loaded(source))
        metrics.append(_gauge("model_loaded", "Whether the model is loaded.", loaded).of(source))
    for model in models.loaded():
        with suppress(ClosedError):  # to make room for another one
            metrics += [metric.of(model) for metric in _figures(model)]
    by_name: dict[str, list[_Metric]] = {}
    for metric in metrics:
        by_name.setdefault(metric.name, []).append(metric)
    return "".join(f"{line}\n" for same in by_name.values() for line in _lines(same))


def _lines(metrics: Sequence[_Metric]) -> Iterator[str]:
    """One figure of several models, as Prometheus reads it."""
    name = f"pyh2o_{metrics[0].name}"
    yield f"# HELP {name} {metrics[0].meaning}"
    yield f"# TYPE {name} {metrics[0].kind}"
    for metric in metrics:
        for suffix, value in metric.samples.items():
            yield f"{name}{suffix} {value}"


def _figures(model: AnyModel) -> Iterator[_Metric]:
    """What a model that is loaded tells of itself."""
    if isinstance(model, EmbeddingModel):
        yield _prompt_tokens(model.n_tokens)
        return
    yield from _requests(model.engine)
    yield from _batches(model.engine)
    yield from _memory(model.engine)


def _responses(answered: Answered) -> _Metric:
    statuses = {
        f'{{route="{route}",status="{status}"}}': n
        for (route, status), n in sorted(answered.items())
    }
    return _Metric("responses_total", "counter", "Responses, by route and status.", statuses)


def _requests(engine: Engine) -> Iterator[_Metric]:
    texts = engine.texts
    yield _gauge("requests_running", "Requests that have a place.", engine.n_running)
    yield _gauge("requests_waiting", "Requests that wait for a place.", engine.n_waiting)
    yield _prompt_tokens(texts.prompt_tokens)
    yield _counter(
        "cached_prompt_tokens",
        "Tokens of prompts that were in the cache, and not read again.",
        texts.cached_tokens,
    )
    yield _counter(
        "generated_tokens", "Tokens drawn, the ends of texts among them.", texts.drawn_tokens
    )


def _prompt_tokens(n_tokens: int) -> _Metric:
    return _counter("prompt_tokens", "Tokens of prompts.", n_tokens)


def _batches(engine: Engine) -> Iterator[_Metric]:
    counts = engine.batches
    yield _counter("batches", "Batches decoded.", counts.batches)
    yield _counter("batch_tokens", "Tokens in all batches.", counts.tokens)
    yield _counter("batch_seconds", "Seconds that the batches took.", counts.seconds)
    texts = {"_sum": counts.texts, "_count": counts.batches}
    yield _Metric("batch_texts", "summary", "Texts in a batch.", texts)


def _memory(engine: Engine) -> Iterator[_Metric]:
    stored = engine.stored
    caches = [place.kv for place in engine.report()]
    n_bytes = sum(kv.bytes_total + kv.bytes_archive for kv in caches)
    yield _gauge("places", "Texts that can be read and written at once.", engine.n_places)
    yield _gauge("cache_bytes", "Bytes of the caches and archives of all places.", n_bytes)
    yield _gauge("stored_texts", "Texts without a place that are in memory.", stored.texts)
    yield _gauge("stored_bytes", "Bytes that they take.", stored.bytes)
    yield _counter("texts_moved_out", "Texts that lost their place.", stored.moved_out)
    yield _counter("texts_moved_in", "Texts that came back into a place.", stored.moved_in)
    yield _counter("texts_dropped", "Texts dropped to make room for others.", stored.dropped)


def _gauge(name: str, meaning: str, value: float) -> _Metric:
    return _Metric(name, "gauge", meaning, {"": value})


def _counter(name: str, meaning: str, value: float) -> _Metric:
    return _Metric(f"{name}_total", "counter", meaning, {"": value})


def kv_json(models: ServedModels) -> dict[str, Any]:
    """What each place holds, for clients; waits for the batches that are in the making."""
    places: list[dict[str, Any]] = []
    for model in models.loaded():
        if isinstance(model, ServedModel):
            with suppress(ClosedError):  # to make room for another one
                places += _places(model)
    return {"object": "list", "data": places}


def _places(model: ServedModel) -> list[dict[str, Any]]:
    return [
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
