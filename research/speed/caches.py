"""What is compared: the settings of a comparison, and the caches that they come to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from pyh2o.cache.settings import DEFAULT_POLICY, EvictionSettings, whole_blocks
from pyh2o.errors import SettingsError

from ..eval.caches import (
    FULL_CACHE,
    STREAMING,
    Compute,
    MeasuredCache,
    budget_name,
    parts_of,
    recall_name,
)

# Bytes of an element of the cache by its type; quantised types come in blocks of 32 with a scale.
ELEMENT_BYTES: dict[str, float] = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}

# Attention sinks of StreamingLLM (Xiao et al. 2024, section 3.2): four tokens are enough.
SINKS = 4

# Histories that are measured by default, if the model was trained on so much.
LONGEST_DEFAULT = 8192


@dataclass(frozen=True)
class BenchSettings:
    """What the user asks for.

    Attributes:
        model: a GGUF file.
        window: tokens that every cache is made for; fractions in `budgets` refer to it.
        compute: what computes; of all caches only one does at any time.
        histories: tokens of text before a measurement, ascending.
        budgets: rows to keep: fractions of the window (float) or counts (int).
        kv_types: types of the rows of this runtime's caches.
        rounds: turns that every cache has at each history.
        n: tokens generated in a turn.
        transformers: also Hugging Face transformers, and kvpress where it is installed.
        openvino: also OpenVINO GenAI, without and with its own eviction.
        policies: what makes a row worth keeping.
        recalls: rows of a budget that are found among the evicted ones: fractions or counts
            likewise; 0 is a cache without an archive, None the part that the settings have by
            default.
    """

    model: Path
    window: int
    compute: Compute
    histories: tuple[int, ...]
    budgets: tuple[float | int, ...]
    kv_types: tuple[str, ...]
    rounds: int
    n: int
    transformers: bool = False
    openvino: bool = False
    policies: tuple[str, ...] = (DEFAULT_POLICY,)
    recalls: tuple[float | int | None, ...] = (None,)

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            SettingsError: no history, budget or type, or histories too close to each other.
        """
        if not (self.histories and self.budgets and self.kv_types):
            raise SettingsError("give at least one --history, one --budget and one --kv-type")
        for kv_type in self.kv_types:
            if kv_type not in ELEMENT_BYTES:
                raise SettingsError(
                    f"there is no KV type {kv_type!r}: give one of {', '.join(ELEMENT_BYTES)}"
                )
        if self.histories[0] < 0:
            raise SettingsError(f"--history {self.histories[0]}: give 0 or more tokens")
        for before, after in zip(self.histories, self.histories[1:], strict=False):
            # A cache that has evicted cannot go back, so the next text must reach further.
            if after - before < self.generated + 1 and before > 0:
                raise SettingsError(
                    f"--history {before} and {after} are too close: {self.generated} tokens "
                    "(--rounds x -n) are generated in between, so leave more than that"
                )

    @property
    def generated(self) -> int:
        """Tokens that a cache generates at each history."""
        return self.rounds * self.n

    @property
    def text_tokens(self) -> int:
        """Tokens of text that are needed."""
        return self.histories[-1] + self.generated

    @property
    def full_tokens(self) -> int:
        """Tokens that a full cache has room for: the window, or the text where that is longer."""
        return max(self.window, self.text_tokens)


def default_histories(window: int, generated: int) -> tuple[int, ...]:
    """No history, a long one and one of half its length, as far as the window goes.

    That of half the length is left out where the tokens generated after it would reach the other.
    """
    longest = min(window, LONGEST_DEFAULT)
    half = longest // 2
    return (0, half, longest) if half > generated else (0, longest)


def caches_to_compare(
    settings: BenchSettings, n_ctx_train: int, *, kvpress: bool = False
) -> list[MeasuredCache]:
    """The caches of a comparison, in the order in which they are shown.

    Every cache is made for the same window, however short the text is: that is what someone who
    wants that window has to allocate. The stock modes with as much text as a budget has rows are
    there to tell what fewer rows bring from what evicting costs. Caches of a budget have as many
    rows in all, however many of them are found.

    Args:
        settings: what is asked for.
        n_ctx_train: positions the model was trained on.
        kvpress: whether kvpress can be used; it matters only where transformers is asked for.

    Raises:
        SettingsError: a budget that makes no sense with this window.
    """
    parts = product(settings.budgets, settings.recalls)
    evicting = [_evicting(*part, settings, n_ctx_train) for part in parts]
    budgets = {cache.budget: cache for cache in evicting}.values()
    cells = whole_blocks(settings.full_tokens)
    caches = [*_stock("full", cells)]
    if "q8_0" in settings.kv_types:
        q8 = replace(FULL_CACHE, name="full, q8_0", cells=cells, kv_type="q8_0")
        caches.append(replace(q8, flash_attention=True))
    for cache in evicting:
        for policy, kv_type in product(settings.policies, dict.fromkeys(settings.kv_types)):
            name = cache.name
            if settings.policies != (DEFAULT_POLICY,):
                name = f"{policy}, {name}"
            name = name if kv_type == "f16" else f"{name}, {kv_type}"
            caches.append(replace(cache, name=name, policy=policy, kv_type=kv_type))
    caches += [_sinks_and_window(cache, settings.window, n_ctx_train) for cache in budgets]
    for rows in dict.fromkeys(cache.rows for cache in budgets):
        if rows < settings.histories[-1]:
            caches += _stock(f"full at {rows} rows", whole_blocks(rows + settings.generated), rows)
    if settings.transformers:
        tokens = settings.text_tokens
        caches.append(MeasuredCache("transformers", "transformers", cells=tokens))
        for cache in budgets if kvpress else ():
            name = f"kvpress, {cache.budget}"
            caches.append(MeasuredCache(name, "kvpress", rows=cache.rows, cells=tokens))
    if settings.openvino:
        # It evicts when a prompt has been read, so either needs room for all of it.
        caches.append(MeasuredCache("openvino", "openvino", cells=cells))
        for cache in budgets:
            name = f"openvino, {cache.budget}"
            caches.append(MeasuredCache(name, "openvino", rows=cache.rows, cells=cells))
    return caches


def _evicting(
    budget: float | int, recall: float | int | None, settings: BenchSettings, n_ctx_train: int
) -> MeasuredCache:
    """Half heavy, half recent, less what is found."""
    window = settings.window
    if budget > (window if isinstance(budget, int) else 1):
        raise SettingsError(
            f"--budget {budget} is more than the window of {window} tokens: give a fraction up to "
            "1.0 or fewer rows, or raise --ctx"
        )
    words = budget_name(budget)
    name = ", ".join(filter(None, (words, recall_name(recall))))
    parts = parts_of(budget, window, recall=recall)
    cache = MeasuredCache(name, policy=DEFAULT_POLICY, budget=words, **parts)
    return _resolved(cache, window, n_ctx_train)


def _sinks_and_window(cache: MeasuredCache, window: int, n_ctx_train: int) -> MeasuredCache:
    """A few first tokens and the newest ones, as many rows as another cache has."""
    if cache.rows <= SINKS:
        raise SettingsError(
            f"a budget of {cache.rows} rows has no room for {SINKS} sinks and a window: give a "
            "larger --budget"
        )
    # To this policy the newest rows are the heavy ones, and there may be too many (`_resolved`).
    heavy = (cache.rows - SINKS) // 2
    sinks = replace(
        cache,
        name=f"sinks + window, {cache.budget}",
        policy=STREAMING,
        heavy=heavy,
        recent=cache.rows - SINKS - heavy,
        pinned=SINKS,
        recall=0,
    )
    return _resolved(sinks, window, n_ctx_train)


def _resolved(cache: MeasuredCache, window: int, n_ctx_train: int) -> MeasuredCache:
    """With the cells that it allocates, and with no more heavy rows than it has positions for."""
    budget = EvictionSettings(**cache.eviction()).resolve(window, n_ctx_train)
    surplus = cache.rows - budget.rows - budget.recall
    heavy, rows = cache.heavy - surplus, cache.rows - surplus
    return replace(cache, cells=budget.cells, heavy=heavy, rows=rows)


def _stock(name: str, cells: int, text: int | None = None) -> list[MeasuredCache]:
    """llama.cpp's full cache, without and with flash attention."""
    plain = replace(FULL_CACHE, name=name, cells=cells, text=text)
    return [plain, replace(plain, name=f"{name}, flash attention", flash_attention=True)]
