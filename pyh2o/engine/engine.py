"""One model, many texts: each is a `Llama` of its own, and all are decoded together."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from ..compat.arguments import load_model
from ..core.batcher import BatchCounts
from ..core.model import READING
from ..core.store import StoreCounts, TextStore
from ..core.text import Text
from ..errors import BusyError, ClosedError, SettingsError
from ..limits import DEFAULT_STORE_MIB, LOOK_SECONDS
from ..writing.sampling import RANDOM_SEEDS
from .places import Place, PlaceReport, Places, TextCounts

Self = TypeVar("Self", bound="Engine")


class Engine:
    """Many texts at once with one model.

        with Engine("model.gguf", texts=8, n_ctx=8192) as engine:
            with engine.text() as llm:  # in as many threads as there are texts
                llm.create_completion("Once upon a time")

    Each text is a `Llama` with a cache of its own, for a thread of its own. What they evaluate goes
    into one batch, so eight texts take little longer than one. A text gets the tokens that it would
    get alone: bit for bit with weights that ggml multiplies token by token (Q4_0, Q4_1 and Q8_0 on
    x86) unless it goes on from another text, else but for the rounding of batches of other sizes.

    Texts that have ended stay in the cache for as long as nobody needs their place, and then in
    memory: a text that begins as one of them goes on there, and only the rest of it is read. What
    several texts begin with, such as a system prompt, is kept for all that come.

    Args:
        model_path: a GGUF file.
        texts: places for texts; more have to wait.
        reading: most tokens that are read at once while another text is written; they are so few
            that its next token comes within three times of what it takes otherwise.
        store_mib: most MiB that texts without a place may take; 0 for none.
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
            self._places = Places(
                [
                    Place.of(Text(self.model, seq_id, keeps_logits=logits), settings)
                    for seq_id in range(texts)
                ],
                TextStore(store_mib * 2**20),
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
        self._places.store.close()

    @property
    def n_places(self) -> int:
        """Texts that can be read and written at the same time."""
        return len(self._places.all)

    @property
    def n_waiting(self) -> int:
        """Texts that wait for a place."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Texts that have one."""
        return self._places.n_taken

    @property
    def batches(self) -> BatchCounts:
        """What the batches so far have held."""
        return self.model.batcher.counts

    @property
    def stored(self) -> StoreCounts:
        """What became of texts that had ended."""
        return self._places.store.counts

    @property
    def texts(self) -> TextCounts:
        """What the texts so far have taken."""
        return sum((place.counts for place in self._places.all), TextCounts())

    def report(self) -> list[PlaceReport]:
        """What each place holds, but no text. It waits for the batch that is in the making.

        Raises:
            ClosedError: the engine was closed.
        """
        with self._turn:
            if self._closed:
                raise ClosedError("the engine is closed: open it again")
            return [
                place.report(running=self._places.is_taken(place)) for place in self._places.all
            ]

    @contextmanager
    def text(
        self,
        tokens: Sequence[int] = (),
        *,
        n_new: int | None = 0,
        priority: int = 0,
        wait_seconds: float | None = None,
        check: Callable[[], None] | None = None,
        owner: object | None = None,
        longer: Sequence[int] = (),
    ) -> Iterator[Place]:
        """A place for a text, while it is read and written; for one thread.

        The cache may hold the beginning of another text then: `generate` and all that is made of it
        go on from what is of use, and whoever evaluates by himself calls `reset` first.

        Args:
            tokens: that the text begins with, to find the place that has read most of them.
            n_new: most tokens that are drawn behind them, None for no limit; where they evict what
                the same tokens need when they come again, its cache before them is stored.
            priority: texts of a higher one get places first, and are read first.
            wait_seconds: longest wait for a place; None for any.
            check: called now and then during the wait, and once before the text has its place; what
                it raises ends the wait.
            owner: whose text this is, if nobody else may go on with it: it gets the place that it
                left, as long as no other text needed that, or an empty one (`Place.keeps_text`).
            longer: a text to begin with instead, if no more of that has to be read than `tokens`
                has in all (`Place.prompt` says which one it is); none for `tokens` in any case.

        Raises:
            BusyError: there was no place in time.
            ClosedError: the engine was closed.
            BaseException: what `check` raises.
        """
        me = (-priority, next(self._arrivals))
        with self._turn_of(me, wait_seconds, check or _nothing):
            places = self._places
            prompt = longer if longer and places.is_there(longer, len(tokens)) else tokens
            place = places.take(prompt, n_new) if owner is None else places.take_for(owner)
            place.set_seed(self._seeds.randrange(2**32 - 1))
        place.text.priority = priority
        place.prompt, place.n_dropped = prompt, len(prompt) - len(tokens)
        try:
            yield place
        finally:
            try:
                place.end()
            finally:
                with self._turn:
                    self._places.give_back(place)
                    self._turn.notify_all()

    def move_out(self, owner: object) -> None:
        """Free the place of an owner's text, unless that is read or written now.

        It waits for the batch that is in the making.
        """
        with self._turn:
            if not self._closed:
                self._places.move_out(owner)

    @contextmanager
    def _turn_of(
        self, me: tuple[int, int], wait_seconds: float | None, check: Callable[[], None]
    ) -> Iterator[None]:
        """The moment in which whoever came as `me` can take a place."""
        with self._turn:
            heapq.heappush(self._waiting, me)
            try:
                self._await_turn(me, wait_seconds, check)
                yield
            finally:
                self._waiting.remove(me)
                heapq.heapify(self._waiting)
                self._turn.notify_all()

    def _await_turn(
        self, me: tuple[int, int], wait_seconds: float | None, check: Callable[[], None]
    ) -> None:
        """Wait until whoever came as `me` is the next, and a place is free."""

        def is_my_turn() -> bool:
            return self._closed or (self._waiting[0] == me and self.n_running < self.n_places)

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
                    f"no place for a text in {wait_seconds:g} seconds: try again later, or "
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
