"""HTTP server with OpenAI's API and the APIs of Anthropic, Ollama and llama.cpp's server.

Requests choose a model by name (`models`). The engine of a model decodes all its slots in one
batch; more requests wait for a slot. Embedding models return vectors (`embeddings`).

* Each dialect has its own file and converts requests to OpenAI's (`dialect`, `written`).
* The server validates a body before the model reads it (`bodies`). An error is one line and names
  the wrong field (`refusals`).
* When a client disconnects, its request is cancelled, even while it waits (`answers`).
* `/metrics` and `/v1/kv` report load and memory, but no text (`metrics`).
* The size of bodies and prompts, the wait and the number of connections have limits (`limits`).
  A reverse proxy has to limit how slowly a client may send or read.
* Without `max_tokens` a request generates at most as many tokens as the window has: a cache of
  fixed size never fills up.
* `/` serves a page for chats and stories (`page`).
* Web pages of other origins cannot read responses, except those in `allowed_origins`.
"""

from __future__ import annotations

from ..errors import MissingPackageError

try:
    import anyio  # noqa: F401
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingPackageError("the server", error.name, "server") from error

from ..limits import Limits
from .app import create_app, run
from .embeddings import EmbeddingModel
from .models import ModelSource, ServedModels
from .served_model import ServedModel

__all__ = [
    "EmbeddingModel",
    "Limits",
    "ModelSource",
    "ServedModel",
    "ServedModels",
    "create_app",
    "run",
]
