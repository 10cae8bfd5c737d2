"""The requests of a batch: OpenAI's batch format, or plain text with a prompt on each line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
class LineError:
    """Why a line is no request.

    Attributes:
        code: a word for programs.
        message: one line for a person.
    """

    code: str
    message: str


@dataclass(frozen=True)
class BatchRequest:
    """A line of a batch.

    Attributes:
        number: from 0, in the order of the file.
        line: of the file, from 1.
        custom_id: by which its result is found; None if the line has none.
        data: the line: a request as JSON, or a prompt.
        error: what is wrong with the line; None if nothing is. Its body is not checked yet.
    """

    number: int
    line: int
    custom_id: str | None
    data: bytes
    error: LineError | None = None


@dataclass(frozen=True)
class BatchInput:
    """A file of requests.

    Attributes:
        sha256: of the file, in hexadecimal digits.
        has_prompts: whether its lines are prompts; else they are requests in JSON.
        requests: in the order of the file; empty lines are none.
    """

    sha256: str
    has_prompts: bool
    requests: list[BatchRequest]


def read_batch(path: Path) -> BatchInput:
    """Read a file of requests. Its first line that is not empty says what the others are.

    A line that begins with { is a request in OpenAI's batch format, another one a prompt. A line
    of the other kind, or one that is wrong, becomes a request with an error; so does one whose
    custom_id an earlier line has.

    Raises:
        BatchError: the file cannot be read, or has no requests.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BatchError(f"cannot read {path}: {error.strerror}; give a file of requests") from None
    lines = list(_lines(data.removeprefix(_BYTE_ORDER_MARK)))
    if not lines:
        raise BatchError(f"{path} has no requests: write one on each line")
    has_prompts = not lines[0][1].startswith(b"{")
    read = _prompt if has_prompts else _request
    requests = [read(number, line, text) for number, (line, text) in enumerate(lines)]
    return BatchInput(hashlib.sha256(data).hexdigest(), has_prompts, _once_each(requests))


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, and their numbers."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield number, line.removesuffix(b"\r")


def _prompt(number: int, line: int, text: bytes) -> BatchRequest:
    request = BatchRequest(number, line, f"line-{line}", text)
    try:
        text.decode()
    except UnicodeDecodeError as error:
        message = f"line {line} is not UTF-8 text (byte {error.start}): save the file as UTF-8"
        return replace(request, error=LineError("invalid_text_line", message))
    if "custom_id" in _object(text):
        message = f"line {line} is a request in JSON, and the file begins with prompts: split it"
        return replace(request, error=LineError("invalid_text_line", message))
    return request


def _request(number: int, line: int, text: bytes) -> BatchRequest:
    try:
        custom_id = RequestLine.model_validate_json(text).custom_id
    except ValidationError as error:
        return BatchRequest(number, line, _custom_id(text), text, _line_error(line, error))
    return BatchRequest(number, line, custom_id, text)


def _line_error(line: int, error: ValidationError) -> LineError:
    refusal = body_refusal(error)
    if error.errors()[0]["type"] == "json_invalid":
        return LineError("invalid_json_line", f"line {line} is not JSON: write an object on it")
    if refusal.param is None:
        message = f"line {line} is no object with custom_id, method, url and body"
        return LineError("invalid_json_line", message)
    return LineError("invalid_request", f"line {line}: {refusal.message}")


def _once_each(requests: list[BatchRequest]) -> list[BatchRequest]:
    """The requests, the later ones of a custom_id with an error."""
    lines: dict[str, int] = {}
    checked = []
    for request in requests:
        if request.custom_id is not None and request.error is None:
            first = lines.setdefault(request.custom_id, request.line)
            if first != request.line:
                message = (
                    f"line {request.line}: line {first} has the same custom_id: give each request "
                    "one of its own"
                )
                request = replace(request, error=LineError("duplicate_custom_id", message))
        checked.append(request)
    return checked


def _custom_id(text: bytes) -> str | None:
    """That of a request which is wrong, if it can be told."""
    found = _object(text).get("custom_id")
    return found if isinstance(found, str) and found.isprintable() else None


def _object(text: bytes) -> dict[str, Any]:
    """The object in a line, or an empty one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
