"""What is compared: the settings of a comparison, and the caches that they come to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from ...cache.settings import DEFAULT_POLICY, EvictionSettings, whole_blocks
from ...errors import SettingsError
from ...policies import Streaming
from ..tables import budget_name

Kind = Literal["full", "evicting", "transformers", "kvpress"]

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
        window: tokens; fractions in `budgets` refer to it.
        threads: CPU threads of each cache, of which only one computes at any time.
        gpu_layers: layers on the GPU; -1 is all.
        histories: tokens of text before a measurement, ascending.
        budgets: rows to keep: fractions of the window (float) or counts (int).
        kv_types: types of the rows of this runtime's caches.
        rounds: turns that every cache has at each history.
        n: tokens generated in a turn.
        transformers: also Hugging Face transformers, and kvpress where it is installed.
        policies: what makes a row worth keeping.
    """

    model: Path
    window: int
    threads: int
    gpu_layers: int
    histories: tuple[int, ...]
    budgets: tuple[float | int, ...]
    kv_types: tuple[str, ...]
    rounds: int
    n: int
    transformers: bool = False
    policies: tuple[str, ...] = (DEFAULT_POLICY,)

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


@dataclass(frozen=True)
class Cache:
    """One cache that is measured.

    Attributes:
        name: as shown in tables.
        kind: what runs it.
        cells: cells that it allocates; for transformers most tokens it comes to hold.
        kv_type: of the rows; transformers has its own.
        flash_attention: for "full"; the others use what is best for them.
        heavy, recent, pinned: rows of "evicting".
        rows: budget of "evicting" and "kvpress".
        policy: of "evicting".
        text: most tokens that it reads; it is then measured at the longest history only.
    """

    name: str
    kind: Kind
    cells: int
    kv_type: str = "f16"
    flash_attention: bool = False
    heavy: int = 0
    recent: int = 0
    pinned: int = 0
    rows: int = 0
    policy: str = DEFAULT_POLICY
    text: int | None = None

    @property
    def is_stock(self) -> bool:
        """Whether this is one of the modes that others are compared with."""
        return self.kind == "full" and self.kv_type == "f16" and self.text is None

    def target(self, history: int) -> int:
        """Tokens it reads where the others read `history`."""
        return history if self.text is None else self.text

    def takes_part(self, history: int, longest: int) -> bool:
        """Whether it is measured at this history."""
        return self.text is None or history == longest


def default_histories(window: int, generated: int) -> tuple[int, ...]:
    """No history, a long one and one of half its length, as far as the window goes.

    That of half the length is left out where the tokens generated after it would reach the other.
    """
    longest = min(window, LONGEST_DEFAULT)
    half = longest // 2
    return (0, half, longest) if half > generated else (0, longest)


def caches_to_compare(
    settings: BenchSettings, n_ctx_train: int, *, kvpress: bool = False
) -> list[Cache]:
    """The caches of a comparison, in the order in which they are shown.

    Args:
        settings: what is asked for.
        n_ctx_train: positions the model was trained on.
        kvpress: whether kvpress can be used; it matters only where transformers is asked for.

    Raises:
        SettingsError: a budget that makes no sense with this window.
    """
    budgets = {
        budget: _split(budget, settings.window).resolve(settings.window, n_ctx_train)
        for budget in dict.fromkeys(settings.budgets)
    }
    caches = _full_caches(settings)
    for budget, resolved in budgets.items():
        for policy, kv_type in product(settings.policies, dict.fromkeys(settings.kv_types)):
            name = budget_name(budget)
            if settings.policies != (DEFAULT_POLICY,):
                name = f"{policy}, {name}"
            caches.append(
                Cache(
                    name if kv_type == "f16" else f"{name}, {kv_type}",
                    "evicting",
                    resolved.cells,
                    kv_type=kv_type,
                    heavy=resolved.heavy,
                    recent=resolved.recent,
                    rows=resolved.rows,
                    policy=policy,
                )
            )
    for budget, resolved in budgets.items():
        caches.append(_sinks_and_window(budget, resolved.rows, settings, n_ctx_train))
    for rows in dict.fromkeys(resolved.rows for resolved in budgets.values()):
        if rows < settings.histories[-1]:
            caches += _at_equal_cells(rows, settings.generated)
    if settings.transformers:
        caches.append(Cache("transformers", "transformers", settings.text_tokens))
        if kvpress:
            caches += [
                Cache(
                    f"kvpress, {budget_name(budget)}",
                    "kvpress",
                    settings.text_tokens,
                    rows=resolved.rows,
                )
                for budget, resolved in budgets.items()
            ]
    return caches


def _split(budget: float | int, window: int) -> EvictionSettings:
    """Half heavy, half recent."""
    if budget > (window if isinstance(budget, int) else 1):
        raise SettingsError(
            f"--budget {budget} is more than the window of {window} tokens: give a fraction up to "
            "1.0 or fewer rows, or raise --ctx"
        )
    if isinstance(budget, int):
        return EvictionSettings(hh=budget // 2, recent=budget - budget // 2)
    return EvictionSettings(hh=budget / 2, recent=budget / 2)


def _full_caches(settings: BenchSettings) -> list[Cache]:
    cells = whole_blocks(settings.text_tokens)
    caches = [
        Cache("full", "full", cells),
        Cache("full, flash attention", "full", cells, flash_attention=True),
    ]
    if "q8_0" in settings.kv_types:
        caches.append(Cache("full, q8_0", "full", cells, kv_type="q8_0", flash_attention=True))
    return caches


def _sinks_and_window(
    budget: float | int, rows: int, settings: BenchSettings, n_ctx_train: int
) -> Cache:
    if rows <= SINKS:
        raise SettingsError(
            f"a budget of {rows} rows has no room for {SINKS} sinks and a window: give a larger "
            "--budget"
        )
    split = EvictionSettings(hh=0, recent=rows - SINKS, pinned=SINKS)
    resolved = split.resolve(settings.window, n_ctx_train)
    return Cache(
        f"sinks + window, {budget_name(budget)}",
        "evicting",
        resolved.cells,
        recent=resolved.recent,
        pinned=resolved.pinned,
        rows=resolved.rows,
        policy=Streaming.name,
    )


def _at_equal_cells(rows: int, generated: int) -> list[Cache]:
    """The stock modes with as many tokens of text as a budget has rows."""
    cells = whole_blocks(rows + generated)
    return [
        Cache(f"full at {rows} rows", "full", cells, text=rows),
        Cache(
            f"full at {rows} rows, flash attention", "full", cells, flash_attention=True, text=rows
        ),
    ]
