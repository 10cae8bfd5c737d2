"""The engine: a model whose slots are decoded in one batch."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..core.arguments import load_model
from ..core.batcher import BatchCounts
from ..core.model import READING
from ..core.prefix_cache import StoreCounts
from ..core.text import Text
from ..errors import BusyError, ClosedError, SettingsError
from ..limits import LOOK_SECONDS
from ..writing.answer import Answer
from ..writing.chat_prompt import Prompt, prepare
from ..writing.events import Event, Usage
from ..writing.request import Request
from ..writing.sampling import LARGEST_SEED, RANDOM_SEEDS
from .slots import Slot, SlotReport, Slots

Self = TypeVar("Self", bound="Engine")


@dataclass(frozen=True)
class Terms:
    """How a request waits for a slot and reports progress.

    Attributes:
        priority: requests with a higher priority come first.
        wait_seconds: maximum wait for a slot; None for no limit.
        check: called during the wait, after each chunk of the prompt and after each token; an
            error from it ends the answer.
        on_read: called after each chunk of the prompt with (tokens read, total tokens).
        keep_dropped: if the client has dropped messages between the start and the latest ones,
            continue the cached text with all messages, if no more tokens have to be read for it
            than the prompt has. The text must have been started with this option too.
    """

    priority: int = 0
    wait_seconds: float | None = None
    check: Callable[[], None] = lambda: None
    on_read: Callable[[int, int], None] = lambda _done, _all: None
    keep_dropped: bool = False


ANY_TERMS = Terms()


class Engine:
    """A model that generates several texts at the same time.

        with Engine("model.gguf", texts=8, n_ctx=8192) as engine:
            for event in engine.answer(Request(prompt="Once upon a time")):  # from any thread
                ...

    All slots share one batch, so eight texts take little longer than one. A text gets the same
    tokens as alone: bit for bit with weights that ggml multiplies token by token (Q4_0, Q4_1 and
    Q8_0 on x86) unless it continues another text, and otherwise except for rounding in batches of
    other sizes.

    A finished text stays in its slot until another text needs the slot, then as a snapshot in
    memory. A prompt that starts with it continues there, and only the rest is read. A prefix that
    several texts share, such as a system prompt, also becomes a snapshot.

    Args:
        texts: number of slots; more requests have to wait.
        reading: maximum prefill chunk while another text is generated. The chunk is small enough
            that a token of that text takes at most three times as long as usual.
        **settings: as for `Llama` (`store_mib` for finished texts too); the budget is per text.

    Raises:
        PyH2OError: as for `Llama`; SettingsError also for arguments that need a single text.
    """

    def __init__(
        self, model_path: str, *, texts: int = 8, reading: int = READING, **settings: Any
    ) -> None:
        _check(settings)
        self.model = load_model(model_path, n_texts=texts, shared=True, reading=reading, **settings)
        logits = bool(settings.get("logits_all"))
        try:
            self._slots = Slots(
                [Slot(Text(self.model, seq_id, keeps_logits=logits)) for seq_id in range(texts)]
            )
        except BaseException:
            self.model.close()
            raise
        self._turn = threading.Condition()
        self._waiting: list[tuple[int, int]] = []  # a heap of (-priority, arrival)
        self._arrivals = itertools.count()
        seed = settings.get("seed")
        self._seeds = random.Random(None if seed in (None, *RANDOM_SEEDS) else int(seed))
        self._closed = False

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model; requests in flight fail with a `ClosedError`."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        self.model.close()

    @property
    def n_slots(self) -> int:
        return len(self._slots.all)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        return self._slots.n_taken

    @property
    def batches(self) -> BatchCounts:
        """Totals of all batches so far."""
        return self.model.batcher.counts

    @property
    def stored(self) -> StoreCounts:
        """Counts of snapshots."""
        return self.model.snapshots.counts

    @property
    def usage(self) -> Usage:
        """Tokens of all requests so far."""
        return sum((slot.usage for slot in self._slots.all), Usage())

    def report(self) -> list[SlotReport]:
        """Return the state of each slot, after the current batch; it contains no text."""
        with self._turn:
            if self._closed:
                raise ClosedError("the engine is closed: create a new one")
            return [slot.report(running=self._slots.is_taken(slot)) for slot in self._slots.all]

    def new_seed(self) -> int:
        """Return a seed for a request without one, from the engine's random numbers."""
        with self._turn:
            return self._seeds.randrange(LARGEST_SEED)

    def answer(
        self, request: Request, terms: Terms = ANY_TERMS, *, prompt: Prompt | None = None
    ) -> Iterator[Event]:
        """Answer a request, in a slot that is free again when the iterator ends or is closed.

        Args:
            prompt: the prepared prompt; None to prepare it.

        Raises:
            BusyError: no slot was free in time.
            BaseException: from `check` of the terms.
        """
        prepared = [(request, prompt or prepare(self.model, request))]
        return (event for events in self.answers(prepared, terms) for event in events)

    def answers(
        self, prepared: Sequence[tuple[Request, Prompt]], terms: Terms = ANY_TERMS
    ) -> Iterator[Iterable[Event]]:
        """Yield several answers to one prompt, in one slot; exhaust each before the next one.

        Args:
            prepared: requests with the same tokens, each with a prompt that `prepare` returned.
            terms: how they wait for a slot; for errors see `answer`.
        """
        request, prompt = prepared[0]

        def on_read(done: int, of_all: int) -> None:
            terms.check()
            terms.on_read(done, of_all)

        longer: list[int] = []
        if terms.keep_dropped and prompt.is_text:
            longer = self.model.sampled_texts.with_dropped_messages(self.model, prompt.tokens)
        with self.slot(
            prompt.tokens,
            longer=longer,
            n_new=request.max_tokens,
            priority=terms.priority,
            wait_seconds=terms.wait_seconds,
            check=terms.check,
        ) as slot:
            slot.text.prompt_progress = on_read
            usage = slot.start()
            for number, (request, prompt) in enumerate(prepared):
                if number > 0:
                    self._slots.restore_prompt(slot)
                    usage = Usage()
                yield Answer(
                    slot.text,
                    request,
                    replace(prompt, tokens=list(slot.prompt)),
                    usage=usage,
                    keep_dropped=terms.keep_dropped,
                    check=terms.check,
                )

    @contextmanager
    def slot(
        self,
        tokens: Sequence[int] = (),
        *,
        n_new: int | None = 0,
        priority: int = 0,
        wait_seconds: float | None = None,
        check: Callable[[], None] | None = None,
        owner: object | None = None,
        longer: Sequence[int] = (),
    ) -> Iterator[Slot]:
        """Take a slot for the duration of the context; for one thread.

        The slot's cache may hold another text with the same prefix. `Answer` continues it; code
        that evaluates tokens directly has to call `reset` first.

        Args:
            tokens: the prompt, to choose the slot with its longest prefix.
            n_new: maximum tokens sampled after the prompt; None for no limit. If they may evict
                rows that the same prompt would need again, a snapshot is taken before them.
            priority: texts with a higher priority get slots first and are read first.
            wait_seconds: maximum wait for a slot; None for no limit.
            check: called repeatedly during the wait, and at least once; its errors end the wait.
            owner: the only object that may continue this text. It gets its last slot if the text
                is still there (`Slot.keeps_text`), otherwise an empty slot.
            longer: alternative prompt, used if no more of it has to be read than `tokens` has;
                empty for none. `Slot.prompt` is the one that was chosen.

        Raises:
            BusyError: no slot was free in time.
            BaseException: from `check`.
        """
        ticket = (-priority, next(self._arrivals))
        with self._turn_for(ticket, wait_seconds, check or _nothing):
            slots = self._slots
            prompt = longer if longer and slots.is_cached(longer, len(tokens)) else tokens
            slot = slots.take(prompt, n_new) if owner is None else slots.take_for(owner)
        slot.text.priority = priority
        slot.prompt, slot.n_dropped = prompt, len(prompt) - len(tokens)
        try:
            yield slot
        finally:
            try:
                slot.end()
            finally:
                with self._turn:
                    self._slots.give_back(slot)
                    self._turn.notify_all()

    def move_out(self, owner: object) -> None:
        """Free the slot of an owner's text unless it is in use, after the current batch."""
        with self._turn:
            if not self._closed:
                self._slots.move_out(owner)

    @contextmanager
    def _turn_for(
        self, ticket: tuple[int, int], wait_seconds: float | None, check: Callable[[], None]
    ) -> Iterator[None]:
        """Wait for the ticket's turn; hold the lock during the context."""
        with self._turn:
            heapq.heappush(self._waiting, ticket)
            try:
                self._await_turn(ticket, wait_seconds, check)
                yield
            finally:
                self._waiting.remove(ticket)
                heapq.heapify(self._waiting)
                self._turn.notify_all()

    def _await_turn(
        self, ticket: tuple[int, int], wait_seconds: float | None, check: Callable[[], None]
    ) -> None:
        """Wait until the ticket is first in the queue and a slot is free."""

        def is_my_turn() -> bool:
            return self._closed or (self._waiting[0] == ticket and self.n_running < self.n_slots)

        # Waits are counted, not timed: a clock would include the time a machine was suspended.
        left = math.inf if wait_seconds is None else wait_seconds
        is_mine = False
        while not is_mine:
            is_mine = self._turn.wait_for(is_my_turn, min(LOOK_SECONDS, left))
            left -= min(LOOK_SECONDS, left)
            if self._closed:
                raise ClosedError("the engine is closed: create a new one")
            check()
            if not is_mine and left == 0.0:
                raise BusyError(
                    f"no slot was free for {wait_seconds:g} seconds: try again later, or create "
                    "the engine with more texts"
                )


def _check(settings: dict[str, Any]) -> None:
    """Raise a SettingsError for arguments of `Llama` that need a single text."""
    refused = {
        "recall_archive": "the archives of an engine are in memory",
        "draft_model": "a draft model serves a single text",
        "embedding": "an engine does not compute embeddings",
        "vocab_only": "decoding needs the weights",
    }
    for name, reason in refused.items():
        if settings.get(name):
            raise SettingsError(f"an engine does not support {name} ({reason}): use Llama")
    if settings.get("prefill") == "exact":
        raise SettingsError(
            "an engine does not support prefill='exact', which needs a larger cache for all texts: "
            "use Llama, or prefill='stream' (--prefill stream)"
        )


def _nothing() -> None:
    pass
