"""The page for a browser: its own files, and nothing else of this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# What a model writes must not become a program in the page: no script and no style but our files.
POLICY = (
    "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
# The version is part of a file's address, so what a browser has of it never grows old.
FOR_EVER = "public, max-age=31536000, immutable"


def page_routes() -> APIRouter:
    """The routes of the page, which need no key: the page asks for it."""
    files = _files()
    version = _version(files)
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def _index() -> Response:
        html = files["index.html"].replace(b"VERSION", version.encode())
        return _sent(html, "index.html", "no-cache")

    @routes.api_route("/favicon.ico", methods=["GET", "HEAD"])
    async def _icon() -> Response:
        return _sent(files["icon.svg"], "icon.svg", "max-age=86400")

    @routes.api_route("/page/{asked_version}/{name:path}", methods=["GET", "HEAD"])
    async def _file(asked_version: str, name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "the page has no such file")
        # A page that was open before an update asks for files of a version that is gone.
        return _sent(files[name], name, FOR_EVER if asked_version == version else "no-cache")

    return routes


def _files() -> dict[str, bytes]:
    """The content of each file by its path in the page's folder."""
    paths = sorted(path for path in FOLDER.rglob("*") if path.suffix in TYPES)
    return {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in paths}


def _version(files: dict[str, bytes]) -> str:
    every = hashlib.sha256()
    for name, content in files.items():
        every.update(f"{name} {len(content)}\n".encode() + content)
    return every.hexdigest()[:12]


def _sent(content: bytes, name: str, caching: str) -> Response:
    media_type = TYPES[Path(name).suffix]
    return Response(content, headers={**HEADERS, "Cache-Control": caching}, media_type=media_type)
