"""Bars on stderr while a model loads, a long prompt is read and a file is written."""

from __future__ import annotations

import sys
import time

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .terminal import stderr
from .wording import count, duration, per_second


class Bars:
    """At most one bar at a time, and only on a terminal.

    llama.cpp's log would be drawn over by a bar, so `hidden` switches them off.
    """

    def __init__(self, hidden: bool = False) -> None:
        self._hidden = hidden or not sys.stderr.isatty()
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._label = ""
        self._reading_from = (0, 0.0)  # tokens, and when that was

    def loading(self, fraction: float) -> None:
        """The model is loaded to this fraction (0 to 1)."""
        self._show("loading the model", fraction, 1.0)

    def reading(self, done: int, total: int) -> None:
        """`done` of `total` tokens of the prompt have been read; called first when it begins."""
        label, now = "reading the prompt", time.monotonic()
        if self._label != label or done < self._reading_from[0]:
            self._reading_from = (done, now)
        n_read, seconds = done - self._reading_from[0], now - self._reading_from[1]
        parts = [f"{done:,} of {total:,} tokens"]
        if speed := per_second(n_read, seconds):
            parts += [speed, f"{duration((total - done) * seconds / n_read)} left"]
        self._show(label, done, total, " · ".join(parts))

    def fetching(self, done: int, total: int) -> None:
        """`done` of `total` bytes have arrived."""
        self._show("fetching", done, total, f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")

    def writing(self, done: int, total: int | None, seconds: float) -> None:
        """`done` of `total` tokens, or of as many as will come, were written in so many seconds."""
        parts = [count(done, "token") if total is None else f"{done:,} of {total:,} tokens"]
        if speed := per_second(done, seconds):
            parts.append(speed)
        if total is not None and done > 1:
            parts.append(f"{duration((total - done) * seconds / done)} left")
        self._show("writing", done if total else None, total, " · ".join(parts))

    def answering(self, done: int, total: int, tokens: int, seconds: float) -> None:
        """`done` of `total` requests have a result; `tokens` were evaluated in so many seconds."""
        parts = [f"{done:,} of {total:,} requests"]
        if speed := per_second(tokens, seconds):
            parts.append(speed)
        self._show("answering", done, total, " · ".join(parts))

    def measuring(self, what: str) -> None:
        """Something is measured, nobody knows for how long."""
        self._show("measuring", None, None, what)

    def clear(self) -> None:
        """Take the bar away; the next call draws a new one."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._label = ""

    def _show(self, label: str, done: float | None, total: float | None, detail: str = "") -> None:
        if self._hidden:
            return
        if self._progress is None or self._label != label:
            if done is not None and done == total:
                self.clear()
                return  # it took a single step: nothing to wait for
            self._start(label)
        assert self._progress is not None
        self._progress.update(self._task, completed=done, total=total, detail=detail)
        if done is not None and done == total:
            self.clear()

    def _start(self, label: str) -> None:
        self.clear()
        self._label = label
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=stderr,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(label, total=None, detail="")
        self._progress.start()
