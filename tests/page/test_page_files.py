"""The page's routes serve its files and nothing else, with security headers."""

from __future__ import annotations

import hashlib
import http.client
import re
from typing import Any

import pytest

from needed import needed

page = needed("pyh2o.server.page", name="the server's packages")
fastapi = needed("fastapi", name="the server's packages")
testclient = needed("starlette.testclient", name="httpx")

VENDOR = page.FOLDER / "vendor"
LISTED = VENDOR / "SHA256SUMS"
MAX_BYTES, MAX_WITH_VENDORED = 300_000, 1_000_000


@pytest.fixture(scope="module")
def client() -> Any:
    app = fastapi.FastAPI()
    page.add_page(app)
    return testclient.TestClient(app)


def test_every_imported_file_is_served_and_none_is_unused(client: Any) -> None:
    """Follow links and imports from the index page."""
    index = client.get("/")
    waiting = re.findall(r'(?:src|href)="(page/[^"]+)"', index.text)
    seen: dict[str, int] = {}
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        reply = client.get("/" + place)
        assert reply.status_code == 200, place
        seen[place] = len(reply.content)
        folder = place.rpartition("/")[0]
        waiting += [f"{folder}/{name}" for name in re.findall(r'from "\./([^"]+)"', reply.text)]
    on_disk = {path.name for path in page.FOLDER.rglob("*.*") if VENDOR not in path.parents}
    assert {place.rpartition("/")[2] for place in seen} | {"index.html"} == on_disk
    assert sum(seen.values()) + len(index.content) < MAX_BYTES


def test_third_party_files_are_unchanged(client: Any) -> None:
    """They include their licences, and the size of the whole page is limited."""
    sums = dict(reversed(line.split()) for line in LISTED.read_text().splitlines())
    ours = {LISTED, VENDOR / "README.md"}
    files = {path for path in VENDOR.rglob("*") if path.is_file() and path not in ours}
    found = {path.relative_to(VENDOR).as_posix(): path.read_bytes() for path in files}
    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} == sums
    folders = {name.partition("/")[0] for name in found}
    assert {f"{folder}/LICENSE" for folder in folders} < set(found)
    for name, data in found.items():
        assert client.get(f"/page/vendor/{name}").content == data
    whole = sum(path.stat().st_size for path in page.FOLDER.rglob("*") if path.is_file())
    assert whole < MAX_WITH_VENDORED


@pytest.mark.parametrize("place", ["/", "/page/icon.svg", "/page/style.css"])
def test_responses_have_security_headers(client: Any, place: str) -> None:
    reply = client.get(place)
    policy = reply.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    # browsers revalidate, and get unchanged files only once
    assert reply.headers["cache-control"] == "no-cache"
    assert client.head(place).status_code == 200
    if place.startswith("/page"):
        again = client.get(place, headers={"If-None-Match": reply.headers["etag"]})
        assert again.status_code == 304


@pytest.mark.parametrize("place", ["page.py", "../page.py", "%2e%2e/page.py", "js", "/etc/passwd"])
def test_paths_outside_the_page_are_not_served(server: Any, place: str) -> None:
    """http.client does not normalise paths."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", f"/page/{place}")
    assert connection.getresponse().status == 404
    connection.close()


@pytest.fixture
def server(serve: Any) -> Any:
    return serve().server


def test_no_file_has_inline_code() -> None:
    html = (page.FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\son\w+=|\sstyle=|<script(?! type=\"module\" src=)", html)
    for path in set(page.FOLDER.rglob("*.js")) - set(VENDOR.rglob("*.js")):
        assert not re.search(
            r"(inner|outer)HTML|insertAdjacentHTML|\beval\(|document\.write",
            path.read_text("utf-8"),
        ), path
