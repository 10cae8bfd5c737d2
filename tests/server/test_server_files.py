"""PDF files that a server reads for the page."""

from __future__ import annotations

import io
import json
import sys
from base64 import b64encode
from typing import Any

import pytest

from needed import needed
from pdf_file import pdf_of

pypdf = needed("pypdf")
needed("loopback", name="the server's packages")

ROUTE = "/v1/files/text"


def body_of(data: bytes) -> dict[str, str]:
    return {"name": "a.pdf", "data": b64encode(data).decode()}


def locked(password: str) -> bytes:
    """A file that only a password opens; where it is empty all can read it."""
    writer, file = pypdf.PdfWriter(io.BytesIO(pdf_of("secret"))), io.BytesIO()
    writer.encrypt(user_password=password, owner_password="owner", algorithm="RC4-128")
    writer.write(file)
    return file.getvalue()


def test_the_text_comes_page_by_page(server: Any) -> None:
    reply = server.post(ROUTE, body_of(pdf_of("one", "", "three")))
    assert reply.status == 200
    lines = reply.body.decode().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert [(event["page"], event["of"]) for event in events] == [(1, 3), (2, 3), (3, 3)]
    assert [event["text"].strip() for event in events] == ["one", "", "three"]
    assert b"secret" in server.post(ROUTE, body_of(locked(""))).body


def test_what_cannot_be_read_is_refused(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    no_pdf = "cannot read a.pdf as PDF: save it again, or as text"
    for body, message in (
        (body_of(b"roses are red"), no_pdf),
        (body_of(b""), no_pdf),
        ({"name": "a.pdf", "data": "?"}, no_pdf),
        (body_of(locked("x")), "a.pdf is encrypted: save it without a password"),
    ):
        reply = server.post(ROUTE, body)
        assert (reply.status, reply.error["message"]) == (400, message)
    monkeypatch.setitem(sys.modules, "pypdf", None)
    reply = server.post(ROUTE, body_of(pdf_of("one")))
    assert reply.status == 400
    assert "a PDF file needs the package pypdf: python -m pip" in reply.error["message"]
