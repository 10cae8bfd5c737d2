"""The application: OpenAI's routes, who may call them, and what a body may be."""

from __future__ import annotations

import secrets
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import uvicorn
from anyio import from_thread, to_thread
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from ... import __version__
from ..limits import Limits
from .answers import Answer, EventAnswer, Threads, refused
from .bodies import ChatBody, CompletionBody, EmbeddingBody, TextBody, TokensBody
from .embeddings import EmbeddingModel
from .metrics import CONTENT_TYPE, CountedAnswers, kv_json, metrics_text
from .models import AnyModel, ModelSource, ServedModels
from .refusals import RefusedError, body_refusal
from .served_model import ServedModel

LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
# The rest of a body that is too long is read for so long, or its client would miss the answer.
DRAIN_SECONDS = 10

# A connection without requests stays open for so long: people read an answer before they go on.
KEEP_ALIVE_SECONDS = 75

AnyBody = TypeVar("AnyBody", bound=BaseModel)


def create_app(models: ServedModels, *, api_key: str | None = None) -> FastAPI:
    """The application, for any ASGI server.

    Args:
        models: what is served; only this application may use them from now on.
        api_key: what clients have to send as bearer token; None lets everyone in.
    """
    app = FastAPI(title="pyh2o", version=__version__)
    app.state.models = models
    app.state.threads = {
        source.name: Threads(source.n_at_once, models.limits.waiting) for source in models.sources
    }
    app.state.api_key = api_key
    app.state.answered = Counter()
    app.include_router(routes)
    app.add_api_route("/health", _health, summary="Health")
    for kind in (RefusedError, HTTPException, Exception):
        app.add_exception_handler(kind, _refuse)
    app.add_middleware(CountedAnswers, answered=app.state.answered)
    app.add_middleware(
        CORSMiddleware, allow_origin_regex=LOCAL_PAGES, allow_methods=["*"], allow_headers=["*"]
    )
    return app


def run(app: FastAPI, listener: socket.socket, *, verbose: bool = False) -> None:
    """Serve until Ctrl-C; answers in the making break off at their next token.

    Args:
        app: what `create_app` returned.
        listener: where to listen.
        verbose: log every request.

    Raises:
        KeyboardInterrupt: it was Ctrl-C that ended it.
    """
    log_level = "info" if verbose else "warning"
    # The app has nothing to start or end, and a second Ctrl-C in that moment would be a traceback.
    config = uvicorn.Config(
        app, log_level=log_level, lifespan="off", timeout_keep_alive=KEEP_ALIVE_SECONDS
    )
    _Server(config).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Tells the models when they are to end; by itself it would wait for whole answers."""

    def handle_exit(self, *args: Any) -> None:
        self.config.app.state.models.shut_down()  # type: ignore[union-attr]
        super().handle_exit(*args)


# ---------------------------------------------------------------------------------------------
# Requests
# ---------------------------------------------------------------------------------------------


def _check_key(request: Request) -> None:
    api_key = request.app.state.api_key
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if api_key is None:
        return
    if scheme.lower() != "bearer" or not secrets.compare_digest(
        given.strip().encode(), api_key.encode()
    ):
        raise RefusedError(401, "Invalid API key: send the server's --api-key as bearer token")


async def _read(request: Request, kind: type[AnyBody]) -> AnyBody:
    """The body of a request.

    Raises:
        RefusedError: it is too long, not JSON, or not of this kind.
    """
    # A page of any site may send what is not called JSON without asking first.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RefusedError(415, "the header Content-Type has to be application/json")
    data = await _body(request, _models(request).limits)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise body_refusal(error) from None


async def _body(request: Request, limits: Limits) -> bytes:
    body = bytearray()
    stream = request.stream()
    async for piece in stream:
        body += piece
        if len(body) > limits.body_bytes:
            body.clear()
            with anyio.move_on_after(DRAIN_SECONDS):
                async for _ in stream:
                    pass
            raise RefusedError(
                413,
                f"the body has more than {limits.body_mib} MiB: send less, or start the server "
                "with a higher --max-body-mib",
            )
    return bytes(body)


def _takes(kind: type[BaseModel]) -> dict[str, Any]:
    """The description of a body, for the pages at /docs."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def _models(request: Request) -> ServedModels:
    models: ServedModels = request.app.state.models
    return models


def _answer(
    request: Request,
    source: ModelSource,
    ask: Callable[[Any, Callable[[], None]], Any],
    *,
    stream: bool = False,
    waits: bool = True,
) -> Answer:
    """The answer that a model gives.

    Args:
        request: the request.
        source: of the model.
        ask: gets the model, loaded, and what is to be called after each piece of a prompt.
        stream: whether it is sent as it is made.
        waits: whether it takes a place, which there may be none of. Else only a model that has to
            be loaded makes it wait.
    """
    models = _models(request)

    def work(on_read: Callable[[], None]) -> Any:
        return models.ask(source, lambda model: ask(model, on_read), from_thread.check_cancelled)

    threads: Threads = request.app.state.threads[source.name]
    run = threads.run if waits or not models.is_loaded(source) else to_thread.run_sync
    return EventAnswer(run, work) if stream else Answer(run, work)


# ---------------------------------------------------------------------------------------------
# Routes
# ---------------------------------------------------------------------------------------------

routes = APIRouter(dependencies=[Depends(_check_key)])


@routes.post("/v1/completions", summary="Completion", openapi_extra=_takes(CompletionBody))
@routes.post("/v1/engines/copilot-codex/completions", include_in_schema=False)
async def _complete(request: Request) -> Response:
    body = await _read(request, CompletionBody)
    source = _models(request).find(body.model, embeds=False)

    def complete(model: ServedModel, on_read: Callable[[], None]) -> Any:
        return model.complete(body, on_read)

    return _answer(request, source, complete, stream=body.stream)


@routes.post("/v1/chat/completions", summary="Chat", openapi_extra=_takes(ChatBody))
async def _chat(request: Request) -> Response:
    body = await _read(request, ChatBody)
    source = _models(request).find(body.model, embeds=False)

    def chat(model: ServedModel, on_read: Callable[[], None]) -> Any:
        return model.chat(body, on_read)

    return _answer(request, source, chat, stream=body.stream)


@routes.post("/v1/embeddings", summary="Embeddings", openapi_extra=_takes(EmbeddingBody))
async def _embed(request: Request) -> Response:
    body = await _read(request, EmbeddingBody)
    source = _models(request).find(body.model, embeds=True)

    def embed(model: EmbeddingModel, _on_read: Callable[[], None]) -> Any:
        return model.embed(body)

    return _answer(request, source, embed)


@routes.get("/v1/models", summary="Models")
async def _list(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_listed(source) for source in _models(request).sources]}


@routes.get("/v1/models/{name}", summary="Model")
async def _model(request: Request, name: str) -> dict[str, Any]:
    return _listed(_models(request).named(name))


def _listed(source: ModelSource) -> dict[str, Any]:
    return {"id": source.name, "object": "model", "created": 0, "owned_by": "pyh2o"}


@routes.post("/extras/tokenize", summary="Tokenize", openapi_extra=_takes(TextBody))
async def _tokenize(request: Request) -> Response:
    body = await _read(request, TextBody)
    source = _models(request).find(body.model)

    def tokenize(model: AnyModel, _on_read: Callable[[], None]) -> Any:
        return {"tokens": model.tokenize(body.input)}

    return _answer(request, source, tokenize, waits=False)


@routes.post("/extras/tokenize/count", summary="Count tokens", openapi_extra=_takes(TextBody))
async def _count(request: Request) -> Response:
    body = await _read(request, TextBody)
    source = _models(request).find(body.model)

    def count(model: AnyModel, _on_read: Callable[[], None]) -> Any:
        return {"count": len(model.tokenize(body.input))}

    return _answer(request, source, count, waits=False)


@routes.post("/extras/detokenize", summary="Detokenize", openapi_extra=_takes(TokensBody))
async def _detokenize(request: Request) -> Response:
    body = await _read(request, TokensBody)
    source = _models(request).find(body.model)

    def detokenize(model: AnyModel, _on_read: Callable[[], None]) -> Any:
        return {"text": model.detokenize(body.tokens)}

    return _answer(request, source, detokenize, waits=False)


@routes.get("/v1/kv", summary="What the places of texts hold")
async def _kv(request: Request) -> Response:
    models = _models(request)
    return Answer(to_thread.run_sync, lambda _: kv_json(models))


@routes.get("/metrics", summary="Figures for Prometheus")
async def _metrics(request: Request) -> Response:
    models, answered = _models(request), request.app.state.answered
    text = await to_thread.run_sync(metrics_text, models, answered.copy())
    return Response(text, media_type=CONTENT_TYPE)


async def _health() -> dict[str, str]:
    return {"status": "ok"}


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        place = f"{request.method} {request.url.path}"
        error = RefusedError(error.status_code, f"{place}: {error.detail}")
    return refused(request.scope, error)
