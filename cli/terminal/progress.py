"""Progress bars on stderr."""

from __future__ import annotations

import sys

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .terminal import stderr


class Bars:
    """Shows one progress bar at a time, on terminals only.

    `hidden` turns it off, as a bar would overwrite llama.cpp's log.
    """

    def __init__(self, hidden: bool = False) -> None:
        self._hidden = hidden or not sys.stderr.isatty()
        self._progress: Progress | None = None
        self._label = ""

    def show(
        self, label: str, done: float | None = None, total: float | None = None, unit: str = ""
    ) -> None:
        """Show the bar of an activity, or remove it if `done` equals `total`; None is unknown."""
        if done is not None and done == total:
            self.clear()
        elif not self._hidden:
            of = "" if total is None else f" of {total:,}"
            detail = f"{done:,}{of} {unit}" if unit else ""
            progress = self._progress
            if progress is None or self._label != label:
                progress = self._start(label)
            progress.update(progress.task_ids[0], completed=done, total=total, detail=detail)

    def fetching(self, done: int, total: int) -> None:
        self.show("fetching", done // 10**6, total // 10**6, "MB")

    def clear(self) -> None:
        """Remove the bar; the next call shows a new one."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start(self, label: str) -> Progress:
        self.clear()
        self._label = label
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=stderr,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._progress.add_task(label, total=None, detail="")
        self._progress.start()
        return self._progress
