"""One model, many texts: each has a slot, and all are decoded together."""

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
from ..core.snapshots import SnapshotStore, StoreCounts
from ..core.text import Text
from ..errors import BusyError, ClosedError, SettingsError
from ..limits import DEFAULT_STORE_MIB, LOOK_SECONDS
from ..writing.answer import Answer
from ..writing.chat_prompt import Prompt, prepare
from ..writing.events import Event, Usage
from ..writing.request import Request
from ..writing.sampling import LARGEST_SEED, RANDOM_SEEDS
from .slots import Slot, SlotReport, Slots

Self = TypeVar("Self", bound="Engine")


@dataclass(frozen=True)
class Terms:
    """How a request waits for a slot, and who is told of its progress.

    Attributes:
        priority: requests of a higher one come first.
        wait_seconds: longest wait for a slot; None for no limit.
        check: called while the request waits, after each chunk of the prompt and after each token;
            what it raises ends the answer.
        on_read: called after each chunk of the prompt with (tokens read, tokens in all).
        keep_dropped: whether a text continues where its client has dropped messages between the
            start and the latest ones, if that needs no more reading than the prompt itself. It
            applies to texts that were started so.
    """

    priority: int = 0
    wait_seconds: float | None = None
    check: Callable[[], None] = lambda: None
    on_read: Callable[[int, int], None] = lambda _done, _all: None
    keep_dropped: bool = False


ANY_TERMS = Terms()


class Engine:
    """Many texts at once with one model.

        with Engine("model.gguf", texts=8, n_ctx=8192) as engine:
            for event in engine.answer(Request(prompt="Once upon a time")):  # from any thread
                ...

    What the texts evaluate goes into one batch, so eight texts take little longer than one. A text
    gets the tokens that it would get alone: bit for bit with weights that ggml multiplies token by
    token (Q4_0, Q4_1 and Q8_0 on x86) unless it continues another text, and otherwise except for
    the rounding of batches of other sizes.

    A text that has ended stays in its slot until another text needs the slot, then as a snapshot in
    memory. A prompt that starts with it continues there, and only the rest is read. A prefix that
    several texts share, such as a system prompt, is kept for later ones.

    Args:
        model_path: a GGUF file.
        texts: number of slots; more texts have to wait.
        reading: most tokens that are read at once while another text is written; they are so few
            that its next token comes within three times of what it takes otherwise.
        store_mib: most MiB that texts without a slot may take; 0 for none.
        **settings: as for `Llama`; the budget is that of each text.

    Raises:
        PyH2OError: as for `Llama`; SettingsError also for an argument that only one text can have.

    Attributes:
        model: for what needs no text: tokens, templates, what it is.
    """

    def __init__(
        self,
        model_path: str,
        *,
        texts: int = 8,
        reading: int = READING,
        store_mib: int = DEFAULT_STORE_MIB,
        **settings: Any,
    ) -> None:
        _check(settings)
        self.model = load_model(model_path, n_texts=texts, shared=True, reading=reading, **settings)
        logits = bool(settings.get("logits_all"))
        try:
            self._slots = Slots(
                [Slot(Text(self.model, seq_id, keeps_logits=logits)) for seq_id in range(texts)],
                SnapshotStore(store_mib * 2**20),
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
        """Free the model. Texts that are being read or written end with a `ClosedError`."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        self.model.close()
        self._slots.store.close()

    @property
    def n_slots(self) -> int:
        """Texts that can be read and written at the same time."""
        return len(self._slots.all)

    @property
    def n_waiting(self) -> int:
        """Texts that wait for a slot."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Texts that have one."""
        return self._slots.n_taken

    @property
    def batches(self) -> BatchCounts:
        """What the batches so far have held."""
        return self.model.batcher.counts

    @property
    def stored(self) -> StoreCounts:
        """What became of texts that had ended."""
        return self._slots.store.counts

    @property
    def usage(self) -> Usage:
        """Tokens of all texts so far."""
        return sum((slot.usage for slot in self._slots.all), Usage())

    def report(self) -> list[SlotReport]:
        """What each slot holds, but no text. It waits for the batch that is in the making.

        Raises:
            ClosedError: the engine was closed.
        """
        with self._turn:
            if self._closed:
                raise ClosedError("the engine is closed: open it again")
            return [slot.report(running=self._slots.is_taken(slot)) for slot in self._slots.all]

    def new_seed(self) -> int:
        """Return a seed for a request that gives none; they follow from the engine's."""
        with self._turn:
            return self._seeds.randrange(LARGEST_SEED)

    def answer(
        self, request: Request, terms: Terms = ANY_TERMS, *, prompt: Prompt | None = None
    ) -> Iterator[Event]:
        """Answer a request; it has a slot until the iterator ends or is closed.

        Args:
            request: what to write.
            terms: how it waits for a slot.
            prompt: of the request, if it is prepared already.

        Raises:
            BusyError: no slot was free in time.
            ClosedError: the engine was closed.
            PyH2OError, ValueError: as `prepare` and `Answer` say.
            BaseException: what `check` of the terms raises.
        """
        prepared = [(request, prompt or prepare(self.model, request))]
        return (event for events in self.answers(prepared, terms) for event in events)

    def answers(
        self, prepared: Sequence[tuple[Request, Prompt]], terms: Terms = ANY_TERMS
    ) -> Iterator[Iterable[Event]]:
        """Yield several answers to one prompt, in one slot; exhaust each before the next one.

        Args:
            prepared: requests with the same tokens, each with a prompt that `prepare` returned.
            terms: how they wait for a slot; otherwise as `answer`.
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
        """A slot for a text, while it is read and written; for one thread.

        The cache may hold the beginning of another text then: `generate` and all that is made of it
        go on from what is of use, and whoever evaluates by himself calls `reset` first.

        Args:
            tokens: that the text begins with, to find the slot that has read most of them.
            n_new: most tokens that are drawn behind them, None for no limit; where they evict what
                the same tokens need when they come again, its cache before them is stored.
            priority: texts of a higher one get slots first, and are read first.
            wait_seconds: longest wait for a slot; None for any.
            check: called now and then during the wait, and once before the text has its slot; what
                it raises ends the wait.
            owner: whose text this is, if nobody else may go on with it: it gets the slot that it
                left, as long as no other text needed that, or an empty one (`Slot.keeps_text`).
            longer: a text to begin with instead, if no more of that has to be read than `tokens`
                has in all (`Slot.prompt` says which one it is); none for `tokens` in any case.

        Raises:
            BusyError: there was no slot in time.
            ClosedError: the engine was closed.
            BaseException: what `check` raises.
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
        """Free the slot of an owner's text, unless that is read or written now.

        It waits for the batch that is in the making.
        """
        with self._turn:
            if not self._closed:
                self._slots.move_out(owner)

    @contextmanager
    def _turn_for(
        self, ticket: tuple[int, int], wait_seconds: float | None, check: Callable[[], None]
    ) -> Iterator[None]:
        """The moment in which whoever came as `ticket` can take a slot."""
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
        """Wait until whoever came as `ticket` is the next, and a slot is free."""

        def is_my_turn() -> bool:
            return self._closed or (self._waiting[0] == ticket and self.n_running < self.n_slots)

        # Looks are counted: a clock would count the hours that the machine slept, too.
        left = math.inf if wait_seconds is None else wait_seconds
        is_mine = False
        while not is_mine:
            is_mine = self._turn.wait_for(is_my_turn, min(LOOK_SECONDS, left))
            left -= min(LOOK_SECONDS, left)
            if self._closed:
                raise ClosedError("the engine is closed: open it again")
            check()
            if not is_mine and left == 0.0:
                raise BusyError(
                    f"no slot for a text in {wait_seconds:g} seconds: try again later, or "
                    "let the engine have more texts at once"
                )


def _check(settings: dict[str, Any]) -> None:
    """Refuse arguments of `Llama` that only one text can have."""
    refused = {
        "recall_archive": "the archive of each text is in memory",
        "draft_model": "a draft model knows one text",
        "embedding": "embeddings come from a `Llama` of their own",
        "vocab_only": "there are no weights to decode with",
    }
    for name, reason in refused.items():
        if settings.get(name):
            raise SettingsError(f"{name} goes with one text only ({reason}): use Llama for it")
    if settings.get("prefill") == "exact":
        raise SettingsError(
            "prefill='exact' takes a larger cache for all texts at once: use Llama for it, or "
            "prefill='stream' (--prefill stream)"
        )


def _nothing() -> None:
    pass
