"""What the page's routes send: its files and nothing else, with headers that keep it safe."""

from __future__ import annotations

import http.client
import re
from typing import Any

import pytest

from needed import needed

page = needed("pyh2o.openai.server.page", name="the server's packages")
fastapi = needed("fastapi", name="the server's packages")
testclient = needed("starlette.testclient", name="httpx")

MOST_BYTES = 300_000


@pytest.fixture(scope="module")
def client() -> Any:
    app = fastapi.FastAPI()
    app.include_router(page.page_routes())
    return testclient.TestClient(app)


def test_every_file_that_is_named_is_there_and_kept(client: Any) -> None:
    """From the first page on, over the imports of each module."""
    index = client.get("/")
    assert index.headers["cache-control"] == "no-cache"
    waiting = re.findall(r'(?:src|href)="(page/[^"]+)"', index.text)
    seen: dict[str, int] = {}
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        reply = client.get("/" + place)
        assert reply.status_code == 200, place
        assert "immutable" in reply.headers["cache-control"]
        seen[place] = len(reply.content)
        folder = place.rpartition("/")[0]
        waiting += [f"{folder}/{name}" for name in re.findall(r'from "\./([^"]+)"', reply.text)]
    on_disk = {path.name for path in page.FOLDER.rglob("*.*")}
    assert {place.rpartition("/")[2] for place in seen} | {"index.html", "icon.svg"} == on_disk
    assert sum(seen.values()) + len(index.content) < MOST_BYTES


@pytest.mark.parametrize("place", ["/", "/favicon.ico", "/page/any/style.css"])
def test_the_browser_is_told_to_trust_these_files_only(client: Any, place: str) -> None:
    headers = client.get(place).headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert client.head(place).status_code == 200


def test_files_of_an_older_version_are_not_kept_for_ever(client: Any) -> None:
    assert client.get("/page/older/style.css").headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("place", ["page.py", "../page.py", "%2e%2e/page.py", "js", "/etc/passwd"])
def test_nothing_else_is_sent(fake_address: tuple[str, int], place: str) -> None:
    connection = http.client.HTTPConnection(*fake_address)
    connection.request("GET", f"/page/any/{place}")
    assert connection.getresponse().status == 404
    connection.close()


@pytest.fixture(scope="module")
def fake_address() -> Any:
    """A client that sends paths as they are written."""
    running = needed("fake_sessions", name="the server's packages").FakeServer()
    yield "127.0.0.1", int(running.address.rpartition(":")[2])
    running.close()


def test_no_file_has_inline_code() -> None:
    html = (page.FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\son\w+=|\sstyle=|<script(?! type=\"module\" src=)", html)
    for path in page.FOLDER.rglob("*.js"):
        assert not re.search(
            r"(inner|outer)HTML|insertAdjacentHTML|\beval\(|document\.write",
            path.read_text("utf-8"),
        ), path
