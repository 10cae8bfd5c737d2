"""An answer to a request of a batch, as a line of OpenAI's output format."""

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
# A file of one's own needs no limit on its prompts.
LIMITS = Limits(prompt_tokens=2**31)


@dataclass(frozen=True)
class RequestDefaults:
    """How requests are answered that do not say it themselves.

    Attributes:
        sampling: for prompts of plain text. The seed is for all requests without one: that of the
            request n, from 0, is seed + n.
        max_tokens: for prompts of plain text; None for as many as the window has.
        chat: whether such a prompt is a user's message; else it is a text to go on with.
    """

    sampling: Sampling
    max_tokens: int | None = None
    chat: bool = False


class Answers:
    """Answers requests, from as many threads as one likes."""

    def __init__(
        self, engine: Engine, defaults: RequestDefaults, check: Callable[[], None]
    ) -> None:
        """Get ready; what `check` raises, other than an Exception, ends the answer in the making.

        It is called after each piece of a prompt and each token.
        """
        self._engine = engine
        self._defaults = defaults
        self._model = ServedModel(engine, readable_name(Path(engine.model.path).stem), LIMITS)
        self._terms = Terms(check=check)

    def answer(self, request: BatchRequest) -> dict[str, Any]:
        """A line of the output: the answer, or why there is none.

        Raises:
            MemoryError: there is too little; the request is not to blame.
            BaseException: what `check` raises.
        """
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
        """The status and the body."""
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
            raise RefusedError(400, "stream: a batch has no streams: leave it out", param="stream")
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
        del fields["seed"]  # each prompt has another one
        fields["dry_sequence_breakers"] = list(defaults.sampling.dry_sequence_breakers)
        fields["max_tokens"] = defaults.max_tokens or self._engine.model.window
        if defaults.chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
            return ChatBody.model_validate(fields)
        return CompletionBody.model_validate({**fields, "prompt": prompt})


def failed(line: dict[str, Any]) -> bool:
    """Whether a line of the output has no answer."""
    return line["error"] is not None or line["response"]["status_code"] != OK


def usage(line: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt and of the answer in a line of the output."""
    if failed(line):
        return 0, 0
    counts = line["response"]["body"]["usage"]
    return counts["prompt_tokens"], counts["completion_tokens"]
