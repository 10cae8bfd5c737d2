"""Measure speed and memory of caches: full ones, ones with eviction, and other programs'.

    python -m research.speed --recall 0 --history 0,4096,8192 --budget 0.2,0.1

Prints a Markdown table for each history. The roofline is the speed if time were spent only on
reading a token's data from memory: the weights (of all experts), rows, scores, windows and states.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from pyh2o.bench.turns import Figures, Turns
from pyh2o.cache.settings import DEFAULT_POLICY, whole_blocks
from pyh2o.cache.statistics import mib_text
from pyh2o.errors import SettingsError
from pyh2o.library.devices import machine_facts
from pyh2o.policies import parse_policy
from pyh2o.system.bandwidth import bytes_per_second

from ..eval.arguments import (
    add_compute,
    compute_of,
    model_of,
    new_file,
    numbers,
    parse_rows,
    policies_of,
    reported_errors,
    say,
)
from ..eval.caches import Rows
from ..eval.model import ModelFacts, english_text, read_model, repeated_tokens
from ..eval.tables import TextTable, table_of
from . import openvino
from .caches import Comparison, caches_to_compare


def main(arguments: list[str] | None = None) -> None:
    """Measure, show the tables and write the file."""
    parser = argparse.ArgumentParser(
        prog="research.speed", description=(__doc__ or "").partition("\n")[0]
    )
    add_compute(parser)
    parser.add_argument("--ctx", type=int, default=0, help="window; default: trained context")
    parser.add_argument("--history", type=partial(numbers, int), default=(0, 4096, 8192))
    parser.add_argument("--budget", type=partial(numbers, parse_rows), default=(0.2, 0.1))
    parser.add_argument("--recall", type=partial(numbers, parse_recall), default=(None,))
    parser.add_argument("--policy", action="append")
    parser.add_argument("--kv-type", type=partial(numbers, str), default=("f16", "q8_0"))
    parser.add_argument("--compare", choices=("openvino",))
    parser.add_argument(
        "--only-flash", action="store_true", help="compare with that full cache only"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-n", type=int, default=32, help="tokens per measurement")
    parser.add_argument("--json", type=Path, help="new file for all figures")
    given = parser.parse_args(arguments)
    with reported_errors():
        file = new_file(given.json)
        if given.compare is not None:
            openvino.check_packages()
        facts = read_model(model_of(given))
        policies = policies_of(given.policy or [DEFAULT_POLICY])
        asked = Comparison(
            model=facts.path,
            window=given.ctx or facts.n_ctx_train,
            compute=compute_of(given),
            histories=tuple(sorted(given.history)),
            budgets=given.budget,
            kv_types=given.kv_type,
            rounds=given.rounds,
            n=given.n,
            policies=tuple(dict.fromkeys(str(parse_policy(name)) for name in policies)),
            recalls=given.recall,
            other=given.compare,
            only_flash=given.only_flash,
        )
        compare(asked, facts, file)


def parse_recall(text: str) -> Rows | None:
    """Parse a budget, or "default"."""
    return None if text == "default" else parse_rows(text)


def compare(asked: Comparison, facts: ModelFacts, file: Path | None) -> None:
    """Measure all caches, show each table as soon as it is measured, and write the file."""
    caches = caches_to_compare(asked)
    tokens = repeated_tokens(asked.model, english_text(), asked.text_tokens)
    machine = machine_facts(asked.compute.threads, asked.compute.gpu_layers)
    per_second = None if asked.compute.gpu_layers else bytes_per_second(asked.compute.threads)
    speed = "" if per_second is None else f" reading {per_second / 1e9:.1f} GB/s of memory"
    print(
        f"{machine['cpu']}, {machine['threads']} threads{speed} · {asked.model.name} · pyh2o "
        f"{machine['pyh2o']}, llama.cpp {machine['llama_cpp_commit']}\n"
        f"instructions that are used: {' '.join(machine['instructions'])}\n"
        f"window {asked.window}, {asked.rounds} interleaved rounds of {asked.n} tokens\n",
        flush=True,
    )
    record: dict[str, Any] = {"machine": machine, "settings": _settings(asked), "histories": []}
    cells = whole_blocks(asked.window)
    with closing(Turns(caches, asked.model, tokens, say)) as turns:
        for history, figures in turns.measure(asked.histories, rounds=asked.rounds, n=asked.n):
            if not figures:
                raise SettingsError(f"no cache could be measured: {turns.failures}")
            full = full_bytes(figures, cells)
            rows = [figure_of(one, full, facts.weight_bytes, per_second) for one in figures]
            print(table(f"After {history:,} tokens", rows, turns.failures).markdown(), flush=True)
            record["histories"].append({"history": history, "figures": rows})
            if file is not None:
                file.write_text(json.dumps(record, indent=1, default=vars) + "\n", "utf-8")


def _settings(asked: Comparison) -> dict[str, Any]:
    # The file's location is private.
    return {**asdict(replace(asked, model=Path(asked.model.name))), "model": asked.model.name}


def full_bytes(figures: list[Figures], cells: int) -> float:
    """Return the size of the full f16 cache for the window, from the first cache, which is one."""
    use = figures[0].done.use
    return use.bytes_kv / use.cells * cells if use.cells else 0.0


def figure_of(
    one: Figures, full: float, weight_bytes: int, per_second: float | None
) -> dict[str, Any]:
    """Return all figures of a cache at a history, including those of its table."""
    use = one.done.use
    in_use = use.bytes_kv * use.used / use.cells if use.cells else 0.0
    needed = weight_bytes + in_use + use.bytes_fixed
    reached = one.generated_per_second.median * needed / per_second if per_second else None
    return {**vars(one), "share_of_full": use.bytes_kv / full if full else 0.0, "roofline": reached}


COLUMNS: list[tuple[str, Any]] = [
    ("cache", lambda one: one["cache"]),
    ("KV memory", lambda one: f"{mib_text(one['done'].use.bytes_kv)} MiB"),
    ("of full", lambda one: f"{one['share_of_full']:.1%}"),
    ("peak MiB", lambda one: f"{one['done'].peak_bytes / 2**20:.0f}"),
    ("GPU MiB", lambda one: _unless_none(one["done"].use.bytes_device / 2**20 or None, ".0f")),
    ("archive MiB", lambda one: _unless_none(one["done"].use.bytes_archive / 2**20 or None, ".1f")),
    ("attention found", lambda one: _unless_none(one["done"].use.found_share, ".1%")),
    ("read tok/s", lambda one: _unless_none(one["read_per_second"], ".0f")),
    ("first token s", lambda one: f"{one['first_token_seconds']:.2f}"),
    ("generate tok/s (range)", lambda one: f"{one['generated_per_second']:.1f}"),
    ("x full (range)", lambda one: _unless_none(one["ratio"], ".2f")),
    (
        "compactions, % of time",
        lambda one: (
            f"{one['compactions']}, {one['compaction_share']:.1%}" if one["compactions"] else ""
        ),
    ),
    ("of roofline", lambda one: _unless_none(one["roofline"], ".0%")),
]


def table(title: str, rows: list[dict[str, Any]], failures: dict[str, str]) -> TextTable:
    """Return the table of a history; columns without figures are left out."""
    columns = [one for one in COLUMNS if any(map(one[1], rows))]
    beside = {one["done"].use.bytes_fixed for one in rows} - {0}
    sizes = " to ".join(dict.fromkeys(map(mib_text, sorted(beside))))
    remarks = [f"{name}: {reason}" for name, reason in failures.items()]
    if beside:
        remarks.append(f"windows and recurrent states take {sizes} MiB beside KV memory")
    return replace(table_of(title, rows, columns), remarks=tuple(remarks))


def _unless_none(value: Any, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


if __name__ == "__main__":
    main()
