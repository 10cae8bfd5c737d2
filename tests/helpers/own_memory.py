"""Memory of a process without mapped files, such as a model's weights."""

from __future__ import annotations

import psutil


def own_bytes(process: int | None = None) -> int:
    """Of this one, or that of a number, in RAM, as far as the system tells."""
    used = psutil.Process(process).memory_info()
    return int(used.rss) - int(getattr(used, "shared", 0))
