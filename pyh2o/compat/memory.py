"""Methods that `Llama` adds to llama_cpp's class: what the cache holds, and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence

from ..cache.kv_cache import FloatArray, IntArray
from ..cache.recalled import RecalledSpan
from ..cache.rows import HeavyHitter, heavy_hitters
from ..cache.statistics import KVStatistics
from ..core.text import Text


class TextMemory:
    """Inspection and control of the cache of a text."""

    text: Text

    @property
    def evicting(self) -> bool:
        """Whether rows are evicted."""
        return self.text.model.evicting

    @property
    def kv(self) -> KVStatistics:
        """Current contents and costs of the KV cache."""
        return self.text.kv

    def kv_rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        """Return the positions and scores of the rows in a layer.

        Args:
            layer: from 0.

        Returns:
            positions [n_head_kv, kv.used], ascending for each KV head, and scores of the same
            shape. A score is the accumulated attention (sum over queries, mean over the query
            heads of the KV group), after the policy's decay. For a policy that does not use
            attention it is the policy's score at the last compaction, and 0 for rows that are
            newer or were not scored.

        Raises:
            NativeError: the layer does not exist, or the cache does not evict.
        """
        return self.text.kv_rows(layer)

    def heavy_hitters(
        self, n: int = 20, *, layer: int | None = None, head: int | None = None
    ) -> list[HeavyHitter]:
        """Return the `n` tokens with the highest scores (see `kv_rows`), highest first.

        Args:
            n: number of tokens.
            layer: only this layer; None for all.
            head: only this KV head; None for all.

        Raises:
            NativeError: the layer does not exist, or the cache does not evict.
            IndexError: the KV head does not exist.
        """
        return heavy_hitters(self.text, n, layer=layer, head=head)

    def recalled(self) -> list[RecalledSpan]:
        """Return the evicted passages that the last prompt and its answer attended to.

        They are in the order of the text; if there are many, only the strongest.
        """
        return self.text.recalled()

    def pin_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """Never evict these tokens until the text is cleared.

        Pinned tokens take up heavy rows. Spans may include future tokens. Rows that were already
        evicted are restored from the archive if it has them. Without eviction this does nothing.

        Args:
            spans: (start, end) positions, end not included; ascending, without overlap. They
                replace earlier spans.

        Raises:
            SettingsError: they are out of order, or exceed the pinned and heavy rows.
        """
        with self.text.lock:
            self.text.cache.pin_spans(spans)

    def share_fairly(self, starts: Sequence[int]) -> None:
        """Give each part of the text its share of the heavy rows, until the text is cleared.

        The share is proportional to the part's tokens; within a part the rows with the best scores
        stay. Rows that a part does not need go to the others. This is the fair eviction of "The
        Pitfalls of KV Cache Compression" (arXiv 2510.00231) for any number of parts, and unlike
        the authors' code it works together with pinned tokens. The scores do not change: attention
        across parts counts. Without eviction this does nothing.

        Args:
            starts: positions above 0 where parts start, ascending; empty for one part.

        Raises:
            SettingsError: they are out of order.
        """
        with self.text.lock:
            self.text.cache.share_fairly(starts)
