"""A chat in numbers: the line under each answer, and what `/stats` shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyh2o.cache.statistics import KVStatistics, mib_text
from pyh2o.text.cache_copies import WORTH

from ..terminal.wording import count, per_second
from .answers import Answer

if TYPE_CHECKING:
    from pyh2o.sessions.conversation import Conversation


LINE = 80
"""Most characters of the line under an answer."""


@dataclass
class Tally:
    """What all answers since the chat was opened took."""

    read: int = 0
    read_seconds: float = 0.0
    written: int = 0
    write_seconds: float = 0.0
    answers: int = 0

    def add(self, answer: Answer) -> None:
        """Count an answer in."""
        self.read += answer.read
        self.read_seconds += answer.read_seconds
        self.written += answer.written
        self.write_seconds += answer.write_seconds
        self.answers += 1

    @property
    def seconds_per_token_read(self) -> float | None:
        """How long the reading of a token took; None if too few were read to tell."""
        return self.read_seconds / self.read if self.read >= WORTH else None

    @property
    def steps(self) -> int:
        """Tokens written after the first of each answer, which belongs to the reading."""
        return self.written - self.answers


def footer(answer: Answer, kv: KVStatistics) -> str:
    """What an answer took and what is left of the text, as one line.

    It has at most 80 characters: what matters least is left out.
    """
    written = count(answer.written, "token")
    speed = per_second(answer.written - 1, answer.write_seconds)
    first = f"first after {answer.read_seconds:.1f} s" if answer.written else ""
    remembered = _remembered(kv)
    for parts in ((written, speed, first), (written, speed), (written,)):
        line = " · ".join(part for part in (*parts, *remembered) if part)
        if len(line) <= LINE:
            break
    return line


def _remembered(kv: KVStatistics) -> list[str]:
    """How much of the text the cache holds, and how much was looked at of the rest."""
    text = count(kv.position, "token")
    held = f"{min(kv.used, kv.position):,} of" if kv.used < kv.position else "all"
    found = [f"{kv.found_share:.1%} looked up"] if kv.found_share else []
    return [f"remembers {held} {text}", *found]


def statistics(
    conversation: Conversation, last: Answer | None, tally: Tally, saved: str
) -> Iterator[tuple[str, str]]:
    """Labels and lines for `/stats`.

    Args:
        conversation: what has been said.
        last: the last answer, if there was one since the chat was opened.
        tally: of all answers since then.
        saved: where the conversation is saved.
    """
    kv = conversation.llm.kv
    turns = conversation.turns
    # behind what was taken back the cache may be empty, and the text is read again
    tokens = max(kv.position, turns[-1].end if turns else 0)
    yield "conversation", f"{count(len(turns), 'turn')} · {count(tokens, 'token')} of text"
    if last is not None:
        yield "last answer", _took(last, last.written - 1)
        yield "all answers", _took(tally, tally.steps)
    yield from _cache(kv).items()
    copies = conversation.copies
    if copies.mib:
        kept = f"{len(copies):,} of the cache"
        yield "copies", f"{kept} · {mib_text(copies.n_bytes)} of {copies.mib:,} MiB"
    sampling = dataclasses.asdict(conversation.sampling)
    yield "sampling", " · ".join(f"{name} {value}" for name, value in sampling.items())
    yield "saved", saved


def _cache(kv: KVStatistics) -> dict[str, str]:
    cells = f"{kv.used:,} of {kv.capacity:,} cells"
    if not kv.evicting:
        return {
            "cache": f"{cells} · full cache, nothing is evicted",
            "memory": f"{mib_text(kv.bytes_total)} MiB: {kv.memory_parts()}",
        }
    budget = f"budget {kv.budget:,} ({kv.parts()})"
    compactions = f"{kv.compactions:,} in {kv.compaction_seconds:.3f} s"
    return {
        "cache": f"{cells} · {budget} · slack {kv.slack:,} · window {kv.window:,}",
        "policy": kv.policy,
        "evicted": f"{count(kv.tokens_evicted, 'token')} · {count(kv.rows_evicted, 'row')}",
        "compactions": f"{compactions} · {count(kv.rows_moved, 'row')} moved",
        "re-bases": f"{kv.rebases:,} in {kv.rebase_seconds:.3f} s · {kv.positions} positions",
        "memory": f"{_memory(kv)} of a full cache: {kv.memory_parts()}",
        **_recall(kv),
    }


def _recall(kv: KVStatistics) -> dict[str, str]:
    """The archive, and what was looked at in it."""
    if not kv.limits.recall:
        return {}
    left = f" · {count(kv.unarchived, 'token')} had to leave" if kv.unarchived else ""
    return {
        "archive": f"{count(kv.archived, 'token')} · {mib_text(kv.bytes_archive)} MiB · "
        f"written in {kv.archive_seconds:.3f} s{left}",
        "recalled": f"{kv.limits.recall:,} rows for each token · {kv.found_share:.1%} of the "
        f"attention of the last {count(kv.n_looked, 'token')}",
    }


def _took(answers: Answer | Tally, steps: int) -> str:
    parts = [
        f"{count(answers.read, 'token')} read",
        per_second(answers.read, answers.read_seconds),
        f"{count(answers.written, 'token')} written",
        per_second(steps, answers.write_seconds),
    ]
    return " · ".join(part for part in parts if part)


def _memory(kv: KVStatistics) -> str:
    return f"{mib_text(kv.bytes_total)} of {mib_text(kv.bytes_full)} MiB"
