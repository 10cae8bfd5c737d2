"""The errors pyh2o raises: one line each, naming the cause and the cure.

Each also derives from the built-in error that llama_cpp raises in the same place, so that
`except ValueError` in existing programs goes on working.
"""

from __future__ import annotations

import sys


class PyH2OError(Exception):
    """Base of every error that is meant for the user's eyes."""


class SettingsError(PyH2OError, ValueError):
    """Eviction or context settings that make no sense together."""


class PolicyError(PyH2OError, ValueError):
    """A policy that gives rows scores by which they cannot be put in order."""


class ModelError(PyH2OError, ValueError):
    """A model file that is missing, broken or cannot be fetched."""


class UnsupportedModelError(PyH2OError, ValueError):
    """A sound model that eviction refuses, because its rows cannot be dropped exactly."""


class PictureError(PyH2OError, ValueError):
    """A picture, or sound, that cannot be read, or that the model does not take."""


class ContextLimitError(PyH2OError, ValueError):
    """A text that needs more positions than there are."""


class EvictedError(PyH2OError, RuntimeError):
    """An operation that needs rows which have been evicted."""


class DecodeError(PyH2OError, RuntimeError):
    """Tokens that llama.cpp could not evaluate, or whose logits are no numbers."""


class StateError(PyH2OError, ValueError):
    """A saved state of a KV cache that is damaged, or of another model, settings or version."""


class SessionError(PyH2OError, ValueError):
    """A session file that is missing, damaged, of another model or settings, or not writable."""


class OtherSettingsError(SessionError):
    """A sound session of another model, settings or template: its text can be read again."""


class SessionOpenError(SessionError):
    """A session that is open in another program, or in another place of this one."""


class BatchError(PyH2OError, ValueError):
    """A file of a batch that cannot be read or written, or results of another batch."""


class GrammarError(PyH2OError, ValueError):
    """A grammar or JSON schema that no text can be held to.

    Attributes:
        reason: why not.
        field: the argument that it was given in.
    """

    def __init__(self, reason: str, field: str = "grammar") -> None:
        super().__init__(f"{field}: {reason}")
        self.reason, self.field = reason, field


class TextError(PyH2OError, ValueError):
    """A text that is not Unicode: it has a lone surrogate, which UTF-8 cannot encode."""


class ChatError(PyH2OError, ValueError):
    """Messages that a chat template refuses, or a template that llama.cpp cannot apply."""


class ClosedError(PyH2OError, RuntimeError):
    """A model that is used after it was closed."""


class BusyError(PyH2OError, RuntimeError):
    """A model that is used for two texts at once, or from two threads."""


class ForkedError(PyH2OError, RuntimeError):
    """A model that is used in a process forked from the one that loaded it."""


class ServerError(PyH2OError, ConnectionError):
    """A server for layers on another machine that cannot be used, or one that cannot be started."""


class LibraryError(PyH2OError, ImportError):
    """The library that evicts is not there or wrong, or another llama.cpp is loaded already."""


class MissingPackageError(PyH2OError, ImportError):
    """A package that only an extra of pyh2o needs is not installed."""

    def __init__(self, what: str, package: str | None, extra: str) -> None:
        super().__init__(
            f"{what} needs the package {package}: {sys.executable} -m pip install "
            f"'pyh2o-llm[{extra}]'"
        )


class NativeError(PyH2OError, RuntimeError):
    """A refusal of the native library; `code` is its return code (llama-h2o.h)."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
