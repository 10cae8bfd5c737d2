"""Text of PDF files, which the page attaches to messages."""

from __future__ import annotations

import binascii
import io
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from ..errors import MissingPackageError
from .bodies import Strict
from .dialect import data_line
from .refusals import RefusedError, logged_refusal
from .requests import CheckedRoute

file_routes = APIRouter(route_class=CheckedRoute)


class PDFBody(Strict):
    """A PDF file, in base64."""

    name: str
    data: str


@file_routes.post("/v1/files/text")
def _text(request: Request, body: PDFBody) -> StreamingResponse:
    """Stream the text of a PDF file as events `{"page", "of", "text"}`."""
    reader = _opened(body)

    def events() -> Iterator[str]:
        try:
            for number, page in enumerate(reader.pages, 1):
                text = page.extract_text()
                yield data_line({"page": number, "of": len(reader.pages), "text": text})
        except Exception as error:  # pypdf raises many types for damaged files
            logged_refusal(request.scope, error)
            yield data_line(_damaged(body.name).body())

    return StreamingResponse(events(), media_type="text/event-stream")


def _opened(body: PDFBody) -> Any:
    try:
        import pypdf
    except ModuleNotFoundError as error:
        raise MissingPackageError("a PDF file", error.name, "server") from error
    try:
        reader = pypdf.PdfReader(io.BytesIO(b64decode(body.data, validate=True)))
        if not reader.is_encrypted or reader.decrypt(""):
            len(reader.pages)
            return reader
    except (pypdf.errors.PyPdfError, binascii.Error, ValueError, KeyError, RecursionError):
        raise _damaged(body.name) from None
    raise RefusedError(400, f"{body.name} is encrypted: save it without a password")


def _damaged(name: str) -> RefusedError:
    return RefusedError(400, f"cannot read {name} as PDF: save it again, or as text")
