"""Numbers and texts as people read them."""

from __future__ import annotations

from .terminal import harmless

SHORT = 60
"""Characters of a text that are enough to recognise it."""
END = 400
"""Characters of the beginning and of the end of a long text that are enough to go on from."""


def count(number: int, thing: str) -> str:
    """So many things, in words."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def per_second(tokens: int, seconds: float) -> str:
    """A speed, or nothing where there is none."""
    return f"{tokens / seconds:.1f} tokens/s" if tokens > 0 and seconds > 0 else ""


def duration(seconds: float) -> str:
    """A time as hours, minutes and seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def excerpt(text: str) -> str:
    """A text of several lines, without the middle of one that is long."""
    if len(text) <= 2 * END:
        return text
    left_out = len(text) - 2 * END
    return f"{text[:END].rstrip()}\n[... {left_out:,} characters ...]\n{text[-END:].lstrip()}"


def shortened(text: str) -> str:
    """The beginning of a text, on one line."""
    line = harmless(" ".join(text.split()))
    return line if len(line) <= SHORT else f"{line[: SHORT - 3]}..."
