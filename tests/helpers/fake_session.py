"""A session without a model, in memory: its text, and a memory map that is made up."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import asdict
from typing import Any

from pyh2o.generation.sampling import Sampling

LAYERS, HEADS = 4, 2
PAIRS = LAYERS * HEADS
PINNED = 4


def pieces_of(text: str) -> list[str]:
    """Words with what is behind them: the tokens of the fake."""
    return re.findall(r"\s*\S+|\s+$", text)


class FakeSession:
    """A conversation or a story in memory."""

    def __init__(self, name: str, body: dict[str, Any]) -> None:
        self.name, self.kind = name, body.get("kind", "conversation")
        self.model = body.get("model", "tiny")
        self.system = body.get("system")
        given = {"seed": secrets.randbelow(1 << 32), **body.get("sampling", {})}
        self.sampling = asdict(Sampling(**given))
        self.turns: list[dict[str, Any]] = []
        self.replaced: dict[int, dict[str, Any]] = {}  # answers to the last message, by attempt
        self.text: str = body.get("text", "")
        self.passages: list[int] = []
        self.pinned = [[0, PINNED]]
        self.recalled: list[list[int]] = []
        self.answering = self.stopping = False
        self.read: int | None = None  # tokens, where not all have been
        self.touch()

    def touch(self) -> None:
        self.changed = time.time()
        self._tokens: list[str] | None = None

    def tokens(self) -> list[str]:
        if self._tokens is None:
            if self.kind == "story":
                self._tokens = pieces_of(self.text)
            else:
                self._tokens = ["<s>"]
                for turn in self.turns:
                    turn["start"] = len(self._tokens)
                    self._tokens += ["<user>", *pieces_of(turn["user"]), "\n<assistant>"]
                    turn["answer_start"] = len(self._tokens)
                    self._tokens += pieces_of(turn["answer"])
                    turn["end"] = len(self._tokens)
        return self._tokens

    def ends(self) -> list[int]:
        at, ends = 0, []
        for token in self.tokens():
            at += len(token)
            ends.append(at)
        return ends

    def summary(self) -> dict[str, Any]:
        words = self.turns[0]["user"] if self.turns else self.text
        return {
            "name": self.name,
            "kind": self.kind,
            "model": self.model,
            "changed": self.changed,
            "bytes": 1000,
            "turns": len(self.turns),
            "tokens": len(self.tokens()),
            "first": " ".join(words[:320].split())[:80],
            "usable": True,
            "why": None,
        }

    def whole(self) -> dict[str, Any]:
        body = {
            **self.summary(),
            "system": self.system,
            "sampling": self.sampling,
            "max_tokens": None,
        }
        if self.kind == "story":
            return {**body, "text": self.text, "passages": self.passages}
        return {**body, "turns_list": [self.told(turn) for turn in self.turns]}

    def told(self, turn: dict[str, Any]) -> dict[str, Any]:
        others = self.replaced if turn is self.turns[-1] else {}
        return {**turn, "attempts": sorted([turn["attempt"], *others])}

    def choose(self, attempt: int) -> None:
        turn = self.turns[-1]
        if attempt != turn["attempt"]:
            self.replaced[turn["attempt"]] = turn
            self.turns[-1] = self.replaced.pop(attempt)
            self.touch()

    def exported(self) -> dict[str, Any]:
        body = {"format": "pyh2o export", "version": 1, "name": self.name, "kind": self.kind}
        body["sampling"] = self.sampling
        if self.kind == "story":
            return {**body, "text": self.text}
        said = [{name: turn[name] for name in ("user", "answer", "finish")} for turn in self.turns]
        return {**body, "system": self.system, "turns": said}

    def n_read(self) -> int:
        n = len(self.tokens())
        return n if self.read is None else min(n, self.read)

    def kv(self) -> dict[str, Any]:
        n = self.n_read()
        return {
            "position": n,
            "used": min(n, 640),
            "budget": 512,
            "capacity": 640,
            "compactions": max(0, (n - 512) // 128),
            "bytes": 640 * 1024,
            "bytes_full": max(n, 640) * 1024,
            "bytes_archive": max(0, n - 512) * 512,
            "found_share": 0.034 if n > 640 else None,
        }

    def map(self, layer: int | None, head: int | None) -> dict[str, Any]:
        n = self.n_read()
        recent_from = max(0, n - 256)
        positions, rows, scores = [], [], []
        for position in range(n):
            mixed = position * 2654435761 % 4294967296 / 4294967296
            held = PAIRS if position >= recent_from or self.is_pinned(position) else 0
            if not held and mixed < min(1.0, 256 / n):
                held = 1 + position * 7 % PAIRS
            if layer is not None and head is not None:
                held = int(held > (layer * HEADS + head + position) % PAIRS)
            if held:
                positions.append(position)
                rows.append(held)
                scores.append(round(mixed * 3 + held / PAIRS, 4))
        return {
            "tokens": len(self.tokens()),
            "pairs": PAIRS,
            "layers": LAYERS,
            "heads": HEADS,
            "recent_from": recent_from,
            "pinned": self.pinned,
            "archived": [[0, recent_from]] if recent_from else [],
            "recalled": self.recalled,
            "kept": {"positions": positions, "rows": rows, "scores": scores},
            "evicted": [[PINNED, recent_from, n]] if recent_from > PINNED else [],
            "kv": self.kv(),
        }

    def is_pinned(self, position: int) -> bool:
        return any(start <= position < end for start, end in self.pinned)
