"""What `Llama` has beyond llama_cpp's class: what the cache of its text holds, and what stays."""

from __future__ import annotations

from collections.abc import Sequence

from ..cache.kv_cache import FloatArray, IntArray
from ..cache.recalled import RecalledSpan
from ..cache.statistics import KVStatistics
from ..core.rows import HeavyHitter, heavy_hitters
from ..core.text import Text


class TextMemory:
    """The memory of a text."""

    text: Text

    @property
    def evicting(self) -> bool:
        """Whether rows are evicted."""
        return self.text.model.evicting

    @property
    def kv(self) -> KVStatistics:
        """What the KV cache holds now and what it costs."""
        return self.text.kv

    def kv_rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        """Token positions and scores of the rows that one layer holds, in the order of the text.

        Args:
            layer: from 0.

        Returns:
            positions [n_head_kv, kv.used], ascending for each KV head, and scores, same shape. A
            score is the attention collected so far (sum over queries, mean over the query heads of
            the KV group), less what the policy has forgotten of it. For a policy that does not look
            at that it is what the policy gave the row at the last compaction, and 0 for a row that
            is newer or did not compete.

        Raises:
            NativeError: no such layer, or the cache does not evict and so keeps no scores.
        """
        return self.text.kv_rows(layer)

    def heavy_hitters(
        self, n: int = 20, *, layer: int | None = None, head: int | None = None
    ) -> list[HeavyHitter]:
        """The tokens in the cache with the highest scores (see `kv_rows`), highest first.

        Args:
            n: how many.
            layer: only this layer; None for all.
            head: only this KV head; None for all.

        Raises:
            NativeError: no such layer, or the cache does not evict and so keeps no scores.
            IndexError: no such KV head.
        """
        return heavy_hitters(self.text, n, layer=layer, head=head)

    def recalled(self) -> list[RecalledSpan]:
        """The passages among what was evicted that the last prompt, and what came of it, looked at.

        In the order of the text; the strongest, if there are many.
        """
        return self.text.recalled()

    def pin_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """Never evict these tokens either, from now on until the text is cleared.

        They take the places of heavy rows. They may be tokens to come; rows that were evicted come
        back at once, from the archive if it has them. Without eviction this does nothing.

        Args:
            spans: (start, end) positions, end not included; ascending and apart. They take the
                place of spans given before.

        Raises:
            SettingsError: they are out of order, or more than the pinned and heavy rows.
        """
        with self.text.lock:
            self.text.cache.pin_spans(spans)

    def share_fairly(self, starts: Sequence[int]) -> None:
        """Give each part of the text its share of the heavy rows, until the text is cleared.

        The share is that of the part's tokens; within a part the best scores stay. A part that has
        fewer rows than its share leaves the rest to the others. That is the fair eviction of "The
        Pitfalls of KV Cache Compression" (arXiv 2510.00231) for any number of parts, and it goes
        together with pinned tokens, which the authors' code does not. The scores themselves stay
        what they are: attention across the parts counts. Without eviction this does nothing.

        Args:
            starts: positions above 0 where the text is cut, ascending; none for one part.

        Raises:
            SettingsError: they are out of order.
        """
        with self.text.lock:
            self.text.cache.share_fairly(starts)
