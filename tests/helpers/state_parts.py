"""Parse a saved state, and assemble it again with a valid checksum."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from checksums import checksum
from pyh2o.core.states import HEADER_BYTES

N_LAYER, N_HEAD, N_HEAD_KV, HEAD_SIZE = 2, 4, 2, 32
# Sizes of the tiny model whose states these are.
SIZES = {"n_layer": N_LAYER, "n_head": N_HEAD, "n_head_kv": N_HEAD_KV, "head_size": HEAD_SIZE}


class RecallPart:
    """A state's record of a stream's archive, and of the tokens that are not archived yet."""

    # before the pages, which have the same numbers
    ARCHIVE = np.dtype(
        [("magic", "<u8"), ("layout", "<u8")]
        + [(name, "<i4") for name in ("begin", "first", "next", "page")]
        + [("text", "<u8")]
    )
    N_PAGE = 128  # tokens
    PAGE = np.dtype(
        [
            *(("magic", "<u8"), ("page", "<u4"), ("begin", "<i4"), ("first", "<i4")),
            *(("count", "<u4"), ("token", "<i4", N_PAGE), ("text_before", "<u8")),
        ]
    )
    MAGIC = struct.pack("<Q", 0x68326F6172636801)

    def __init__(self, data: bytes, bytes_archive: int) -> None:
        self.at = at = data.index(self.MAGIC)
        self.archive = np.frombuffer(data, self.ARCHIVE, 1, at).copy()
        at += self.ARCHIVE.itemsize
        self.pages = data[at : at + bytes_archive]
        at += bytes_archive
        n_tokens = int(np.frombuffer(data, "<u4", 1, at)[0])
        self.tokens: npt.NDArray[Any] = np.frombuffer(data, "<i4", n_tokens, at + 4).copy()
        at += 4 + self.tokens.nbytes
        self.n_measured = np.frombuffer(data, "<u8", 1, at).copy()
        self.gains = np.frombuffer(data, "<f8", N_LAYER * N_HEAD_KV, at + 8).copy()
        at += 8 + self.gains.nbytes
        self.page, n_passages = struct.unpack_from("<II", data, at)
        at += 8
        self.interest = np.frombuffer(data, "<f8", n_passages, at).copy()
        self.size = at + self.interest.nbytes - self.at

    @property
    def page_size(self) -> int:
        """Return the bytes of a page, of a text that is archived from its start."""
        return len(self.pages) // ((int(self.archive["next"][0]) - 1) // self.N_PAGE + 1)

    def bytes(self) -> bytes:
        n_tokens = struct.pack("<I", len(self.tokens))
        looks = self.n_measured.tobytes() + self.gains.tobytes()
        looks += struct.pack("<II", self.page, len(self.interest)) + self.interest.tobytes()
        return self.archive.tobytes() + self.pages + n_tokens + self.tokens.tobytes() + looks


class State:
    """A state of one stream, or of its text, as separate arrays; without recall no pages."""

    HEAD = np.dtype(
        [(name, "<u4") for name in ("n_used", "n_span", "v_head", "n_pinned", "n_spans")]
        + [(name, "<u4") for name in ("n_starts", "n_queries")]
        + [(name, "<i4") for name in ("shift", "pos_removable", "pos_forgotten")]
        + [("n_forgotten", "<u8"), ("n_pictures", "<u8")]
        + [(name, "<u8") for name in ("n_compactions", "n_cells_freed", "n_rows_evicted")]
        + [(name, "<u8") for name in ("n_rows_moved", "n_rebases", "t_compactions", "t_rebases")]
    )
    N_CELLS, ROW, RING = 256, HEAD_SIZE * 2, HEAD_SIZE * N_HEAD * 4  # size of f16 rows; of a query

    def __init__(self, data: bytes, n_used: int, bytes_archive: int | None = None) -> None:
        self._data = data
        self._native = HEADER_BYTES if data.startswith(b"h2otext") else 0
        self.recall: Any = None if bytes_archive is None else RecallPart(data, bytes_archive)
        self._at = next(at for at in range(8, 1000) if self._fits(at, n_used))
        self.front = data[: self._at]
        self.head = self._take(self.HEAD, 1)
        self.spans = self._take("<i4", 2 * int(self.head["n_spans"][0]))
        self.starts = self._take("<i4", int(self.head["n_starts"][0]))
        self.dropped = self._take("<i4", 2 * int(self.head["n_forgotten"][0]))
        self.pictures = self._take("<i4", 5 * int(self.head["n_pictures"][0]))
        n_queries, n_span = int(self.head["n_queries"][0]), int(self.head["n_span"][0])
        self.queries = self._take("<i4", 2 * n_queries)
        if self.recall:
            assert self._at == self.recall.at
            self._at += self.recall.size
        self.used, self.cell_positions = self._take("<u4", n_used), self._take("<i4", n_used)
        self.listed = self._take("<u1", n_used)
        self.positions, self.rotary, self.scores, self.rows = [], [], [], []
        for _ in range(N_LAYER):
            self.positions.append(self._take("<i4", N_HEAD_KV * self.N_CELLS))
            self.rotary.append(self._take("<i4", N_HEAD_KV * self.N_CELLS))
            self.scores.append([self._take("<f4", n_span) for _ in range(N_HEAD_KV)])
            n_bytes = n_queries * self.RING + 2 * N_HEAD_KV * self.ROW * n_span
            self.rows.append(self._take("<u1", n_bytes))
        assert self._at + 8 == len(data)

    def _fits(self, at: int, n_used: int) -> bool:
        """Return whether the stream's numbers start here: then they imply the remaining length."""
        if at + self.HEAD.itemsize > len(self._data):
            return False
        head = np.frombuffer(self._data, self.HEAD, 1, at)[0]
        n_span, n_queries = int(head["n_span"]), int(head["n_queries"])
        lists = 8 * int(head["n_spans"]) + 4 * int(head["n_starts"]) + 8 * n_queries + 9 * n_used
        lists += 8 * int(head["n_forgotten"]) + 20 * int(head["n_pictures"])
        layer = N_HEAD_KV * (8 * self.N_CELLS + (4 + 2 * self.ROW) * n_span)
        rest = self.HEAD.itemsize + lists + N_LAYER * (layer + n_queries * self.RING) + 8
        rest += self.recall.size if self.recall else 0
        return int(head["n_used"]) == n_used and at + rest == len(self._data)

    def _take(self, dtype: Any, n: int) -> npt.NDArray[Any]:
        array = np.frombuffer(self._data, dtype, n, self._at).copy()
        self._at += array.nbytes
        return array

    def of_row(self, layer: int, head: int, i: int) -> int:
        """Return the index of the row of the i-th used cell in the lists."""
        return head * self.N_CELLS + int(self.used[i])

    def bytes(self) -> bytes:
        self.head["n_spans"], self.head["n_starts"] = len(self.spans) // 2, len(self.starts)
        self.head["n_forgotten"] = len(self.dropped) // 2
        self.head["n_pictures"] = len(self.pictures) // 5
        lists = [self.spans, self.starts, self.dropped, self.pictures, self.queries]
        fronts = [self.head, *lists]
        pieces = [self.used, self.cell_positions, self.listed]
        for layer in range(N_LAYER):
            pieces += [self.positions[layer], self.rotary[layer]]
            pieces += [*self.scores[layer], self.rows[layer]]
        data = self.front + b"".join(piece.tobytes() for piece in fronts)
        data += self.recall.bytes() if self.recall else b""
        data += b"".join(piece.tobytes() for piece in pieces)
        return data + checksum(data[self._native + 8 :])
