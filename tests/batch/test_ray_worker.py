"""Workers of a batch on a Ray cluster: how many there is room for, and one in this process.

Needs no Ray.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from needed import needed
from pyh2o.errors import BatchError, SettingsError
from pyh2o.models.file_identity import identify
from pyh2o.system.threads import physical_cores
from pyh2o.writing.sampling import Sampling
from tiny_gguf import write_tiny_gguf
from tiny_llama import ONE_THREAD

NAME = "the server's packages"
workers = needed("pyh2o.batch.ray_worker", name=NAME)
answering = needed("pyh2o.batch.answering", name=NAME)
clusters = needed("pyh2o.batch.on_ray", name=NAME)
reading = needed("pyh2o.batch.reading", name=NAME)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)


def job(model: Path, *, version: str = workers.__version__, **settings: Any) -> Any:
    settings = {"n_ctx": 256, "verbose": False, "n_gpu_layers": 0, **ONE_THREAD, **settings}
    defaults = answering.RequestDefaults(Sampling(seed=3))
    identity = identify(model).record()
    return workers.Job(str(model), identity, settings, 2, 64, defaults, version)


def failure(job: Any) -> str:
    """Why a worker refuses a greeting, without which worker it is."""
    with pytest.raises(BatchError, match=r"^worker ") as error:
        workers.Worker(job).answer(None)
    return str(error.value).partition(": ")[2]


def test_an_answer_says_whose_it_is(model: Path) -> None:
    worker = workers.Worker(job(model, n_threads=None, n_threads_batch=None))
    about, nothing = worker.answer(None)
    assert nothing is None
    body = {"prompt": "Once", "max_tokens": 3}
    line = {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": body}
    request = reading.BatchRequest(7, "r", json.dumps(line).encode())
    again, answer = worker.answer(request)
    assert again == about
    assert about["settings"]["ctx"] == 256
    assert not answering.failed(answer)
    assert worker._engine.model.context_params.n_threads == physical_cores()


def test_machines_that_would_give_other_answers_refuse(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "why_no_gpu", lambda: "no GPU here")
    assert failure(job(model, n_gpu_layers=-1)) == "no GPU here"
    assert failure(job(model, version="0.0")).startswith(
        f"the machine has pyh2o {workers.__version__}, the batch was started with 0.0: install"
    )
    given = job(model)
    with model.open("ab") as file:
        file.write(b"x")
    assert failure(given) == (
        f"{model} differs from the model where the batch was started: copy the same file to all "
        "machines"
    )
    model.unlink()
    expected = f"the model file {model} does not exist: copy it to that path on all machines"
    assert failure(given) == expected


def test_too_little_memory_is_no_fault_of_a_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers.Worker(job(model))

    def answer(request: Any) -> dict[str, Any]:
        raise MemoryError

    monkeypatch.setattr(worker._answers, "answer", answer)
    request = reading.BatchRequest(0, "r", b"{}")
    with pytest.raises(BatchError, match=": out of memory: use a smaller --ctx, fewer --texts, or"):
        worker.answer(request)


def machines(*cpus: int, gpus: int = 0) -> list[Any]:
    return [clusters.Machine(each, gpus) for each in cpus]


@pytest.mark.parametrize(
    ("cpus", "asked", "workers", "each"),
    [
        ([8], {}, 1, 8),
        ([8, 8, 8], {}, 3, 8),
        ([8, 6], {}, 2, 6),
        ([16, 8, 2], {}, 3, 8),  # two on the first, none on the last
        ([0, 8], {}, 1, 8),  # a head that does no work
        ([1], {}, 1, 1),
        ([8, 8], {"workers": 1}, 1, 8),
        ([8, 8], {"workers": 4}, 4, 4),
        ([8, 8], {"workers": 5}, 5, 2),
        ([8, 8], {"threads": 3}, 4, 3),
        ([8, 8], {"threads": 3, "workers": 2}, 2, 3),
    ],
)
def test_shares(cpus: list[int], asked: dict[str, int], workers: int, each: int) -> None:
    assert clusters.share_out(machines(*cpus), **asked) == clusters.Share(workers, each)


def test_each_worker_has_a_gpu() -> None:
    there = [*machines(16, 16, gpus=2), *machines(64)]
    assert clusters.share_out(there, on_gpu=True) == clusters.Share(4, 8, 1)
    assert clusters.share_out(there, on_gpu=True, threads=2) == clusters.Share(4, 2, 1)
    assert clusters.share_out(there, on_gpu=True, workers=3) == clusters.Share(3, 8, 1)


@pytest.mark.parametrize(
    ("there", "asked", "message"),
    [
        (
            machines(2, 2),
            {"workers": 5},
            "the Ray cluster fits 4 workers with 1 CPUs each, not 5: ",
        ),
        (machines(2), {"threads": 3}, "the Ray cluster fits 0 workers with 3 CPUs each, not 1: "),
        (machines(4), {"threads": 2, "workers": 3}, "the Ray cluster fits 2 workers with 2"),
        (machines(4), {"on_gpu": True}, "the Ray cluster has no GPU: omit --gpu-layers"),
        (machines(0), {}, "the Ray cluster has no CPUs: add machines to it"),
        ([], {}, "the Ray cluster has no CPUs"),
        (machines(8, gpus=1), {"on_gpu": True, "workers": 2}, "the Ray cluster fits 1 workers"),
    ],
)
def test_no_room(there: list[Any], asked: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        clusters.share_out(there, **asked)
    assert str(error.value).startswith(message)
