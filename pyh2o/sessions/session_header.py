"""What the headers of all session files say, and whether a session goes with a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from ..core.model import Model
from ..writing.sampling import Sampling
from .identity import ModelIdentity, Settings, check_same_header, check_settings, model_identity
from .pins import merged
from .records import Count, record_of
from .session_file import Session, damage_found, read_overview, read_session


@dataclass(frozen=True, kw_only=True)
class SessionHeader:
    """What conversations and stories have in common.

    Attributes:
        model, settings: what the state of the cache depends on.
        sampling: how tokens are drawn.
        cached: tokens that the state of the cache covers.
        pins: spans that are never evicted, beside the first tokens.
        archive: which file beside the session is its archive's; None if it has none.

    Raises:
        ValueError: they make no sense.
    """

    kind: ClassVar[str]

    model: ModelIdentity
    settings: Settings
    sampling: Sampling
    cached: Count
    pins: tuple[tuple[Count, Count], ...]
    archive: str | None = None

    def __post_init__(self) -> None:
        check_settings(self.settings)
        pins = self.pins
        if any(len(pin) != 2 or pin[0] >= pin[1] for pin in pins) or merged(pins) != pins:
            raise ValueError("its pins are no spans")

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Compare the header with the tokens of the text.

        Raises:
            ValueError: they do not belong together.
        """
        if self.pins and self.pins[-1][1] > len(tokens):
            raise ValueError("its pins are not in its text")
        if self.cached > len(tokens):
            raise ValueError(f"it has {len(tokens)} tokens, of which {self.cached} are cached")


Header = TypeVar("Header", bound=SessionHeader)


def read_header(path: str | Path, kind: type[Header]) -> Header:
    """Read the header of a session file, which is quick.

    Raises:
        SessionError: there is no such file, it is damaged, or of another kind.
    """
    header = read_overview(path, kind.kind).header
    with damage_found(path):
        return record_of(kind, header)


def open_session(
    path: str | Path, kind: type[Header], model: Model, *, reread: bool
) -> tuple[Session, Header, bool]:
    """Read a session file to go on with it in a model.

    Args:
        path: the file.
        kind: of session.
        model: it.
        reread: whether model and settings may be others than those of the file.

    Returns:
        The session, what its header says, and whether it was made with this model.

    Raises:
        SessionError: no such file, or it is damaged, of another model, other settings or another
            format.
    """
    session = read_session(path, kind.kind)
    with damage_found(path):
        header = record_of(kind, session.header)
    if not reread:
        check_same_header(session.header, model)
    is_same = header.model.is_same(model_identity(model))
    with damage_found(path):
        header.check_tokens(session.tokens)
        if is_same:
            check_vocabulary(model, session.tokens)
    return session, header, is_same


def check_vocabulary(model: Model, tokens: Sequence[int]) -> None:
    """Refuse tokens that a model does not have.

    Raises:
        ValueError: there are some.
    """
    if any(not 0 <= token < model.n_vocab for token in tokens):
        raise ValueError("it has tokens the model does not know")
