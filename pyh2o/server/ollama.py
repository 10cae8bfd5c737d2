"""Ollama's API."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import AliasChoices, BeforeValidator, Field

from ..errors import PictureError
from ..writing.logprobs import chat_logprobs
from ..writing.pictures import picture_of
from .answers import JsonAnswer, models_of
from .bodies import OTHER_SAMPLERS, SAMPLERS, ChatBody, CompletionBody, EmbeddingBody, Strict
from .dialect import OLLAMA
from .embeddings import EmbeddingModel
from .models import AnyModel, ModelSource
from .refusals import wrong_field
from .requests import routes_of
from .written import Block, Written, arguments_of, body_of, written

# Version of Ollama's API that this server implements: clients refuse old ones.
VERSION = "0.13.0"
# For files without a known date.
NO_DATE = "1970-01-01T00:00:00Z"
# Ollama's options to OpenAI's fields; num_ctx, num_gpu and others belong to the command line.
OPTIONS = {
    **{name: name for name in (*SAMPLERS, *OTHER_SAMPLERS, "seed", "stop")},
    "mirostat": "mirostat_mode",
    "num_predict": "max_tokens",
}
# Units of durations such as 1h30m, in seconds.
_UNITS = {"": 1, "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_PART = r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)"
_DURATION = re.compile(rf"[+-]?(?:\d+(?:\.\d*)?|(?:{_PART})+)", re.ASCII)
# OpenAI's fields to Ollama's, for error messages.
NAMES = {ours: f"options.{theirs}" for theirs, ours in OPTIONS.items()}
NAMES["response_format"] = "format"


ollama_routes = routes_of(OLLAMA)


def _seconds(given: object) -> object:
    """Return a duration in Go's format in seconds."""
    if not isinstance(given, str):
        return given
    if not _DURATION.fullmatch(given):
        raise ValueError('expected seconds or a duration such as "5m"; 0 unloads, -1 keeps loaded')
    parts = re.findall(f"{_PART}?", given, re.ASCII)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts if number)
    return -seconds if given.startswith("-") else seconds


KeepAlive = Annotated[float | None, BeforeValidator(_seconds)]


class _Model(Strict):
    # older clients of /api/show send "name"
    model: str = Field(validation_alias=AliasChoices("model", "name"))
    keep_alive: KeepAlive = None


class _WritingBody(_Model):
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] = ""
    options: dict[str, Any] = Field({})
    logprobs: bool = False
    top_logprobs: int = 0

    def fields(self) -> dict[str, Any]:
        """Return the common fields under OpenAI's names."""
        given = {OPTIONS[name]: v for name, v in self.options.items() if name in OPTIONS}
        if self.format == "json":
            given["response_format"] = {"type": "json_object"}
        elif self.format:
            wanted = {"type": "json_schema", "json_schema": {"schema": self.format}}
            given["response_format"] = wanted
        return {"max_tokens": -1, **given, "stream": self.stream}


class OllamaChatBody(_WritingBody):
    """The body of /api/chat."""

    messages: list[dict[str, Any]] = Field([])
    tools: list[dict[str, Any]] = Field([])
    think: bool | Literal["low", "medium", "high"] | None = None


class GenerateBody(_WritingBody):
    """The body of /api/generate."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    think: bool | Literal["low", "medium", "high"] | None = None
    images: list[Any] = Field([])


@ollama_routes.post("/api/chat")
async def _chat(request: Request, body: OllamaChatBody) -> Response:
    if not body.messages:
        return await _load(request, body, _message_of([]))
    fields = {
        **body.fields(),
        **_thinking(body.think),
        "messages": [_message(each, number) for number, each in enumerate(body.messages)],
        "tools": body.tools,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
    }
    return _written(request, body_of(ChatBody, fields, NAMES), body, _message_of)


def _message_of(blocks: Sequence[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _texts(blocks, "content")}
    if reasoning := _texts(blocks, "reasoning"):
        message["thinking"] = reasoning
    calls = [
        {"function": {"name": block.name, "arguments": block.input or {}}}
        for block in blocks
        if block.kind == "call"
    ]
    return {"message": {**message, "tool_calls": calls} if calls else message}


def _texts(blocks: Sequence[Block], kind: str) -> str:
    return "".join(block.text for block in blocks if block.kind == kind)


def _thinking(think: bool | str | None) -> dict[str, Any]:
    if isinstance(think, str):
        return {"reasoning_effort": think}
    return {} if think is None else {"chat_template_kwargs": {"enable_thinking": think}}


def _message(given: dict[str, Any], number: int) -> dict[str, Any]:
    content = _with_images(given.get("content"), given.get("images"), f"messages[{number}].images")
    called = given.get("tool_calls") or []
    if not isinstance(called, list):
        raise wrong_field(f"messages[{number}].tool_calls", "expected a list of calls")
    calls = [
        {"id": f"call_{index}", "type": "function", "function": _called(call.get("function"))}
        for index, call in enumerate(called)
        if isinstance(call, dict)
    ]
    about = {"role": given.get("role"), "content": content}
    more = {"name": given.get("tool_name"), "reasoning_content": given.get("thinking")}
    return {**about, **more, "tool_calls": calls or None}


def _called(function: Any) -> dict[str, Any]:
    about = function if isinstance(function, dict) else {}
    return {"name": about.get("name"), "arguments": arguments_of(about.get("arguments"))}


def _with_images(text: Any, images: Any, param: str) -> Any:
    """Return content with pictures, given in base64, before its text."""
    if not images:
        return text
    if not isinstance(images, list):
        raise wrong_field(param, "expected a list of pictures in base64")
    parts = [{"type": "image_url", "image_url": f"data:;base64,{image}"} for image in images]
    for part in parts:
        try:
            picture_of(part)
        except PictureError as error:
            raise wrong_field(param, str(error)) from None
    return [*parts, {"type": "text", "text": text}]


@ollama_routes.post("/api/generate")
async def _generate(request: Request, body: GenerateBody) -> Response:
    def part(blocks: Sequence[Block]) -> dict[str, Any]:
        reasoning = _texts(blocks, "reasoning")
        fields = {"response": _texts(blocks, "content")}
        return {**fields, "thinking": reasoning} if reasoning else fields

    if not body.prompt and not body.images:
        return await _load(request, body, part([]))
    inner: ChatBody | CompletionBody
    if body.raw or body.suffix:
        if body.images:
            raise wrong_field("images", "not supported with raw or suffix: omit them")
        fields = {**body.fields(), "prompt": body.prompt, "suffix": body.suffix or None}
        inner = body_of(CompletionBody, fields, NAMES)
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        content = _with_images(body.prompt, body.images, "images")
        messages = [*system, {"role": "user", "content": content}]
        fields = {**body.fields(), **_thinking(body.think), "messages": messages}
        inner = body_of(ChatBody, fields, NAMES)
    return _written(request, inner, body, part)


def _written(
    request: Request,
    inner: ChatBody | CompletionBody,
    body: _WritingBody,
    part: Callable[[Sequence[Block]], dict[str, Any]],
) -> Response:
    def events(text: Written) -> Iterator[Any]:
        for block, piece in text.parts():
            # Ollama sends a call in one piece
            is_ready = piece is None if block.kind == "call" else bool(piece)
            if is_ready:
                now = part([replace(block, text=block.text if piece is None else piece)])
                logprobs = _logprobs(text)
                yield {**_head(text.model), **now, "done": False, **logprobs}
        yield {**_end(text, part([])), **_logprobs(text)}

    def whole(text: Written) -> Any:
        answer = part(text.all_blocks())
        return {**_end(text, answer), **_logprobs(text)}

    return written(request, inner, body.model, whole, events, body.keep_alive)


def _head(model: AnyModel | ModelSource) -> dict[str, Any]:
    now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    return {"model": _tag(model.name), "created_at": now}


def _logprobs(text: Written) -> dict[str, Any]:
    found = chat_logprobs(text.take_logprobs(), getattr(text.body, "top_logprobs", 0))["content"]
    return {"logprobs": found} if found else {}


def _end(text: Written, part: dict[str, Any]) -> dict[str, Any]:
    read, write = (round(1e9 * each) for each in (text.read_seconds, text.write_seconds))
    return {
        **_head(text.model),
        **part,
        "done": True,
        "done_reason": "length" if text.finish == "length" else "stop",
        "total_duration": read + write,
        "load_duration": 0,
        "prompt_eval_count": text.usage.prompt,
        "prompt_eval_duration": read,
        "eval_count": text.usage.sampled,
        "eval_duration": write,
    }


async def _load(request: Request, body: _WritingBody, answer: dict[str, Any]) -> Response:
    """Load or unload the model: that is what a request without a prompt asks for."""
    models, unloads = models_of(request), body.keep_alive == 0
    source = models.find(body.model, embeds=None if unloads else False)
    answer = {
        **_head(source),
        **answer,
        "done": True,
        "done_reason": "unload" if unloads else "load",
    }
    if unloads:
        await to_thread.run_sync(models.unload, source)
        return JSONResponse(answer)
    return JsonAnswer(request, source, lambda _model: answer, body.keep_alive)


# ---------------------------------------------------------------------------------------------
# Embeddings and models
# ---------------------------------------------------------------------------------------------


class _EmbedBody(_Model):
    input: str | list[str]
    dimensions: int | None = None
    truncate: bool = True


@ollama_routes.post("/api/embed")
async def _embed(request: Request, body: _EmbedBody) -> Response:
    inner = body_of(EmbeddingBody, {"input": body.input, "dimensions": body.dimensions})

    def work(model: EmbeddingModel) -> dict[str, Any]:
        start = time.monotonic()
        result = model.embed(inner, truncate=body.truncate)
        return {
            "model": _tag(model.name),
            "embeddings": [each["embedding"] for each in result["data"]],
            "total_duration": round(1e9 * (time.monotonic() - start)),
            "load_duration": 0,
            "prompt_eval_count": result["usage"]["prompt_tokens"],
        }

    source = models_of(request).find(body.model, embeds=True)
    return JsonAnswer(request, source, work, body.keep_alive)


class _EmbeddingsBody(_Model):
    prompt: str


@ollama_routes.post("/api/embeddings")
async def _embed_one(request: Request, body: _EmbeddingsBody) -> Response:
    """Answer the deprecated route, for one text."""
    inner = body_of(EmbeddingBody, {"input": body.prompt}, {"input": "prompt"})

    def work(model: EmbeddingModel) -> dict[str, Any]:
        return {"embedding": model.embed(inner, name="prompt")["data"][0]["embedding"]}

    source = models_of(request).find(body.model, embeds=True)
    return JsonAnswer(request, source, work, body.keep_alive)


@ollama_routes.get("/api/tags")
async def _tags(request: Request) -> dict[str, Any]:
    return {"models": [_listed(source) for source in models_of(request).sources]}


@ollama_routes.get("/api/ps")
async def _loaded(request: Request) -> dict[str, Any]:
    loaded = [source for source in models_of(request).sources if source.model is not None]
    return {"models": [{**_listed(source), "size_vram": 0} for source in loaded]}


def _listed(source: ModelSource) -> dict[str, Any]:
    identity, name = source.identity, _tag(source.name)
    return {
        "name": name,
        "model": name,
        "modified_at": NO_DATE,
        "size": identity.bytes if identity else source.needed_bytes,
        "digest": identity.sha256 if identity else "",
        "details": _details(""),
    }


def _tag(name: str) -> str:
    return name if ":" in name else f"{name}:latest"


def _details(family: str) -> dict[str, Any]:
    return {"format": "gguf", "family": family, "families": [family] if family else []}


@ollama_routes.post("/api/show")
async def _show(request: Request, body: _Model) -> Response:
    def work(served: AnyModel) -> dict[str, Any]:
        model = served.embedder if isinstance(served, EmbeddingModel) else served.engine.model
        kind = model.metadata.get("general.architecture", "")
        general = {k: v for k, v in model.metadata.items() if k.startswith("general.")}
        return {
            "modelfile": "",
            "parameters": "",
            "template": model.metadata.get("tokenizer.chat_template", ""),
            "modified_at": NO_DATE,
            "details": _details(kind),
            "model_info": {**general, f"{kind}.context_length": served.longest_prompt},
            "capabilities": _capabilities(served),
        }

    return JsonAnswer(request, models_of(request).find(body.model), work)


def _capabilities(served: AnyModel) -> list[str]:
    if isinstance(served, EmbeddingModel):
        return ["embedding"]
    vision = ["vision"] if served.senses["sees"] else []
    return ["completion", *served.engine.model.chat.abilities, *vision]


@ollama_routes.get("/api/version")
async def _version() -> dict[str, str]:
    return {"version": VERSION}
