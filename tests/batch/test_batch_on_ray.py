"""A batch on a Ray cluster of two workers: the results of a batch here, whatever ends."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cli_fakes import run_program, wait_until
from fake_story import tiny_model
from many_texts import tiny_engine
from needed import needed
from pyh2o.errors import BatchError
from pyh2o.models.file_identity import identify
from pyh2o.writing.sampling import Sampling
from ray_clusters import processes_below, two_workers
from tiny_llama import EXACT_ROWS, ONE_THREAD

if find_spec("ray") is None:  # imported when there is a cluster: it reads the environment then
    pytest.skip("needs ray: pip install '.[integrations]'", allow_module_level=True)
needed("pyh2o.server", name="the server's packages")

from pyh2o.batch.answering import RequestDefaults  # noqa: E402
from pyh2o.batch.journal import BatchHead  # noqa: E402
from pyh2o.batch.local import LocalRunner  # noqa: E402
from pyh2o.batch.on_ray import Machine, RayRunner, Share, cluster  # noqa: E402
from pyh2o.batch.ray_worker import Job  # noqa: E402
from pyh2o.batch.reading import BatchInput, read_batch  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("surroundings"),
    pytest.mark.real,
]

# Which texts share a decode depends on time, and the last bits of logits depend on that. Answers do
# not: recall would round queries to 8 bits, and no sample with this seed is close to another.
SETTINGS: dict[str, Any] = {"n_ctx": 1024, "hh": 32, "recent": 32, "slack": 8, "recall": 0}
SETTINGS |= {"attention": "ops", **EXACT_ROWS}
DEFAULTS = RequestDefaults(Sampling(seed=5))
SHARE = Share(workers=2, cpus=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two() -> Iterator[int]:
    """The process that starts all of its processes."""
    with two_workers() as pid:
        yield pid


def written(path: Path, lengths: list[int], **body: Any) -> BatchInput:
    """Completions of so many tokens, then one with a wrong body, then a line that is none."""
    bodies: list[dict[str, Any]] = [
        {"prompt": f"Text {n}", "max_tokens": length, "temperature": 0.8, **body}
        for n, length in enumerate(lengths)
    ]
    lines = [
        json.dumps({"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": each})
        for n, each in enumerate([*bodies, {"prompt": 5}])
    ]
    path.write_text("\n".join([*lines, "wrong"]))
    return read_batch(path)


def job(model: Path, **changes: Any) -> Job:
    settings = {"verbose": False, "n_gpu_layers": 0, "policy": "h2o", **ONE_THREAD, **SETTINGS}
    values = {"texts": 3, "cpus": 1, "defaults": DEFAULTS, **changes}
    return Job(str(model), identify(model).record(), settings, **values)


def content(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the results without what is drawn anew each time, or was in a cache by chance."""
    response = line["response"]
    if response is not None:
        body = {name: response["body"].get(name) for name in ("choices", "usage", "error", "model")}
        usage = {**body["usage"]} if body["usage"] else None
        if usage:
            del usage["prompt_tokens_details"]
        response = {"status_code": response["status_code"], **body, "usage": usage}
    return {"custom_id": line["custom_id"], "response": response, "error": line["error"]}


def contents(place: LocalRunner | RayRunner) -> dict[int, dict[str, Any]]:
    """What a place answers, by the number of the request."""
    with closing(place.results()) as results:
        done = [result for result in results if result is not None]
    assert len({request.number for request, _ in done}) == len(done)
    return {request.number: content(line) for request, line in done}


def contents_here(model: Path, batch: BatchInput) -> dict[int, dict[str, Any]]:
    with tiny_engine(model, texts=2, **SETTINGS) as engine:
        return contents(LocalRunner(engine, batch.requests, DEFAULTS))


def nothing() -> None:
    pass


def test_results_and_head_are_those_of_this_machine(tiny: Path, tmp_path: Path, two: int) -> None:
    batch = written(tmp_path / "in.jsonl", [10 * n for n in range(1, 13)])
    with cluster(verbose=False) as machines:
        assert machines == [Machine(cpus=2)]
        place = RayRunner(job(tiny), SHARE, batch.requests, nothing)
        found = contents(place)
    with tiny_engine(tiny, texts=2, **SETTINGS) as engine:
        here = LocalRunner(engine, batch.requests, DEFAULTS)
        expected, cache = contents(here), here.caches.removeprefix("2")
        heads = [BatchHead.of(batch, each, DEFAULTS, replaces=False) for each in (here, place)]
    assert found == expected
    assert heads[0] == heads[1]
    assert [found[n]["response"]["status_code"] for n in range(13)] == [200] * 12 + [400]
    assert found[13]["error"]["code"] == "invalid_json_line"
    assert place.caches == f"2 x 3{cache}"


def test_requests_of_a_worker_that_dies_are_answered_by_another(
    tiny: Path, tmp_path: Path, two: int
) -> None:
    batch = written(tmp_path / "in.jsonl", [100] * 12)
    found = {}
    with cluster(verbose=False):
        place = RayRunner(job(tiny), SHARE, batch.requests, nothing)
        with closing(place.results()) as results:
            for result in results:
                if result is not None:
                    if not found:
                        # on a loaded machine the first result may come before the second worker
                        wait_until(lambda: len(processes_below(two, "ray::Worker")) == 2)
                        os.kill(processes_below(two, "ray::Worker")[0], signal.SIGKILL)
                    found[result[0].number] = content(result[1])
    assert found == contents_here(tiny, batch)


def test_a_worker_with_another_model_refuses(tiny: Path, tmp_path: Path, two: int) -> None:
    batch = written(tmp_path / "in.jsonl", [10])
    model = tmp_path / "model.gguf"
    model.write_bytes(tiny.read_bytes())
    before = job(model)
    model.write_bytes(tiny.read_bytes() + b"x")
    message = f"^worker \\d+ on [^:]+: {model} differs from the model where the batch was [^\\n]+$"
    with cluster(verbose=False), pytest.raises(BatchError, match=message):
        RayRunner(before, SHARE, batch.requests, nothing)


def test_a_wait_for_workers_can_be_ended(tiny: Path, tmp_path: Path, two: int) -> None:
    batch = written(tmp_path / "in.jsonl", [10])
    looks = threading.Semaphore(2)

    def check() -> None:
        if not looks.acquire(blocking=False):
            raise KeyboardInterrupt

    with cluster(verbose=False), pytest.raises(KeyboardInterrupt):
        RayRunner(job(tiny), SHARE, batch.requests, check)


def command(tiny: Path, *more: str) -> list[str]:
    cache = ["--ctx", "1024", "--hh", "32", "--recent", "32", "--slack", "8", "--threads", "1"]
    return ["batch", "in.jsonl", "-o", "out.jsonl", "-m", str(tiny), *cache, *more]


def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def test_a_cluster_of_its_own(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # what we find out and keep
    monkeypatch.setenv("RAY_ADDRESS", "local")
    written(Path("in.jsonl"), [10, 20])
    output = run_program(*command(tiny, "--ray", "--workers", "1", "--seed", "8"))
    assert output.code == 0, output.notes
    ray, done, where = output.notes.splitlines()
    assert ray == "Ray: 1 worker with 1 CPU each, on 1 machine"
    assert done.startswith("4 requests · 2 errors · read ")
    assert where == "the results are in out.jsonl"
    there = list(map(content, results()))
    assert run_program(*command(tiny, "--seed", "8", "--force")).code == 0
    assert there == list(map(content, results()))
