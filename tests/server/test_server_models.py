"""Several models behind one server: chosen by name, loaded when asked for, closed for others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from good_bodies import CHAT, COMPLETIONS
from needed import needed
from pyh2o.core.recommended import recommend
from pyh2o.errors import ModelError, SettingsError
from pyh2o.models.packaged import PACKAGED
from tiny_llama import tiny_llama

openai = needed("openai")
loopback = needed("loopback", name="the server's packages")
several = needed("several_models", name="the server's packages")
models_module = needed("pyh2o.server.models", name="the server's packages")
PATIENCE, wait_until = loopback.PATIENCE, loopback.wait_until

ENDLESS = loopback.ENDLESS
MIB = 2**20


class Served:
    """A server of several models, the first of which is loaded."""

    def __init__(self, loads: Any, *sources: Any, limits: Any = None) -> None:
        self.loads = loads
        self.models = models_module.ServedModels(sources, limits or loads.limits)
        self.models.start(lambda _: None)
        self.http = loopback.LoopbackServer(self.models)
        self.client = loopback.openai_client(self.http.address)

    def complete(self, name: str, **fields: Any) -> Any:
        body = {"model": name, "prompt": "once upon a time", "max_tokens": 8, "temperature": 0}
        return self.http.post(COMPLETIONS, {**body, **fields})

    def text(self, name: str, **fields: Any) -> str:
        reply = self.complete(name, **fields)
        assert reply.status == 200, reply.body
        assert reply.json["model"] == name
        return str(reply.json["choices"][0]["text"])

    def loaded(self) -> set[str]:
        return {model.name for model in self.models.loaded()}

    def close(self) -> None:
        self.loads.resume.set()
        self.models.shut_down()
        self.http.close()
        self.models.close()


@pytest.fixture
def loads(paths: dict[str, Path]) -> Any:
    return several.Loads(paths)


@pytest.fixture
def serve(loads: Any) -> Iterator[Callable[..., Served]]:
    """Starts servers of models, each with the bytes that it is said to need."""
    started: list[Served] = []

    def start(**needed_bytes: int) -> Served:
        sources = [loads.source(name, needed_bytes=n) for name, n in needed_bytes.items()]
        started.append(Served(loads, *sources))
        return started[-1]

    yield start
    for each in started:
        each.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "pyh2o batches"]


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the system have room for so many MiB beside the models that are loaded."""

    def has_room(served: Served, n_mib: int) -> None:
        def spare_bytes() -> int:
            sources = (served.models.named(name) for name in served.loaded())
            return n_mib * MIB - sum(source.needed_bytes for source in sources)

        monkeypatch.setattr(models_module, "spare_bytes", spare_bytes)

    return has_room


def alone(path: Path) -> str:
    """What a model writes that is loaded by itself."""
    with tiny_llama(path, **several.CACHE) as llm:
        given = {"max_tokens": 8, "temperature": 0.0}
        return str(llm.create_completion("once upon a time", **given)["choices"][0]["text"])


def test_a_name_chooses_the_model(serve: Callable[..., Served], paths: dict[str, Path]) -> None:
    served = serve(first=0, second=0)
    expected = {name: alone(paths[name]) for name in ("first", "second")}
    assert expected["first"] != expected["second"]
    for name in ("second", "first", "second"):
        assert served.text(name) == expected[name]
    assert served.loads.counts == {"first": 1, "second": 1}


def test_all_are_listed_and_no_other_is_there(serve: Callable[..., Served]) -> None:
    served = serve(first=0, second=0, bert=0)
    assert [model.id for model in served.client.models.list()] == ["first", "second", "bert"]
    assert served.client.models.retrieve("second").id == "second"
    assert served.loaded() == {"first"}
    with pytest.raises(openai.NotFoundError) as error:
        served.client.completions.create(model="fifth", prompt="once")
    assert error.value.code == "model_not_found"
    assert error.value.body["param"] == "model"  # type: ignore[index]
    assert "unknown model 'fifth': use first or second or bert" in error.value.message
    for route, body in {
        CHAT: {"messages": [{"role": "user", "content": "a"}]},
        "/v1/embeddings": {"input": "a"},
    }.items():
        assert served.http.post(route, {**body, "model": "fifth"}).status == 404
    assert served.http.get("/v1/models/fifth").status == 404


def test_the_machine_tells_of_models_that_could_be_served(
    serve: Callable[..., Served], paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYH2O_MODELS", str(paths["first"].parent))
    machine = serve(first=0, bert=0).http.get("/v1/machine").json
    assert [(model["name"], model["writes"]) for model in machine["served"]] == [
        ("first", True),
        ("bert", False),
    ]
    sizes = {model["name"]: model["bytes"] for model in machine["here"]}
    assert sizes == {name: paths[name].stat().st_size for name in ("second", "third")}
    recommended = recommend().record()
    assert [model["name"] for model in machine["models"]] == [
        *PACKAGED,
        *(model["name"] for model in recommended["models"]),
    ]
    assert machine["choice"] == recommended["choice"]
    assert machine["memory_bytes"] > 0


def test_the_first_answers_without_a_name_and_an_only_one_to_any(
    serve: Callable[..., Served],
) -> None:
    several_served = serve(first=0, second=0)
    for name in (None, ""):
        assert several_served.complete(name).json["model"] == "first"  # type: ignore[arg-type]
    served = serve(first=0)
    assert served.complete("gpt-4").json["model"] == "first"
    assert served.http.get("/v1/models/gpt-4").status == 404


def test_names_that_programs_write_otherwise(loads: Any, serve: Callable[..., Served]) -> None:
    sources = [loads.source("first"), loads.source("second")]
    sources[1].typed = "models/Second-7B.gguf"
    served = Served(loads, *sources)
    for name in ("SECOND", "second.gguf", "Second.GGUF:latest", "models/Second-7B.gguf",
                 "models/second-7b:latest"):  # fmt: skip
        assert served.complete(name).json["model"] == "second"
        assert served.http.get(f"/v1/models/{name}").json["id"] == "second"
        shown = served.http.post("/api/show", {"model": name})
        assert shown.status == 200
    for name in ("secon", ":latest", "models", "second-7b"):
        assert served.complete(name).status == 404
    served.close()


def test_a_name_twice_is_refused(loads: Any) -> None:
    with pytest.raises(SettingsError, match=r"two models have the name first: rename one"):
        models_module.ServedModels([loads.source("first"), loads.source("first")], loads.limits)


def test_many_requests_load_a_model_once(serve: Callable[..., Served]) -> None:
    served = serve(first=0, second=0)
    served.loads.held.add("second")
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(served.text, "second") for _ in range(5)]
        wait_until(lambda: served.models.named("second").n_leases == 5)
        assert served.http.get("/health").status == 200
        assert served.text("first")  # nobody else waits
        assert served.http.get("/metrics").status == served.http.get("/v1/kv").status == 200
        assert not any(answer.done() for answer in answers)
        served.loads.resume.set()
        assert len({answer.result(PATIENCE) for answer in answers}) == 1
    assert served.loads.counts["second"] == 1


def test_a_client_may_leave_while_its_model_is_loaded(serve: Callable[..., Served]) -> None:
    served = serve(first=0, second=0)
    served.loads.held.add("second")
    leaving = served.http.send(COMPLETIONS, {**ENDLESS, "model": "second"})
    wait_until(lambda: served.loads.counts["second"] == 1)
    leaving.close()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.text, "second")
        entry = served.models.named("second")
        wait_until(lambda: entry.n_leases == 2)
        served.loads.resume.set()
        assert answer.result(PATIENCE)
        wait_until(lambda: entry.n_leases == 0)
    assert served.loads.counts["second"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_cannot_be_loaded(serve: Callable[..., Served], stream: bool) -> None:
    served = serve(first=0, second=0)
    failure = ModelError("llama.cpp cannot load /secret/folder/second.gguf: the file is damaged")
    served.loads.failures["second"] = failure
    for attempt in (1, 2):
        reply = served.complete("second", stream=stream)
        assert reply.status == 500
        assert reply.error["message"] == (
            "the model second could not be loaded: llama.cpp cannot load second.gguf: the file is "
            "damaged"
        )
        assert served.loads.counts["second"] == attempt
    assert served.text("first")
    served.loads.failures.clear()
    assert served.text("second")  # it is tried again


def test_the_end_waits_for_no_load_and_no_stream(serve: Callable[..., Served]) -> None:
    served = serve(first=0, second=0, third=0)
    served.text("third")
    served.loads.held.add("second")
    body = {**ENDLESS, "stream": True}
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(served.complete, name, **body) for name in ("first", "third")]
        loading = pool.submit(served.complete, "second")
        wait_until(lambda: served.loads.counts["second"] == 1)
        wait_until(lambda: [m.engine.n_running for m in served.models.loaded()] == [1, 1])
        served.models.shut_down()  # what Ctrl-C does
        for answer in answers:
            assert b"the server is shutting down" in answer.result(PATIENCE).body
        reply = loading.result(PATIENCE)
    assert (reply.status, reply.error["message"]) == (503, "the server is shutting down")
    assert served.complete("first").status == 503


def test_the_model_that_is_idle_for_longest_makes_room(
    serve: Callable[..., Served], spare: Callable[..., None]
) -> None:
    served = serve(first=10 * MIB, second=10 * MIB, third=10 * MIB, huge=100 * MIB)
    spare(served, 25)
    for name in ("second", "first"):
        served.text(name)
    assert served.complete("huge").status == 503
    assert served.loaded() == {"first", "second"}
    served.text("third")
    assert served.loaded() == {"first", "third"}
    served.text("second")
    assert served.loaded() == {"second", "third"}
    assert served.text("first") == served.text("first")
    assert served.loads.counts == {"first": 2, "second": 2, "third": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_in_use_is_not_closed(
    serve: Callable[..., Served], spare: Callable[..., None], stream: bool
) -> None:
    served = serve(first=10 * MIB, second=10 * MIB)
    spare(served, 15)
    at_work = served.http.send(COMPLETIONS, {**ENDLESS, "model": "first", "stream": stream})
    first = served.models.loaded()[0]
    wait_until(lambda: first.engine.usage.sampled > 5)
    reply = served.complete("second")
    assert reply.status == 503
    assert reply.error["message"] == (
        "not enough memory for the model second: it needs about 10 MiB, 5 MiB are free, and "
        "closing idle models is not enough: try again later, or serve fewer models"
    )
    assert served.loaded() == {"first"}
    at_work.close()
    wait_until(lambda: served.models.named("first").n_leases == 0)
    assert served.text("second")
    assert served.loaded() == {"second"}


def test_what_a_model_has_stored_makes_room_too(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    kib = 1024
    served = serve(first=10 * kib, second=100 * kib)
    first = served.models.loaded()[0]
    monkeypatch.setattr(
        models_module, "spare_bytes", lambda: (0 if "first" in served.loaded() else 100) * kib
    )
    assert served.complete("second").status == 503
    for i in range(10):
        served.text("first", prompt=f"{i} sheep on the hill")
    assert first.grown_bytes() == first.engine.stored.bytes > 100 * kib
    assert served.text("second")
    assert served.loaded() == {"second"}


def test_models_come_and_go_while_all_are_asked(
    serve: Callable[..., Served], spare: Callable[..., None], paths: dict[str, Path]
) -> None:
    """Room for two of three: each answer is the right one, or there was no room just then."""
    names = ("first", "second", "third")
    served = serve(**dict.fromkeys(names, 10 * MIB))
    spare(served, 25)
    expected = {name: alone(paths[name]) for name in names}

    def ask(name: str) -> set[int]:
        replies = [served.complete(name) for _ in range(10)]
        texts = {reply.json["choices"][0]["text"] for reply in replies if reply.status == 200}
        assert texts <= {expected[name]}
        served.http.get("/v1/kv")
        return {reply.status for reply in replies}

    with ThreadPoolExecutor(6) as pool:
        statuses = set().union(*pool.map(ask, names * 2))
    assert 200 in statuses
    assert statuses <= {200, 503}
    assert len(served.loaded()) <= 2
    assert all(source.n_leases == 0 for source in served.models.sources)


def test_figures_name_the_model(serve: Callable[..., Served]) -> None:
    served = serve(first=0, second=0, bert=0)
    lines = served.http.get("/metrics").body.decode().splitlines()
    assert 'pyh2o_model_loaded{model="first"} 1.0' in lines
    assert 'pyh2o_model_loaded{model="second"} 0.0' in lines
    n_tokens = served.complete("second").json["usage"]["prompt_tokens"]
    usage = served.http.post("/v1/embeddings", {"model": "bert", "input": "once"}).json["usage"]
    lines = served.http.get("/metrics").body.decode().splitlines()
    assert 'pyh2o_prompt_tokens_total{model="first"} 0.0' in lines
    assert f'pyh2o_prompt_tokens_total{{model="second"}} {n_tokens:.1f}' in lines
    assert f'pyh2o_prompt_tokens_total{{model="bert"}} {usage["prompt_tokens"]:.1f}' in lines
    assert lines.count("# TYPE pyh2o_prompt_tokens_total counter") == 1
    slots = served.http.get("/v1/kv").json["data"]
    assert [(s["model"], s["slot"]) for s in slots] == [
        (name, slot) for name in ("first", "second") for slot in (0, 1)
    ]
