"""A loopback server with the parts of the Hugging Face hub that pyh2o uses."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """A repository of the hub: contents by path, and the hashes that it reports if they differ.

    Attributes:
        gated: whether reading its files requires `token`; if not, seeing it at all does.
        breaks: for each of the next downloads, the bytes after which it is interrupted.
    """

    files: dict[str, bytes]
    hashes: dict[str, str | None] = field(default_factory=dict)
    gated: bool = False
    token: str | None = None
    breaks: list[int] = field(default_factory=list)


class HubServer:
    """Serves repositories by owner/name, and records requests and the headers User-Agent.

    An `answer` is the reply to repository queries of a server that is not a hub.
    """

    answer: bytes | None = None

    def __init__(self, repositories: dict[str, Repository]) -> None:
        self.repositories = repositories
        self.requests: list[tuple[str, str, str | None]] = []
        self.agents: set[str] = set()
        hub = self

        class Handler(_Handler):
            server_of = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def ranges(self) -> list[str | None]:
        """Return the ranges of contents that were requested."""
        return [asked for _, path, asked in self.requests if path.startswith("/content/")]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_of: HubServer

    def do_GET(self) -> None:
        hub = self.server_of
        hub.requests.append((self.command, self.path, self.headers["Range"]))
        hub.agents.add(self.headers["User-Agent"])
        path = self.path.split("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            self._info(found[1])
        elif found := re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", path):
            self._resolve(found[1], found[2])
        elif found := re.fullmatch(r"/content/([^/]+/[^/]+)/(.+)", path):
            self._content(hub.repositories[found[1]], found[2])
        else:
            self._answer(404, {}, b"{}")

    def _info(self, name: str) -> None:
        if self.server_of.answer is not None:
            self._answer(200, {}, self.server_of.answer)
            return
        repository = self.server_of.repositories.get(name)
        if repository is None or not (repository.gated or self._may(repository)):
            self._answer(401, {"X-Error-Code": "RepoNotFound"}, b"{}")
            return
        siblings = [
            {"rfilename": path, "size": len(content), "blobId": "0" * 40, **_lfs(repository, path)}
            for path, content in repository.files.items()
        ]
        info = {"id": name, "sha": COMMIT, "siblings": siblings}
        self._answer(200, {"Content-Type": "application/json"}, json.dumps(info).encode())

    def _resolve(self, name: str, path: str) -> None:
        repository = self.server_of.repositories[name]
        if not self._may(repository):
            self._answer(403, {"X-Error-Code": "GatedRepo"}, b"{}")
            return
        content = repository.files[path]
        headers = {
            "Location": f"/content/{name}/{path}",
            "X-Repo-Commit": COMMIT,
            "X-Linked-Size": str(len(content)),
            "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
        }
        self._answer(302, headers, b"")

    def _content(self, repository: Repository, path: str) -> None:
        content = repository.files[path]
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        start = int(asked[1]) if asked else 0
        headers = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        sent = repository.breaks.pop(0) if repository.breaks else len(content)
        self._answer(206 if asked else 200, headers if asked else {}, content[start:], sent)

    def _may(self, repository: Repository) -> bool:
        allowed = repository.token
        return allowed is None or self.headers["Authorization"] == f"Bearer {allowed}"

    def _answer(
        self, status: int, headers: dict[str, str], body: bytes, sent: int | None = None
    ) -> None:
        """Reply with a body of which only `n` bytes are sent; with 0 not even the head."""
        self.close_connection = True
        if sent == 0:
            return
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if sent is None else body[:sent])

    def log_message(self, *_args: Any) -> None:
        """Print nothing."""


def _lfs(repository: Repository, path: str) -> dict[str, Any]:
    content = repository.files[path]
    digest = repository.hashes.get(path, hashlib.sha256(content).hexdigest())
    if digest is None:
        return {}
    return {"lfs": {"sha256": digest, "size": len(content), "pointerSize": 130}}
