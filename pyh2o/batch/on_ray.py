"""A batch on a Ray cluster: its workers, each with an engine, answer the requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import Any

from ..cache.statistics import mib_text
from ..errors import BatchError
from .answering import usage
from .ray_cluster import Cluster, Share
from .ray_worker import Job
from .reading import BatchRequest
from .running import Result


class OnRay:
    """A `Workplace` on a cluster.

    Attributes:
        model: the fields of the model file's `ModelIdentity`.
        settings: those of each cache, as `settings_identity` has them.
        caches: how many caches there are, and the memory of one.
        tokens: of the answers that have come, prompts included.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        share: Share,
        requests: Sequence[BatchRequest],
        check: Callable[[], None],
    ) -> None:
        """Start the workers and wait until one is ready.

        Args:
            cluster: that has no work yet.
            job: of each worker.
            share: how many there are, and what each gets.
            requests: that are to be answered.
            check: called during the wait; what it raises ends it.

        Raises:
            BatchError: a worker refuses the job.
            ServerError: Ray fails.
            BaseException: what `check` raises.
        """
        self.model = job.model
        self.tokens = 0
        self._cluster = cluster
        self._left = {request.number: request for request in requests}
        self._stopped = False
        cluster.send((job, share, requests))
        first = None
        while first is None:
            check()
            first = self._receive()
        self._first: dict[str, Any] | None = first
        about = json.loads(first["about"])
        self.settings: dict[str, Any] = about["settings"]
        self.caches = f"{share.workers} x {job.texts} x {mib_text(about['cache_bytes'])} MiB"

    def stop(self) -> None:
        """As of `Workplace`; the workers end with the cluster, or as soon as it is left."""
        self._stopped = True

    def results(self) -> Generator[Result | None, None, None]:
        """As of `Workplace`."""
        row, self._first = self._first, None
        while self._left and not self._stopped:
            yield None if row is None else self._result(row)
            row = self._receive()

    def _receive(self) -> dict[str, Any] | None:
        """What a worker has returned, or None if there is nothing for a while."""
        row: dict[str, Any] | None = self._cluster.receive()
        if row is not None and row["failure"]:
            raise BatchError(row["failure"])
        return row

    def _result(self, row: dict[str, Any]) -> Result | None:
        about = json.loads(row["about"])
        if about["settings"] != self.settings:
            raise BatchError(
                f"the cache on {about['machine']} has other settings than those before: let all "
                "machines have the same build of pyh2o"
            )
        request = self._left.pop(row["number"], None)
        if request is None:  # a greeting, or what was answered twice because a worker has died
            return None
        line = json.loads(row["line"])
        self.tokens += sum(usage(line))
        return request, line
