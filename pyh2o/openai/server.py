"""An HTTP server in OpenAI's words: the routes of llama_cpp.server, with an evicting model behind.

One model, and one request at a time; others wait for their turn. Unlike in llama_cpp.server

* a new request does not break off the answer to another one;
* a request without `max_tokens` ends after as many tokens as the window has: a text in a cache of
  fixed size has no other end;
* what the model refuses is an error of the client (400), which clients do not try again, and amid a
  stream it is an event. There, it is an error of the server, and a stream just breaks off;
* `max_completion_tokens` and the response format `json_schema` are understood;
* only web pages of this machine may call it from a browser.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, cast

from ..errors import ContextLimitError, MissingPackageError
from ..llama import Llama
from .chat import as_json_object, in_openai_words

try:
    import llama_cpp.server.app as routes
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import JSONResponse
    from llama_cpp.server.settings import ServerSettings
except ModuleNotFoundError as error:
    raise MissingPackageError(
        f"the server needs the package {error.name}: pip install 'pyh2o-llm[server]'"
    ) from error

import llama_cpp

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Message, Receive, Send], Awaitable[None]]

CHAT_ROUTE = "/v1/chat/completions"
LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"

logger = logging.getLogger("uvicorn.error")


class ShutdownError(Exception):
    """The server was told to end while it answers."""


def create_app(llama: Llama, *, name: str, api_key: str | None = None) -> FastAPI:
    """The application, for any ASGI server.

    llama_cpp.server keeps its model in a variable of its module, so a process has one application.

    Args:
        llama: the model; only this application may use it from now on.
        name: what the model is called in /v1/models.
        api_key: what clients have to send as bearer token; None lets everyone in.
    """
    # All of them, or the environment would fill in the rest.
    settings = ServerSettings(
        host="",
        port=0,
        ssl_keyfile=None,
        ssl_certfile=None,
        api_key=api_key,
        interrupt_requests=False,
        disable_ping_events=False,
        root_path="",
    )
    routes.set_server_settings(settings)
    model = ServedModel(llama)
    routes._llama_proxy = _OneModel(model, name)

    app = FastAPI(title="pyh2o", version=llama_cpp.__version__)
    app.state.model = model
    app.include_router(routes.router)
    app.add_api_route("/health", _health, summary="Health")
    app.add_exception_handler(HTTPException, _error_response)
    app.add_middleware(_StreamErrors)
    app.add_middleware(_ChatRequests)
    app.add_middleware(
        CORSMiddleware, allow_origin_regex=LOCAL_PAGES, allow_methods=["*"], allow_headers=["*"]
    )
    return app


def run(app: FastAPI, listener: socket.socket, *, verbose: bool = False) -> None:
    """Serve until Ctrl-C; an answer in the making breaks off at its next token.

    Args:
        app: what `create_app` returned.
        listener: where to listen.
        verbose: log every request.

    Raises:
        KeyboardInterrupt: it was Ctrl-C that ended it.
    """
    log_level = "info" if verbose else "warning"
    # The app has nothing to start or end, and a second Ctrl-C in that moment would be a traceback.
    config = uvicorn.Config(app, log_level=log_level, lifespan="off")
    _Server(config).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Tells the model when it is to end; by itself it would wait for the whole answer."""

    def handle_exit(self, *args: Any) -> None:
        self.config.app.state.model.shutting_down = True  # type: ignore[union-attr]
        super().handle_exit(*args)


# ---------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------


class _OneModel:
    """What the routes take for llama_cpp.server's `LlamaProxy`."""

    def __init__(self, model: ServedModel, name: str) -> None:
        self._model = model
        self._name = name

    def __call__(self, _name: str | None = None) -> ServedModel:
        return self._model

    def __iter__(self) -> Iterator[str]:
        yield self._name


class ServedModel:
    """A model as the routes call it; what is not here is the model's own.

    The routes call `__call__`, `create_chat_completion` and `create_embedding`; for streams, those
    of `llama_cpp.Llama` itself, with this object in its place.

    Attributes:
        shutting_down: set to end an answer in the making.
    """

    def __init__(self, llama: Llama) -> None:
        self._llama = llama
        self.shutting_down = False
        llama.prompt_progress = self._check_progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _answered_refusals():
            return self.create_completion(*args, **kwargs)

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        with _answered_refusals():
            return Llama.create_chat_completion(cast(Any, self), *args, **kwargs)

    def create_embedding(self, *_args: Any, **_kwargs: Any) -> Any:
        raise HTTPException(400, "this server has no embeddings: its model is loaded to write text")

    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """A completion in OpenAI's words, that ends some time."""
        if (kwargs.get("max_tokens") or 0) <= 0:
            kwargs["max_tokens"] = self._llama.n_ctx()
        criteria = [*(kwargs.get("stopping_criteria") or []), self._check_token]
        kwargs["stopping_criteria"] = llama_cpp.StoppingCriteriaList(criteria)
        return in_openai_words(self._llama.create_completion(*args, **kwargs))

    def _check_token(self, _ids: Any, _logits: Any) -> bool:
        """A criterion that stops no text of a server that goes on."""
        self._check()
        return False

    def _check_progress(self, _done: int, _total: int) -> None:
        self._check()

    def _check(self) -> None:
        if self.shutting_down:
            raise ShutdownError("the server is shutting down")


# ---------------------------------------------------------------------------------------------
# Requests and errors
# ---------------------------------------------------------------------------------------------


async def _health() -> dict[str, str]:
    return {"status": "ok"}


@contextmanager
def _answered_refusals() -> Iterator[None]:
    """Answer a request that is refused; any other error is llama_cpp.server's to report."""
    try:
        yield
    except (ValueError, ShutdownError) as error:
        raise HTTPException(_status(error), str(error)) from error


def _status(error: BaseException | None) -> int:
    if isinstance(error, ValueError):
        return 400
    return 503 if isinstance(error, ShutdownError) else 500


async def _error_response(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    body = _error_body(error.status_code, error.detail, error.__cause__)
    return JSONResponse(body, error.status_code, error.headers)


def _error_body(status: int, message: str, cause: BaseException | None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error" if status < 500 else "internal_server_error",
            "param": None,
            "code": "context_length_exceeded" if isinstance(cause, ContextLimitError) else None,
        }
    }


class _StreamErrors:
    """Reports an error amid a stream as its last event; the status has been sent by then."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        streaming = False

        async def send_without_end(message: Message) -> None:
            nonlocal streaming
            if message["type"] == "http.response.start":
                content_type = dict(message["headers"]).get(b"content-type", b"")
                streaming = content_type.startswith(b"text/event-stream")
            if streaming and message["type"] == "http.response.body":
                # The stream of a task that failed ends before the error comes to light here.
                message["more_body"] = True
            await send(message)

        try:
            await self._app(scope, receive, send_without_end)
            last = b""
        except Exception as error:
            if not streaming:
                raise
            last = _error_event(_cause(error))
        if streaming:
            await send({"type": "http.response.body", "body": last})


def _cause(error: BaseException) -> BaseException:
    """The first error in a group; tasks that run side by side end in groups."""
    while getattr(error, "exceptions", None):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    return error


def _error_event(error: BaseException) -> bytes:
    status = _status(error)
    if status == 500:
        logger.error("an answer broke off", exc_info=error)
    return b"data: " + json.dumps(_error_body(status, str(error), error)).encode() + b"\n\n"


class _ChatRequests:
    """Puts what OpenAI's clients send today into words that llama_cpp.server knows."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] != CHAT_ROUTE:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            body = _chat_request(await request.body())
        except ValueError as error:
            response = JSONResponse(_error_body(400, str(error), error), 400)
            await response(scope, receive, send)
            return
        # The length is told to the application by the end of the body, not by the header.
        unread = [body]

        async def receive_body() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        await self._app(scope, receive_body, send)


def _chat_request(body: bytes) -> bytes:
    """The body of a chat request.

    Raises:
        ValueError: it is not JSON, or has a response format that is none.
    """
    request = json.loads(body)
    if not isinstance(request, dict):
        return body
    limit = request.pop("max_completion_tokens", None)
    if limit is not None:
        request["max_tokens"] = limit
    if isinstance(request.get("response_format"), dict):
        request["response_format"] = as_json_object(request["response_format"])
    return json.dumps(request).encode()
