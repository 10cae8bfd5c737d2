"""Encode text from callers as UTF-8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import TextError


def utf8(text: str) -> bytes:
    """Encode a text, or raise a TextError if it has a lone surrogate."""
    with text_errors():
        return text.encode()


@contextmanager
def text_errors() -> Iterator[None]:
    """Turn a UnicodeEncodeError inside the block into a TextError."""
    try:
        yield
    except UnicodeEncodeError as error:
        surrogate = ascii(error.object[error.start])
        raise TextError(
            f"the text is not Unicode: remove the lone surrogate {surrogate}"
        ) from error
