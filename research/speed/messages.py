"""What the measuring process and its workers say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..eval.caches import Compute, MeasuredCache


@dataclass(frozen=True)
class Start:
    """Open the model with this cache, and get ready to read this text."""

    cache: MeasuredCache
    model: Path
    window: int
    compute: Compute
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Read:
    """Evaluate the next tokens of the text as a prompt; `last` ends the stretch."""

    tokens: int
    last: bool = False


@dataclass(frozen=True)
class Generate:
    """Evaluate the next tokens of the text one at a time."""

    tokens: int


@dataclass(frozen=True)
class GoBack:
    """Forget the text after its first `position` tokens, if the cache can."""

    position: int


Command = Read | Generate | GoBack


@dataclass(frozen=True)
class KVUse:
    """What a cache takes at one moment.

    Attributes:
        bytes_rows: allocated for K and V of the layers that see the whole text.
        bytes_scores: allocated for scores.
        cells: cells allocated.
        used: rows that a token attends to: those in cells, and those found in the archive.
        bytes_device: memory of GPUs that weights, caches and work space take.
        compactions: compactions so far.
        compaction_seconds: time they took.
        bytes_archive: memory of the archive that rows are found in.
        found_share: share of attention, over the text so far, that rows got which were found; None
            for a cache without an archive.
        bytes_fixed: allocated for windows and recurrent states.
    """

    bytes_rows: int
    bytes_scores: int
    cells: int
    used: int
    bytes_device: int = 0
    compactions: int = 0
    compaction_seconds: float = 0.0
    bytes_archive: int = 0
    found_share: float | None = None
    bytes_fixed: int = 0

    @property
    def bytes_total(self) -> int:
        """K, V and scores together."""
        return self.bytes_rows + self.bytes_scores

    @property
    def bytes_in_use(self) -> float:
        """What attention to all of these rows reads: themselves and their scores."""
        return self.bytes_total * self.used / self.cells if self.cells else 0.0


@dataclass(frozen=True)
class Ready:
    """The model is open and warm; `own_bytes` of the process cannot be shared with others."""

    use: KVUse
    own_bytes: int


@dataclass(frozen=True)
class Done:
    """A command was carried out.

    Attributes:
        seconds: what the evaluation took.
        position: tokens of text there are now.
        before, after: the cache before and after it.
        peak_bytes: most memory of the process in RAM so far.
    """

    seconds: float
    position: int
    before: KVUse
    after: KVUse
    peak_bytes: int


@dataclass(frozen=True)
class Failed:
    """Why the worker ends, in one line."""

    reason: str
