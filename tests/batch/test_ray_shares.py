"""How many workers a Ray cluster has room for; needs no Ray."""

from __future__ import annotations

from typing import Any

import pytest

from needed import needed
from pyh2o.errors import SettingsError

clusters = needed("pyh2o.batch.on_ray", name="the server's packages")


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
        (machines(2, 2), {"workers": 5}, "the Ray cluster has room for 4 workers of 1 CPUs, not f"),
        (machines(2), {"threads": 3}, "the Ray cluster has room for 0 workers of 3 CPUs, not for"),
        (machines(4), {"threads": 2, "workers": 3}, "the Ray cluster has room for 2 workers of 2"),
        (machines(4), {"on_gpu": True}, "the Ray cluster has no GPU: leave --gpu-layers out"),
        (machines(0), {}, "the Ray cluster has no CPU for work: add machines to it"),
        ([], {}, "the Ray cluster has no CPU for work"),
        (machines(8, gpus=1), {"on_gpu": True, "workers": 2}, "the Ray cluster has room for 1 wo"),
    ],
)
def test_no_room(there: list[Any], asked: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        clusters.share_out(there, **asked)
    assert str(error.value).startswith(message)
