"""What every served model has: a name, limits, tokens, and an end."""

from __future__ import annotations

from anyio import from_thread

from ...llama import Llama
from ..limits import Limits
from .refusals import RefusedError, ShutdownError


class ServedLlama:
    """A model that many requests use, each in a thread of anyio's.

    Attributes:
        name: what clients know it by.
        limits: what a request may take.
        shutting_down: set to end all answers in the making.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.limits = limits
        self.shutting_down = False

    @property
    def _llama(self) -> Llama:
        raise NotImplementedError

    def grown_bytes(self) -> int:
        """Memory that it has taken since it was loaded."""
        return 0

    def check_open(self) -> None:
        """End the work of all requests, if the server ends; from any thread.

        Raises:
            ShutdownError: it does.
        """
        if self.shutting_down:
            raise ShutdownError("the server is shutting down")

    def check(self) -> None:
        """End the work of a request, if nobody wants it.

        Raises:
            ShutdownError: the server is to end.
            BaseException: what anyio raises when the client has left.
        """
        self.check_open()
        from_thread.check_cancelled()

    def busy(self) -> RefusedError:
        """What a request is told that has waited for too long."""
        return RefusedError(
            503,
            f"the model was busy for {self.limits.wait_seconds:g} seconds: try again later, "
            "or start the server with a higher --max-wait",
        )

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text, without one that begins it."""
        return list(self._llama.tokenize(text.encode(), special=True))

    def detokenize(self, tokens: list[int]) -> str:
        """The text of tokens.

        Raises:
            RefusedError: one is not in the vocabulary.
        """
        self.check_tokens(tokens, "tokens")
        return self._llama.detokenize(tokens).decode(errors="replace")

    def check_tokens(self, tokens: list[int], param: str) -> None:
        """Refuse numbers that are no tokens: llama.cpp ends the program.

        Raises:
            RefusedError: one is not in the vocabulary.
        """
        n_vocab = self._llama.n_vocab()
        wrong = [token for token in tokens if not 0 <= token < n_vocab]
        if wrong:
            raise RefusedError(
                400,
                f"{param}: the model has tokens 0 to {n_vocab - 1}, and none is {wrong[0]}: take "
                "the numbers from /extras/tokenize",
                param=param,
            )
