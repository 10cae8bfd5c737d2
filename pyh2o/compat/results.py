"""Results and stream chunks of OpenAI's API, made of the events of answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from ..writing.chat_parser import ParsedCall
from ..writing.events import Content, Done, Event, Reasoning, Started, ToolCall, Usage
from ..writing.logprobs import TokenLogprobs, chat_logprobs, completion_logprobs


class Results:
    """Makes the results of one request.

    Args:
        top_logprobs: number of alternatives per token; None for no log probabilities.

    Attributes:
        usage: usage of all choices so far.
    """

    def __init__(self, model: str, *, is_chat: bool, top_logprobs: int | None) -> None:
        self._is_chat, self._top = is_chat, top_logprobs
        kind = "chat.completion" if is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4()}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self.usage = Usage()

    def result(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": choices, "usage": usage}

    def choice(self, events: Iterable[Event], index: int = 0) -> dict[str, Any]:
        texts, reasoning, calls = list[str](), list[str](), list[ParsedCall]()
        records, reason = list[TokenLogprobs](), ""
        for event in events:
            match event:
                case Content(text):
                    texts.append(text)
                case Reasoning(text):
                    reasoning.append(text)
                case ToolCall(number, id_, name, arguments):
                    if number == len(calls):
                        calls.append(ParsedCall(id_, name))
                    calls[number].arguments += arguments
                case Done(reason, usage):
                    self.usage += usage
            if not isinstance(event, Started):
                records += event.logprobs
        fields: dict[str, Any] = {"text": "".join(texts)}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
            if reasoning:
                message["reasoning_content"] = "".join(reasoning)
            if calls:
                message["tool_calls"] = [call.message() for call in calls]
                message["content"] = message["content"] or None
            fields = {"message": message}
        logprobs = self._logprobs(records) if self._top is not None else None
        return {**fields, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def chunks(self, events: Iterable[Event], index: int = 0) -> Iterator[dict[str, Any]]:
        for event in events:
            match event:
                case Started() if self._is_chat:
                    yield self.chunk({"role": "assistant"}, index)
                case Content(text):
                    fields = {"content": text} if self._is_chat else {"text": text}
                    yield self.chunk(fields, index, event.logprobs)
                case Reasoning(text):
                    yield self.chunk({"reasoning_content": text}, index, event.logprobs)
                case ToolCall(number, id_, name, arguments):
                    about: dict[str, Any] = {"id": id_, "type": "function"} if id_ else {}
                    function = {**({"name": name} if id_ else {}), "arguments": arguments}
                    call = {"index": number, **about, "function": function}
                    yield self.chunk({"tool_calls": [call]}, index, event.logprobs)
                case Done(reason, usage):
                    self.usage += usage
                    last = {} if self._is_chat else {"text": ""}
                    yield self.chunk(last, index, event.logprobs, reason)

    def chunk(
        self,
        fields: dict[str, Any],
        index: int = 0,
        records: tuple[TokenLogprobs, ...] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        has_logprobs = bool(records) if self._is_chat else reason is None
        logprobs = self._logprobs(records) if self._top is not None and has_logprobs else None
        body = {"delta": fields} if self._is_chat else fields
        choice = {**body, "index": index, "logprobs": logprobs, "finish_reason": reason}
        kind = "chat.completion.chunk" if self._is_chat else self._head["object"]
        return {**self._head, "object": kind, "choices": [choice]}

    def _logprobs(self, records: Iterable[TokenLogprobs]) -> Any:
        if self._is_chat:
            return chat_logprobs(records, self._top or 0)
        return completion_logprobs(records)


def usage_json(usage: Usage, *, with_details: bool = True) -> dict[str, Any]:
    """Return the usage as OpenAI's JSON, with the number of dropped tokens if there are some."""
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.sampled,
        "total_tokens": usage.prompt + usage.sampled,
    }
    if with_details:
        dropped = {"dropped_tokens": usage.dropped} if usage.dropped else {}
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached, **dropped}
    return counts
