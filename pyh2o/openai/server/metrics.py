"""What is told of a server's work: figures for Prometheus, and what the places of texts hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from ...engine import Engine

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

    def lines(self) -> Iterator[str]:
        """As Prometheus reads it."""
        name = f"pyh2o_{self.name}"
        yield f"# HELP {name} {self.meaning}"
        yield f"# TYPE {name} {self.kind}"
        for suffix, value in self.samples.items():
            yield f"{name}{suffix} {value}"


def metrics_text(engine: Engine, answered: Answered) -> str:
    """All figures in Prometheus' text format; waits for the batch that is in the making."""
    metrics = [*_requests(engine, answered), *_batches(engine), *_memory(engine)]
    return "".join(f"{line}\n" for metric in metrics for line in metric.lines())


def _requests(engine: Engine, answered: Answered) -> Iterator[_Metric]:
    texts = engine.texts
    yield _gauge("requests_running", "Requests that have a place.", engine.n_running)
    yield _gauge("requests_waiting", "Requests that wait for a place.", engine.n_waiting)
    statuses = {
        f'{{route="{route}",status="{status}"}}': n
        for (route, status), n in sorted(answered.items())
    }
    yield _Metric("responses_total", "counter", "Responses, by route and status.", statuses)
    yield _counter("prompt_tokens", "Tokens of prompts.", texts.prompt_tokens)
    yield _counter(
        "cached_prompt_tokens",
        "Tokens of prompts that were in the cache, and not read again.",
        texts.cached_tokens,
    )
    yield _counter(
        "generated_tokens", "Tokens drawn, the ends of texts among them.", texts.drawn_tokens
    )


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


def kv_json(engine: Engine) -> dict[str, Any]:
    """What each place holds, for clients; waits for the batch that is in the making."""
    places = [
        {
            "place": number,
            "state": "running" if place.running else "idle",
            "tokens": place.kv.position,
            "rows": place.kv.used,
            "archived": place.kv.archived,
            "recalled": [list(span) for span in place.recalled],
            "bytes": place.kv.bytes_total + place.kv.bytes_archive,
        }
        for number, place in enumerate(engine.report())
    ]
    return {"object": "list", "data": places}
