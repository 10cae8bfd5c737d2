"""The application: OpenAI's routes, who may call them, and what a body may be."""

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
from .answers import Answer, models_of
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

# After so many seconds again and again memory is given back, and sessions are let go.
SECONDS_TO_GIVE_BACK = 60
# A connection without requests stays open for so long: people read an answer before they go on.
KEEP_ALIVE_SECONDS = 75
# Of connections and requests; sessions need some files, too.
MAX_CONNECTIONS = 1000


def create_app(
    models: ServedModels, *, api_key: str | None = None, allowed_origins: Sequence[str] = ()
) -> FastAPI:
    """The application, for any ASGI server.

    Args:
        models: what is served; only this application may use them from now on.
        api_key: what clients have to send as bearer token; None lets everyone in.
        allowed_origins: origins whose web pages may read responses, such as http://localhost:3000.
            The server's own page always may.
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
    # one by one: what only the handler of Exception gets is raised again
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
    """Serve until Ctrl-C; answers in the making break off at their next token.

    Args:
        app: what `create_app` returned.
        listener: where to listen.
        verbose: log every request.

    Raises:
        KeyboardInterrupt: it was Ctrl-C that ended it.
    """
    config = server_config(
        app,
        log_level="info" if verbose else "warning",
        timeout_notify=SECONDS_TO_GIVE_BACK,
        callback_notify=partial(to_thread.run_sync, _give_back, app),
    )
    _Server(config).run(sockets=[listener])


def server_config(app: FastAPI, **settings: Any) -> uvicorn.Config:
    """How uvicorn serves the application; with other settings of its own."""
    # The app has nothing to start or end, and a second Ctrl-C in that moment would be a traceback.
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
    """Tells the models when they are to end; by itself it would wait for whole answers."""

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn begins to count Ctrl-C when its loop runs. In the midst of making the loop one
        # would be an exception: half a loop complains, and where Python cleans up it is lost.
        with super().capture_signals():
            try:
                super().run(sockets)
            finally:  # a SIGTERM ends the program where this context does
                self.config.app.state.sessions.let_go_idle(0)  # type: ignore[union-attr]

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    def handle_exit(self, *args: Any) -> None:
        self.config.app.state.models.shut_down()  # type: ignore[union-attr]
        super().handle_exit(*args)


# ---------------------------------------------------------------------------------------------
# Routes
# ---------------------------------------------------------------------------------------------

routes = APIRouter(route_class=CheckedRoute)
dialects = (openai_routes, responses_routes, anthropic_routes, llama_server_routes, ollama_routes)


@routes.post("/v1/embeddings")
async def _embed(request: Request, body: EmbeddingBody) -> Response:
    source = models_of(request).find(body.model, embeds=True)
    return Answer(request, source, lambda model: model.embed(body))


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
        place = f"{request.method} {request.url.path}"
        error = RefusedError(error.status_code, f"{place}: {error.detail}")
    if isinstance(error, RequestValidationError):
        error = field_refusal(error.errors()[0], skip=1)  # "body", "path" or "query"
    return refusal_response(request.scope, error)


async def _leave(_request: Request, _error: Exception) -> Response:
    """For a client that left before its body was whole: it hears of nothing, nor has anybody to."""
    return Response(status_code=400)
