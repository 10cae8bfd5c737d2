"""A worker of a batch on a Ray cluster, in this process; needs no Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from needed import needed
from pyh2o.errors import BatchError
from pyh2o.sessions.identity import file_identity
from pyh2o.system.threads import physical_cores
from pyh2o.writing.sampling import Sampling
from tiny_gguf import write_tiny_gguf
from tiny_llama import ONE_THREAD

NAME = "the server's packages"
workers = needed("pyh2o.batch.ray_worker", name=NAME)
answering = needed("pyh2o.batch.answering", name=NAME)
reading = needed("pyh2o.batch.reading", name=NAME)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)


def job(model: Path, *, version: str = workers.__version__, **settings: Any) -> Any:
    settings = {"n_ctx": 256, "verbose": False, "n_gpu_layers": 0, **ONE_THREAD, **settings}
    manner = answering.Manner(Sampling(seed=3))
    identity = file_identity(str(model))
    return workers.Job(str(model), identity, settings, 2, 64, False, manner, version)


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
    request = reading.BatchRequest(7, 8, "r", json.dumps(line).encode())
    again, answer = worker.answer(request)
    assert again == about
    assert about["settings"]["ctx"] == 256
    assert not answering.failed(answer)
    assert worker._engine.model.context_params.n_threads == physical_cores()


def test_machines_that_would_give_other_answers_refuse(model: Path) -> None:
    given = job(model)
    with model.open("ab") as file:
        file.write(b"x")
    assert failure(given) == (
        f"{model} is another model than where the batch was started: put the same file there on "
        "all machines"
    )
    model.unlink()
    assert failure(given) == f"there is no model file {model}: put it there on all machines"


def test_another_version_refuses(model: Path) -> None:
    assert failure(job(model, version="0.0")) == (
        f"it has pyh2o {workers.__version__}, and the batch is of 0.0: install the same version on "
        "all machines"
    )


def test_a_machine_without_a_gpu_refuses_layers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "why_no_gpu", lambda: "no GPU here")
    assert failure(job(model, n_gpu_layers=-1)) == "no GPU here"


def test_too_little_memory_is_no_fault_of_a_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers.Worker(job(model))

    def answer(request: Any) -> dict[str, Any]:
        raise MemoryError

    monkeypatch.setattr(worker._answers, "answer", answer)
    request = reading.BatchRequest(0, 1, "r", b"{}")
    with pytest.raises(BatchError, match=": out of memory: use a smaller --ctx, fewer --texts, or"):
        worker.answer(request)
