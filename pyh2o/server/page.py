"""The web page and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

FOLDER = Path(__file__).parent / "page"
# Generated text must not run as code in the page: only our own scripts and styles are allowed.
POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; media-src blob: data:; base-uri 'none'; "
    "object-src 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # browsers revalidate
}


class _Files(StaticFiles):
    def file_response(self, *args: Any, **arguments: Any) -> Response:
        response = super().file_response(*args, **arguments)
        response.headers.update(HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    """Add the page to an application; it needs no API key, because the page asks for the key."""

    @app.api_route("/", methods=["GET", "HEAD"])
    async def _index() -> Response:
        return FileResponse(FOLDER / "index.html", headers=HEADERS)

    app.mount("/page", _Files(directory=FOLDER))
