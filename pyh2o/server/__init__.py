"""An HTTP server in OpenAI's words, and in those of others, with evicting models behind.

Models go by name (`models`), and many requests to one are answered at the same time: as many as its
engine has places, each batch with the next token of all of them, and others wait. A model that was
made for it has embeddings instead (`embeddings`).

* Anthropic's messages, OpenAI's responses, Ollama's and llama-server's routes are dialects
  (`dialect`): a file each, over the same completions (`written`).
* A body is checked before the model sees it (`bodies`); what is refused is the client's error, with
  the field's name, and no error takes more than a line (`refusals`).
* A client that leaves ends its work, while it waits, while its prompt is read, or while it is
  answered (`answers`).
* `/metrics` and `/v1/kv` say how the work goes, and nothing of what is written (`metrics`).
* Bodies, prompts and the wait have limits (`limits`), and so has the number of connections. How
  long a client may take to send or to read is for a reverse proxy to say.
* A request without `max_tokens` ends after as many tokens as the window has: a text in a cache of
  fixed size has no other end.
* `/` answers with a page for chats and stories (`page`, and its files in the folder beside it).
* Only its own web page may read responses, and pages of `allowed_origins`.
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
