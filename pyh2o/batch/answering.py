"""Answers to requests of a batch, as lines of OpenAI's output format."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..engine import Engine
from ..engine.engine import Terms
from ..limits import Limits
from ..models.names import readable_name
from ..server.bodies import ChatBody, CompletionBody
from ..server.openai import result_of
from ..server.refusals import RefusedError, body_refusal, refusal_of
from ..server.served_model import ServedModel
from ..writing.sampling import LARGEST_SEED, Sampling
from .reading import CHATS, BatchRequest, RequestLine

OK = 200
# The user's own file needs no limit on prompts.
LIMITS = Limits(prompt_tokens=2**31)


@dataclass(frozen=True)
class RequestDefaults:
    """Settings of requests that do not set their own.

    Attributes:
        sampling: for prompts of plain text. Its seed applies to all requests without one: request
            `n`, from 0, gets seed + n.
        max_tokens: for prompts of plain text; None for the window.
        chat: whether a prompt of plain text is a user message; otherwise it is continued.
    """

    sampling: Sampling
    max_tokens: int | None = None
    chat: bool = False


class Answers:
    """Answers requests, from any number of threads."""

    def __init__(
        self, engine: Engine, defaults: RequestDefaults, check: Callable[[], None]
    ) -> None:
        """Prepare; `check` is called after each prompt chunk and token.

        If `check` raises an error that is not an Exception, `answer` raises it.
        """
        self._engine = engine
        self._defaults = defaults
        self._model = ServedModel(engine, readable_name(Path(engine.model.path).stem), LIMITS)
        self._terms = Terms(check=check)

    def answer(self, request: BatchRequest) -> dict[str, Any]:
        """Return a line of the output: the answer or the error; only a MemoryError is raised."""
        line: dict[str, Any] = {
            "id": f"batch_req_{secrets.token_hex(16)}",
            "custom_id": request.custom_id,
            "response": None,
            "error": request.error,
        }
        if request.error is None:
            status, body = self._response(request)
            request_id = f"req_{secrets.token_hex(16)}"
            line["response"] = {"status_code": status, "request_id": request_id, "body": body}
        return line

    def _response(self, request: BatchRequest) -> tuple[int, Any]:
        try:
            return OK, self._result(request)
        except MemoryError:
            raise
        except ValidationError as error:
            refusal = body_refusal(error)
        except Exception as error:
            refusal = refusal_of(error)
        return refusal.status, refusal.body()

    def _result(self, request: BatchRequest) -> Any:
        body = self._body(request)
        if body.stream:
            raise RefusedError(400, "stream: not supported in a batch: omit it", param="stream")
        if body.seed is None:
            seed = (self._defaults.sampling.seed + request.number) % (LARGEST_SEED + 1)
            body = body.model_copy(update={"seed": seed})
        return result_of(self._model, body, self._terms)

    def _body(self, request: BatchRequest) -> ChatBody | CompletionBody:
        if request.is_prompt:
            return self._body_of_prompt(request.data.decode())
        line = RequestLine.model_validate_json(request.data)
        kind = ChatBody if line.url == CHATS else CompletionBody
        return kind.model_validate_json(json.dumps(line.body))

    def _body_of_prompt(self, prompt: str) -> ChatBody | CompletionBody:
        defaults = self._defaults
        fields = asdict(defaults.sampling)
        del fields["seed"]  # set per prompt
        fields["dry_sequence_breakers"] = list(defaults.sampling.dry_sequence_breakers)
        fields["max_tokens"] = defaults.max_tokens or self._engine.model.window
        if defaults.chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
            return ChatBody.model_validate(fields)
        return CompletionBody.model_validate({**fields, "prompt": prompt})


def failed(line: dict[str, Any]) -> bool:
    """Whether a line of the output has an error instead of an answer."""
    return line["error"] is not None or line["response"]["status_code"] != OK


def usage(line: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of the prompt and of the answer in a line of the output."""
    if failed(line):
        return 0, 0
    counts = line["response"]["body"]["usage"]
    return counts["prompt_tokens"], counts["completion_tokens"]
