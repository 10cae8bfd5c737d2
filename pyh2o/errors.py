"""The errors of pyh2o: one line each, with the cause and the remedy.

Each also derives from the built-in error that llama_cpp raises in the same case, so that `except
ValueError` in existing programs still works.
"""

from __future__ import annotations

import sys


class PyH2OError(Exception):
    """Base class of all errors with a message for users."""


class SettingsError(PyH2OError, ValueError):
    """Invalid or contradictory settings."""


class PolicyError(PyH2OError, ValueError):
    """A policy whose scores are not finite numbers, one per row."""


class ModelError(PyH2OError, ValueError):
    """A model file that is missing or damaged, or cannot be downloaded."""


class UnsupportedModelError(PyH2OError, ValueError):
    """A valid model that eviction does not support: its rows cannot be dropped exactly."""


class PictureError(PyH2OError, ValueError):
    """A picture or sound that cannot be read, or that the model does not support."""


class ContextLimitError(PyH2OError, ValueError):
    """A text that needs more positions than the context has."""


class EvictedError(PyH2OError, RuntimeError):
    """An operation that needs evicted rows."""


class DecodeError(PyH2OError, RuntimeError):
    """Tokens that llama.cpp failed to evaluate, or whose logits are NaN or infinite."""


class StateError(PyH2OError, ValueError):
    """A KV cache state that is damaged, or from another model, other settings or version."""


class SessionError(PyH2OError, ValueError):
    """A session that is missing, damaged, not writable or of another kind."""


class SessionOpenError(SessionError):
    """A session that is already open, in this or another program."""


class BatchError(PyH2OError, ValueError):
    """A batch file that cannot be read or written, or results of another batch."""


class GrammarError(PyH2OError, ValueError):
    """An invalid or unsupported grammar or JSON schema, with the argument `field` it is from."""

    def __init__(self, reason: str, field: str = "grammar") -> None:
        super().__init__(f"{field}: {reason}")
        self.reason, self.field = reason, field


class TextError(PyH2OError, ValueError):
    """A text with a lone surrogate, which UTF-8 cannot encode."""


class ChatError(PyH2OError, ValueError):
    """Messages that a chat template rejects, or a template that cannot be rendered."""


class ClosedError(PyH2OError, RuntimeError):
    """Use of a closed model."""


class BusyError(PyH2OError, RuntimeError):
    """Use of a model by two texts or two threads at once."""


class ForkedError(PyH2OError, RuntimeError):
    """Use of a model in a process forked from the one that loaded it."""


class ServerError(PyH2OError, ConnectionError):
    """An RPC server for model layers that cannot be used or started."""


class LibraryError(PyH2OError, ImportError):
    """A missing or wrong native library, or another llama.cpp that is already loaded."""


class MissingPackageError(PyH2OError, ImportError):
    """A missing package of an optional extra of pyh2o."""

    def __init__(self, what: str, package: str | None, extra: str) -> None:
        super().__init__(
            f"{what} needs the package {package}: {sys.executable} -m pip install "
            f"'pyh2o-llm[{extra}]'"
        )


class NativeError(PyH2OError, RuntimeError):
    """An error of the native library; `code` is its return code (llama-h2o.h)."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
