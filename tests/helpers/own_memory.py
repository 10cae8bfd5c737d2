"""Memory of a process without mapped files, such as a model's weights."""

from __future__ import annotations

import psutil


def own_bytes(process: int | None = None) -> int:
    """Return resident bytes of this process, or of the given one, if the system reports them."""
    used = psutil.Process(process).memory_info()
    return int(used.rss) - int(getattr(used, "shared", 0))
