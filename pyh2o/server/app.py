"""The ASGI application, and uvicorn's settings to run it."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import uvicorn
from anyio import to_thread
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..errors import PyH2OError
from ..system.memory import give_back_freed_memory
from .answers import JsonAnswer, models_of
from .anthropic import anthropic_routes
from .bodies import EmbeddingBody
from .files import file_routes
from .llama_server import llama_server_routes
from .machine import machine_routes
from .metrics import AnswerCounter, Figures, kv_json
from .models import ModelSource, ServedModels
from .ollama import ollama_routes
from .openai import openai_routes
from .page import add_page
from .refusals import RefusedError, field_refusal, refusal_response
from .requests import CheckedRoute
from .responses import responses_routes
from .session_routes import session_routes
from .sessions import Sessions

# Interval at which freed memory returns to the system and idle sessions are closed.
SECONDS_TO_GIVE_BACK = 60
# Idle connections stay open this long: people read an answer before they send the next message.
KEEP_ALIVE_SECONDS = 75
# Below the usual limit of open files, which sessions need too.
MAX_CONNECTIONS = 1000


def create_app(
    models: ServedModels, *, api_key: str | None = None, allowed_origins: Sequence[str] = ()
) -> FastAPI:
    """Return the application, for any ASGI server.

    Args:
        models: the models to serve; the application owns them from now on.
        allowed_origins: other origins whose web pages may read responses, such as
            http://localhost:3000.
    """
    app = FastAPI(openapi_url=None)
    app.state.models = models
    app.state.api_key = api_key
    app.state.sessions = Sessions(models)
    app.state.answered = counts = Counter[tuple[str, int]]()
    app.state.figures = CollectorRegistry()
    app.state.figures.register(Figures(models, counts))
    for router in (routes, session_routes, machine_routes, file_routes, *dialects):
        app.include_router(router)
    add_page(app)
    app.add_api_route("/health", _health, methods=["GET", "HEAD"])
    # one by one: Starlette raises an error again that only the handler of Exception has handled
    for kind in (
        RefusedError, PyH2OError, OSError, HTTPException, RequestValidationError, Exception
    ):  # fmt: skip
        app.add_exception_handler(kind, _refuse)
    app.add_exception_handler(ClientDisconnect, _leave)
    app.add_middleware(AnswerCounter, answered=counts)
    app.add_middleware(
        CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"]
    )
    return app


def run(app: FastAPI, listener: socket.socket, *, verbose: bool = False) -> None:
    """Serve until Ctrl-C (a KeyboardInterrupt) or SIGTERM; requests end at their next token."""
    config = server_config(
        app,
        log_level="info" if verbose else "warning",
        timeout_notify=SECONDS_TO_GIVE_BACK,
        callback_notify=partial(to_thread.run_sync, _give_back, app),
    )
    _Server(config).run(sockets=[listener])


def server_config(app: FastAPI, **settings: Any) -> uvicorn.Config:
    # The app has no lifespan events, and a second Ctrl-C during them would print a traceback.
    return uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        **settings,
    )


def _give_back(app: FastAPI) -> None:
    app.state.sessions.let_go_idle()
    give_back_freed_memory()


class _Server(uvicorn.Server):
    """Stops requests in flight at shutdown; uvicorn would wait until they are complete."""

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn handles signals once its event loop runs. Before that, Ctrl-C would raise an
        # exception while the loop is half set up.
        with super().capture_signals():
            try:
                super().run(sockets)
            finally:  # after a SIGTERM the process ends with this context
                self.config.app.state.sessions.let_go_idle(0)  # type: ignore[union-attr]

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    def handle_exit(self, *args: Any) -> None:
        self.config.app.state.models.shut_down()  # type: ignore[union-attr]
        super().handle_exit(*args)


routes = APIRouter(route_class=CheckedRoute)
dialects = (openai_routes, responses_routes, anthropic_routes, llama_server_routes, ollama_routes)


@routes.post("/v1/embeddings")
async def _embed(request: Request, body: EmbeddingBody) -> Response:
    source = models_of(request).find(body.model, embeds=True)
    return JsonAnswer(request, source, lambda model: model.embed(body))


@routes.get("/v1/models")
async def _list(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_listed(source) for source in models_of(request).sources]}


@routes.get("/v1/models/{name:path}")
async def _model(request: Request, name: str) -> dict[str, Any]:
    return _listed(models_of(request).named(name))


def _listed(source: ModelSource) -> dict[str, Any]:
    return {"id": source.name, "object": "model", "created": 0, "owned_by": "pyh2o"}


@routes.get("/v1/kv")
def _kv(request: Request) -> dict[str, Any]:
    return kv_json(models_of(request))


@routes.get("/metrics")
def _metrics(request: Request) -> Response:
    write, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(write(request.app.state.figures), media_type=media_type)


async def _health() -> dict[str, str]:
    return {"status": "ok"}


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        route = f"{request.method} {request.url.path}"
        error = RefusedError(error.status_code, f"{route}: {error.detail}")
    if isinstance(error, RequestValidationError):
        error = field_refusal(error.errors()[0], skip=1)  # "body", "path" or "query"
    return refusal_response(request.scope, error)


async def _leave(_request: Request, _error: Exception) -> Response:
    """Ignore a client that disconnected while it sent its body: nobody reads the response."""
    return Response(status_code=400)
