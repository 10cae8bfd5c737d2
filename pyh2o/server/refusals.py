"""Errors of requests: one line as JSON for the client, and one line in the log."""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from ..errors import ContextLimitError, EvictedError, GrammarError, PyH2OError, SessionOpenError
from .dialect import dialect_of

INTERNAL, DISK_FULL = 500, 507

# The folders of a path; the file's name may be shown to clients.
_FOLDERS = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?[\\/](?:[^\s'\"\\/:]+[\\/])+")
# Errors of writes to a full disk.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST_LINE = 500
_LONGEST_VALUE = 40
# Names of Python types, which pydantic adds to the location of a field with a union type.
_TYPE = re.compile(r"(?:str|bool|float)$|(?:dict|list|literal)\[")
_DICTIONARY = re.compile(r"a valid dictionary.*")

logger = logging.getLogger("uvicorn.error")


class RefusedError(Exception):
    """An error to send to the client.

    Attributes:
        message: one line: what failed, and what to do.
        param: the wrong field of the body.
        code: OpenAI's error code.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = one_line(message)
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        is_client_error = self.status < INTERNAL
        return {
            "error": {
                "message": self.message,
                "type": "invalid_request_error" if is_client_error else "internal_server_error",
                "param": self.param,
                "code": self.code,
            }
        }


def wrong_field(param: str, reason: str, *, code: str | None = None) -> RefusedError:
    """Return the error for a wrong field of a body; `reason` says what to do."""
    return RefusedError(400, f"{param}: {reason}", param=param, code=code)


class ShutdownError(Exception):
    """The server shuts down during a request."""


def refusal_of(error: Exception) -> RefusedError:
    if isinstance(error, RefusedError):
        return error
    message = without_folders(str(error) or type(error).__name__)
    cause = error if isinstance(error, OSError) else error.__context__
    is_full = isinstance(cause, OSError) and cause.errno in _NO_ROOM
    if is_full or "disk is full" in message:  # SQLite's words
        return RefusedError(
            DISK_FULL,
            "the disk is full: free some space and try again; what was saved before is unchanged",
        )
    if isinstance(error, ShutdownError):
        return RefusedError(503, message)
    if isinstance(error, GrammarError):
        return wrong_field(error.field, error.reason)
    if isinstance(error, ContextLimitError):
        return RefusedError(400, message, code="context_length_exceeded")
    if isinstance(error, SessionOpenError):
        return RefusedError(409, message.replace(", or give another --session", ""))
    if isinstance(error, OSError) and not isinstance(error, PyH2OError):
        reason = error.strerror or type(error).__name__
        return RefusedError(INTERNAL, f"cannot read or write a file: {reason}")
    # Clients retry a 500, but not a 400, which is their own error.
    is_ours = isinstance(error, RuntimeError) and not isinstance(error, EvictedError)
    is_theirs = isinstance(error, (ValueError, PyH2OError)) and not is_ours
    return RefusedError(400 if is_theirs else INTERNAL, message)


def body_refusal(error: ValidationError) -> RefusedError:
    return field_refusal(error.errors(include_url=False)[0])


def field_refusal(error: Mapping[str, Any], *, skip: int = 0) -> RefusedError:
    """Return the error for one of pydantic's, skipping the first `skip` steps of its location."""
    param = field_name(error["loc"][skip:])
    # JSON's terms instead of Python's
    message = _DICTIONARY.sub("an object", error["msg"].removeprefix("Value error, "))
    message = message.replace("be True", "be true")
    if error["type"] == "json_invalid":
        return RefusedError(400, f"the body is not valid JSON: {error['ctx']['error']}")
    if error["type"] == "missing":
        return RefusedError(400, f"{param or 'the body'} is missing", param=param or None)
    if isinstance(error["input"], (bool, int, float, str)):
        given = json.dumps(error["input"], ensure_ascii=False)
        message += f", not {_shortened_text(given, _LONGEST_VALUE)}"
    prefix = f"{param}: " if param else "the body: "
    return RefusedError(400, prefix + message[0].lower() + message[1:], param=param or None)


def field_name(way: Iterable[int | str]) -> str:
    """Return the name of a field such as messages[0].role from its location."""
    named = (step for step in way if isinstance(step, int) or not _TYPE.match(step))
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in named)
    return _shortened_text(one_line("".join(steps).removeprefix(".")), 2 * _LONGEST_VALUE)


def logged_refusal(scope: Mapping[str, Any], error: Exception) -> RefusedError:
    """Return the error for the client, and log it as one line.

    A verbose server also logs the traceback of an internal error.
    """
    refusal = refusal_of(error)
    line = f"{refusal.status} {scope['method']} {one_line(scope['path'])}: {refusal.message}"
    if refusal.status < INTERNAL:
        logger.warning(line)
    else:
        has_traceback = refusal.status == INTERNAL and logger.isEnabledFor(logging.INFO)
        logger.error(line, exc_info=error if has_traceback else None)
    return refusal


def refusal_response(scope: Mapping[str, Any], error: Exception) -> JSONResponse:
    """Return the response to a request that failed, and log the error."""
    refusal = logged_refusal(scope, error)
    return JSONResponse(dialect_of(scope).error(refusal), refusal.status)


def one_line(text: str) -> str:
    """Return a text without line breaks and control characters, truncated."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return _shortened_text(line, _LONGEST_LINE)


def without_folders(text: str) -> str:
    """Return a message without the folders of its paths, which clients must not see."""
    return _FOLDERS.sub("", text)


def shortened(value: object) -> str:
    return _shortened_text(repr(value), _LONGEST_VALUE)


def _shortened_text(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
