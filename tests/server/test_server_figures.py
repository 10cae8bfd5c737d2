"""/metrics and /v1/kv: what a server says of its work, without a word of the texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from good_bodies import COMPLETIONS
from many_texts import tiny_engine
from needed import needed
from pyh2o.engine import Engine

loopback = needed("loopback", name="the server's packages")
parser = needed("prometheus_client.parser", name="the server's packages")
wait_until = loopback.wait_until

CACHE: dict[str, Any] = {"n_ctx": 256, "hh": 32, "recent": 32, "slack": 16, "recall": 16}
NO_END = loopback.NO_END
ENDLESS = {**loopback.ENDLESS, "prompt": "secretive"}


@pytest.fixture
def engine(model_path: Path) -> Iterator[Engine]:
    with tiny_engine(model_path, texts=2, **CACHE) as running:
        yield running


@pytest.fixture
def server(engine: Engine) -> Iterator[Any]:
    with loopback.LoopbackServer(engine) as running:
        yield running


def metrics(server: Any) -> dict[str, float]:
    """All samples, by name and labels but for the only model's; each has a type and a help."""
    reply = server.get("/metrics")
    assert reply.status == 200
    samples: dict[str, float] = {}
    for family in parser.text_string_to_metric_families(reply.body.decode()):
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge")
        for sample in family.samples:
            assert sample.name.startswith("pyh2o_")
            assert ("model" in sample.labels) == (family.name != "pyh2o_responses")
            labels = ",".join(v for k, v in sorted(sample.labels.items()) if k != "model")
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def complete(server: Any, **fields: Any) -> Any:
    body = {"prompt": "once upon a time", "max_tokens": 8, "logit_bias": NO_END, **fields}
    return server.post(COMPLETIONS, body)


def test_work_is_counted(server: Any, engine: Engine) -> None:
    usages = [complete(server).json["usage"] for _ in range(3)]
    assert complete(server, max_tokens=-3).status == 400
    assert server.get("/v1/nothing").status == server.get("/v1/../none").status == 404
    told = metrics(server)
    n_tokens = {
        "prompt": sum(usage["prompt_tokens"] for usage in usages),
        "generated": sum(usage["completion_tokens"] for usage in usages),
        "cached_prompt": sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages),
    }
    for name, n in n_tokens.items():
        assert told[f"pyh2o_{name}_tokens_total"] == n
    assert told["pyh2o_responses_total{/v1/completions,200}"] == 3
    assert told["pyh2o_responses_total{/v1/completions,400}"] == 1
    assert told["pyh2o_responses_total{none,404}"] == 2
    assert told["pyh2o_batches_total"] == engine.batches.batches > 0
    assert told["pyh2o_batch_texts_total"] == engine.batches.texts
    assert told["pyh2o_batch_tokens_total"] == engine.batches.tokens
    assert told["pyh2o_batch_seconds_total"] == engine.batches.seconds > 0
    assert told["pyh2o_slots"] == 2
    assert told["pyh2o_model_loaded"] == 1
    assert told["pyh2o_requests_running"] == told["pyh2o_requests_waiting"] == 0


def test_who_runs_and_who_waits_is_told(server: Any, engine: Engine) -> None:
    connections = [server.send(COMPLETIONS, ENDLESS) for _ in range(3)]
    wait_until(lambda: (engine.n_running, engine.n_waiting) == (2, 1))
    told = metrics(server)
    assert told["pyh2o_requests_running"] == 2
    assert told["pyh2o_requests_waiting"] == 1
    for connection in connections:
        connection.close()
    wait_until(lambda: metrics(server)["pyh2o_requests_running"] == 0)
    assert metrics(server)["pyh2o_requests_waiting"] == 0


def test_memory_is_told(server: Any, engine: Engine, rng: np.random.Generator) -> None:
    for _ in range(5):
        complete(server, prompt="".join(map(chr, rng.integers(97, 123, 30))))
    told, stored = metrics(server), engine.stored
    assert told["pyh2o_stored_texts"] == stored.texts == 3
    assert told["pyh2o_stored_bytes"] == stored.bytes > 0
    assert told["pyh2o_texts_moved_out_total"] == 3
    assert told["pyh2o_texts_moved_in_total"] == told["pyh2o_texts_dropped_total"] == 0
    caches = [slot.kv for slot in engine.report()]
    assert told["pyh2o_cache_bytes"] == sum(kv.bytes_total + kv.bytes_archive for kv in caches)


def test_kv_reports_each_slot(server: Any, engine: Engine) -> None:
    usage = complete(server, prompt="once upon a time " * 20).json["usage"]
    at_work = server.send(COMPLETIONS, ENDLESS)
    wait_until(lambda: engine.usage.sampled > 100)
    reply = server.get("/v1/kv")
    idle, running = reply.json["data"]
    assert (idle["model"], idle["slot"], idle["state"]) == ("tiny", 0, "idle")
    assert (running["slot"], running["state"]) == (1, "running")
    assert idle["tokens"] == usage["total_tokens"] - 1  # the newest token has not been read
    for slot, cache in zip((idle, running), engine.report(), strict=True):
        assert 0 < slot["rows"] <= cache.kv.capacity
        assert slot["archived"] > 0
        assert slot["bytes"] >= cache.kv.bytes_total
    assert idle["recalled"]
    for start, end in idle["recalled"]:
        assert 0 <= start < end <= idle["tokens"]
    assert b"secret" not in reply.body
    at_work.close()


@pytest.mark.parametrize("route", ["/metrics", "/v1/kv"])
def test_a_key_is_asked_for(engine: Engine, route: str) -> None:
    with loopback.LoopbackServer(engine, api_key="secret") as server:
        assert server.get(route).status == 401
        assert server.get(route, Authorization="Bearer secret").status == 200
