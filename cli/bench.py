"""`pyh2o bench`: compare speed and memory of a cache with those of the full cache."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyh2o.cache.settings import whole_blocks
from pyh2o.cache.statistics import mib_text
from pyh2o.models import find_model
from pyh2o.system.memory import available_bytes
from pyh2o.system.threads import physical_cores

from .errors import InputError, reported_errors
from .loading import cache_settings, machine_settings
from .options import ModelOptions, takes_run_options
from .terminal.progress import Bars
from .terminal.terminal import terminal
from .terminal.wording import duration

if TYPE_CHECKING:
    from pyh2o.bench.process import Cache
    from pyh2o.bench.turns import Figures
    from pyh2o.core.description import ModelDescription

LONGEST_DEFAULT = 8192
HEADINGS = (
    "cache", "KV memory", "archive", "GPU MiB", "peak MiB", "read tok/s", "first token s",
    "generate tok/s (range)", "x full (range)", "compactions, % of time",
)  # fmt: skip


@takes_run_options
def bench(
    *,
    options: ModelOptions,
    history: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS,...",
            help="Lengths of the text at which to measure, in tokens.",
            show_default="0,4096,8192, or less for a smaller window",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each cache.")] = 5,
    n: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="Tokens to generate per measurement.")
    ] = 32,
) -> None:
    """Measure speed and memory of this cache and llama.cpp's full caches, interleaved.

    Each cache runs in its own process. The tables are Markdown.
    """
    with reported_errors():
        if options.rpc:
            raise InputError(
                "--rpc is not supported: each cache runs in its own process, but a server accepts "
                "one program at a time: remove it"
            )
        path = find_model(options.model)
        from pyh2o.bench.turns import Turns
        from pyh2o.compat.llama import Llama
        from pyh2o.core.description import describe_model
        from pyh2o.library.devices import machine_facts

        model = describe_model(
            path, options.eviction, n_ctx=options.ctx, kv_type=options.kv_type.value
        )
        histories = parse_histories(history, model.window, rounds * n)
        n_tokens = histories[-1] + rounds * n
        caches = compared(options, path, model, n_tokens)
        with Llama(str(path), vocab_only=True, verbose=False) as llm:
            tokens = long_text(llm, n_tokens)
        facts = machine_facts(options.threads or physical_cores(), options.gpu_layers or 0)
        terminal.write(
            f"{facts['cpu']}, {facts['threads']} threads · {path.name} · pyh2o {facts['pyh2o']}, "
            f"llama.cpp {facts['llama_cpp_commit']} · window {model.window}, {rounds} rounds of "
            f"{n} tokens\n"
        )
        bars, tokens_before = Bars(), 0
        figures: list[Figures] = []
        with closing(Turns(caches, path, tokens, bars.show)) as turns:
            seconds = turns.expected_seconds(histories, rounds=rounds, n=n)
            bars.clear()
            terminal.say(f"this takes about {duration(seconds)}")
            for tokens_before, figures in turns.measure(histories, rounds=rounds, n=n):
                bars.clear()
                show_table(f"After {tokens_before:,} tokens of text", figures)
        for name, reason in turns.failures.items():
            terminal.say(f"{name}: {reason}")
        if not figures:
            raise InputError("no cache could be measured")
        terminal.write(f"\n{conclusion(tokens_before, figures)}\n")


def compared(
    options: ModelOptions, path: Path, model: ModelDescription, n_tokens: int
) -> list[Cache]:
    """Return llama.cpp's full caches for the window or a longer text, and this cache."""
    from pyh2o.bench.process import Cache

    cells = whole_blocks(max(model.window, n_tokens))
    machine = machine_settings(options)
    full = {**machine, "evict": False, "swa_full": False, "n_ctx": cells}
    caches = [
        Cache("full", {**full, "flash_attn": False}, is_full=True),
        Cache("full, flash attention", {**full, "flash_attn": True}, is_full=True),
    ]
    needed = path.stat().st_size + (2 * model.full.total if model.full else 0)
    if not options.no_evict:
        if model.evicting is None:
            raise InputError(f"{model.refused}: give another --model, or --no-evict")
        settings = {**machine, **cache_settings(options), "n_ctx": model.window}
        caches.append(Cache("pyh2o", settings))
        needed += model.evicting.total
    if needed > (available := available_bytes()):
        raise InputError(
            f"the caches and the model need {mib_text(needed)} MiB, but only {mib_text(available)} "
            "MiB are available: lower --ctx"
        )
    return caches


def parse_histories(given: str | None, window: int, generated: int) -> list[int]:
    """Return the lengths of text to measure at; by default up to the window, within a limit."""
    if given is None:
        longest = min(window, LONGEST_DEFAULT)
        return sorted({0, longest, longest // 2 if longest // 2 > generated else 0})
    try:
        histories = sorted({int(item) for item in given.split(",")})
    except ValueError:
        raise InputError(
            f"--history {given!r} is not a list of counts: give one such as 0,4096,8192"
        ) from None
    if any(after < before + generated for before, after in pairwise([-generated, *histories])):
        raise InputError(
            f"--history {given}: give counts of 0 or more, at least {generated} (--rounds x -n) "
            "apart"
        )
    return histories


def long_text(llm: Any, n_tokens: int) -> list[int]:
    """Return tokens of Python's own documentation, repeated if necessary."""
    from pydoc_data.topics import topics

    tokens: list[int] = llm.tokenize("\n\n".join(topics.values()).encode())
    return (tokens * -(-n_tokens // len(tokens)))[:n_tokens]


def show_table(title: str, figures: list[Figures]) -> None:
    """Print the results for one length of text as Markdown, without empty columns."""
    rows = [_cells(one) for one in figures]
    shown = [i for i in range(len(HEADINGS)) if any(row[i] for row in rows)]
    lines = [[HEADINGS[i] for i in shown], ["---"] + ["---:"] * (len(shown) - 1)]
    lines += [[row[i] for i in shown] for row in rows]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    terminal.write(f"\n**{title}**\n\n{text}")


def conclusion(history: int, figures: list[Figures]) -> str:
    """Return a sentence about the last results."""
    full = [one for one in figures if one.is_full]
    best = max(full or figures, key=lambda one: one.generated_per_second.median)
    ours = next((one for one in figures if not one.is_full), best)
    summary = (
        f"After {history:,} tokens, {ours.cache} generates "
        f"{ours.generated_per_second.median:.1f} tokens/s with "
        f"{mib_text(ours.done.use.bytes_kv)} MiB of KV memory"
    )
    if ours is best or ours.ratio is None:
        return f"{summary}."
    return (
        f"{summary}; that is {ours.ratio.median:.2f} times the speed of llama.cpp's full cache, "
        f"which takes {mib_text(best.done.use.bytes_kv)} MiB."
    )


def _cells(one: Figures) -> list[str]:
    use = one.done.use
    return [
        one.cache,
        f"{mib_text(use.bytes_kv)} MiB",
        f"{mib_text(use.bytes_archive)} MiB" if use.bytes_archive else "",
        mib_text(use.bytes_device) if use.bytes_device else "",
        f"{one.done.peak_bytes / 2**20:.0f}",
        f"{one.read_per_second:.0f}" if one.read_per_second else "",
        f"{one.first_token_seconds:.2f}",
        f"{one.generated_per_second:.1f}",
        f"{one.ratio:.2f}" if one.ratio else "",
        f"{one.compactions}, {one.compaction_share:.1%}" if one.compactions else "",
    ]
