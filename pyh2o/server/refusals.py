"""What a request is refused with: one line in OpenAI's shape, and one in the terminal."""

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

# A path of the server: at least one folder. The last part, the file's name, may be seen.
_FOLDERS = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?[\\/](?:[^\s'\"\\/:]+[\\/])+")
# Errors of writing to a full disk.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST_LINE = 500
_LONGEST_VALUE = 40
# Names of Python types, which pydantic adds to the location of a field with several.
_TYPE = re.compile(r"(?:str|bool|float)$|(?:dict|list|literal)\[")
_DICTIONARY = re.compile(r"a valid dictionary.*")

logger = logging.getLogger("uvicorn.error")


class RefusedError(Exception):
    """A request that is not answered, and what the client is told.

    Attributes:
        status: of HTTP.
        message: one line, with the cause and the cure.
        param: the field of the body that is wrong.
        code: OpenAI's word for the error.
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
        """The error as OpenAI's clients read it."""
        client_s = self.status < INTERNAL
        return {
            "error": {
                "message": self.message,
                "type": "invalid_request_error" if client_s else "internal_server_error",
                "param": self.param,
                "code": self.code,
            }
        }


def wrong_field(param: str, reason: str, *, code: str | None = None) -> RefusedError:
    """What a field of a body is refused with; `reason` has the cure."""
    return RefusedError(400, f"{param}: {reason}", param=param, code=code)


class ShutdownError(Exception):
    """The server was told to end while it answers."""


def refusal_of(error: Exception) -> RefusedError:
    """What an error of any kind is to the client."""
    if isinstance(error, RefusedError):
        return error
    message = without_folders(str(error) or type(error).__name__)
    cause = error if isinstance(error, OSError) else error.__context__
    if isinstance(cause, OSError) and cause.errno in _NO_ROOM:
        return RefusedError(
            DISK_FULL,
            "the disk is full: what was saved before is unchanged, nothing of it is lost; free "
            "some space and try again",
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
        return RefusedError(INTERNAL, f"a file cannot be read or written: {reason}")
    # What the model refuses; clients do not try again what is their own error.
    is_fault = isinstance(error, RuntimeError) and not isinstance(error, EvictedError)
    is_theirs = isinstance(error, (ValueError, PyH2OError)) and not is_fault
    return RefusedError(400 if is_theirs else INTERNAL, message)


def body_refusal(error: ValidationError) -> RefusedError:
    """What is wrong with a body, named by its first wrong field."""
    return field_refusal(error.errors(include_url=False)[0])


def field_refusal(error: Mapping[str, Any], *, skip: int = 0) -> RefusedError:
    """The same for one of pydantic's errors, without the first steps of the way to its field."""
    param = field_name(error["loc"][skip:])
    # in terms of JSON
    message = _DICTIONARY.sub("an object", error["msg"].removeprefix("Value error, "))
    message = message.replace("be True", "be true")
    if error["type"] == "json_invalid":
        return RefusedError(400, f"the body is not JSON: {error['ctx']['error']}")
    if error["type"] == "missing":
        return RefusedError(400, f"{param or 'the body'} is missing", param=param or None)
    if isinstance(error["input"], (bool, int, float, str)):
        given = json.dumps(error["input"], ensure_ascii=False)
        message += f", not {_shortened_text(given, _LONGEST_VALUE)}"
    prefix = f"{param}: " if param else "the body: "
    return RefusedError(400, prefix + message[0].lower() + message[1:], param=param or None)


def field_name(way: Iterable[int | str]) -> str:
    """The name of a field from its location, as in messages[0].role, without Python types."""
    named = (step for step in way if isinstance(step, int) or not _TYPE.match(step))
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in named)
    return _shortened_text(one_line("".join(steps).removeprefix(".")), 2 * _LONGEST_VALUE)


def logged_refusal(scope: Mapping[str, Any], error: Exception) -> RefusedError:
    """What the client is told of an error, also shown as one line in the terminal.

    Of a fault, a verbose server shows where.
    """
    refusal = refusal_of(error)
    line = f"{refusal.status} {scope['method']} {one_line(scope['path'])}: {refusal.message}"
    if refusal.status < INTERNAL:
        logger.warning(line)
    else:
        shows_where = refusal.status == INTERNAL and logger.isEnabledFor(logging.INFO)
        logger.error(line, exc_info=error if shows_where else None)
    return refusal


def refusal_response(scope: Mapping[str, Any], error: Exception) -> JSONResponse:
    """The response to a request that failed, which is also shown in the terminal."""
    refusal = logged_refusal(scope, error)
    return JSONResponse(dialect_of(scope).error(refusal), refusal.status)


def one_line(text: str) -> str:
    """A text without line breaks and signs that a terminal would obey, and not too long."""
    line = "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))
    return _shortened_text(line, _LONGEST_LINE)


def without_folders(text: str) -> str:
    """A message without the folders of this machine."""
    return _FOLDERS.sub("", text)


def shortened(value: object) -> str:
    """A value of the body, as far as it fits a message."""
    return _shortened_text(repr(value), _LONGEST_VALUE)


def _shortened_text(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
