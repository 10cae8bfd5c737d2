"""The requests of a batch: OpenAI's batch format, or plain text with one prompt per line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ..errors import BatchError
from ..server.bodies import Strict
from ..server.refusals import body_refusal

CHATS = "/v1/chat/completions"

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RequestLine(Strict):
    """A line of OpenAI's batch format."""

    custom_id: Annotated[str, Field(min_length=1)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


@dataclass(frozen=True)
class BatchRequest:
    """A line of a batch.

    Attributes:
        number: index of the request, from 0.
        custom_id: identifies the result; None if the line has none.
        is_prompt: whether the line is a prompt; otherwise it is a JSON request.
        error: error of the line, with "code" and "message"; None without one. The body is not
            checked yet.
    """

    number: int
    custom_id: str | None
    data: bytes
    is_prompt: bool = False
    error: dict[str, str] | None = None


@dataclass(frozen=True)
class BatchInput:
    """A file of requests, without empty lines."""

    sha256: str
    has_prompts: bool
    requests: list[BatchRequest]


def read_batch(path: Path) -> BatchInput:
    """Read a file of requests.

    If the first line that is not empty starts with {, the lines are requests in OpenAI's batch
    format, otherwise prompts. An invalid line, a line of the other kind and a duplicate custom_id
    become requests with an error.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BatchError(f"cannot read {path}: {error.strerror}; give a file of requests") from None
    numbered = enumerate(data.removeprefix(_BYTE_ORDER_MARK).split(b"\n"), 1)
    lines = {line: text.removesuffix(b"\r") for line, text in numbered if text.strip()}
    if not lines:
        raise BatchError(f"{path} has no requests: write one per line")
    has_prompts = not next(iter(lines.values())).startswith(b"{")
    requests: list[BatchRequest] = []
    first: dict[str | None, int] = {}
    for number, (line, text) in enumerate(lines.items()):
        custom_id, wrong = _read_prompt(line, text) if has_prompts else _read_request(line, text)
        if wrong is None and first.setdefault(custom_id, line) != line:
            message = (
                f"line {line}: line {first[custom_id]} has the same custom_id: make each one unique"
            )
            wrong = {"code": "duplicate_custom_id", "message": message}
        requests.append(BatchRequest(number, custom_id, text, has_prompts, wrong))
    return BatchInput(hashlib.sha256(data).hexdigest(), has_prompts, requests)


def _read_prompt(line: int, text: bytes) -> tuple[str, dict[str, str] | None]:
    """Return the custom_id of a prompt, and its error."""
    message = ""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        message = f"line {line} is not UTF-8 text (byte {error.start}): save the file as UTF-8"
    if "custom_id" in _object(text):
        message = f"line {line} is a JSON request, but the file starts with prompts: split the file"
    return f"line-{line}", {"code": "invalid_text_line", "message": message} if message else None


def _read_request(line: int, text: bytes) -> tuple[str | None, dict[str, str] | None]:
    """Return the custom_id of a JSON request if it can be read, and its error."""
    try:
        return RequestLine.model_validate_json(text).custom_id, None
    except ValidationError as error:
        refusal = body_refusal(error)
        code = "invalid_json_line"
        if error.errors()[0]["type"] == "json_invalid":
            message = f"line {line} is not valid JSON: write one object per line"
        elif refusal.param is None:
            message = f"line {line} must be an object with custom_id, method, url and body"
        else:
            code, message = "invalid_request", f"line {line}: {refusal.message}"
    found = _object(text).get("custom_id")
    custom_id = found if isinstance(found, str) and found.isprintable() else None
    return custom_id, {"code": code, "message": message}


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
