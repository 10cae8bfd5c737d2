"""Measure the quality loss of a cache with eviction without a network.

python -m research.eval fidelity --text book.txt --policy h2o-far,streaming --budget 0.1,0.2
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pyh2o.cache.settings import DEFAULT_POLICY, EvictionSettings
from pyh2o.errors import SettingsError
from pyh2o.library.devices import machine_facts
from pyh2o.writing.sampling import Sampling

from .arguments import (
    add_compute,
    compute_of,
    model_of,
    numbers,
    parse_rows,
    policies_of,
    read_text,
    reported_errors,
)
from .caches import STREAMING
from .fidelity import Fidelity, FidelitySettings
from .measurement import CacheSettings, Measurement, Settings, policy_named
from .model import NamedText, normalised
from .reading import CHUNK
from .recall import Recall, RecallSettings, When
from .results import ResultFile
from .stories import Stories, StorySettings
from .tasks import TASKS

TASKS_BY_DEFAULT = ("niah_single_1", "niah_multikey_2", "vt", "cwe", "fwe")
PROMPT = "Once upon a time, in a town by the sea, there lived a clockmaker who"

words = partial(numbers, str)
counts = partial(numbers, int)
rows = partial(numbers, parse_rows)


def main(arguments: list[str] | None = None) -> None:
    """Measure the units missing in the file, and show the tables."""
    given = parser().parse_args(arguments)
    with reported_errors():
        measure(given, *given.make(given))


def measure(
    given: argparse.Namespace, measurement: type[Measurement[Any]], settings: Settings
) -> None:
    """Measure, and show the results even after an error or Ctrl-C."""
    machine = machine_facts(settings.compute.threads, settings.compute.gpu_layers)
    if given.json is not None and not given.json.absolute().parent.is_dir():
        raise SettingsError(f"{given.json.absolute().parent} does not exist: create it")
    file = ResultFile(given.json, measurement.kind, settings.basis(), machine)
    measured = measurement(settings, file)
    try:
        measured.run()
    finally:
        for table in measured.tables():
            print(table.markdown())
        for note in measured.notes:
            print(note)


def parser() -> argparse.ArgumentParser:
    """Return all commands with their options."""
    top = argparse.ArgumentParser(
        prog="research.eval", description=(__doc__ or "").partition("\n")[0]
    )
    commands = top.add_subparsers(required=True)

    def command(make: Any, about: str) -> Any:
        one = commands.add_parser(make.__name__, help=about, description=about)
        one.set_defaults(make=make)
        add_compute(one)
        add = one.add_argument
        add("--policy", action="append", help=f"default: {DEFAULT_POLICY},{STREAMING}")
        add("--budget", type=rows, default=(0.2, 0.1), help="rows: fractions or counts")
        add("--recent-share", type=float, help="of the rows that are not pinned; default: half")
        add("--recall", type=rows, default=(None,), help="retrieved rows; 0: no archive")
        add("--pinned", type=int, default=0)
        add("--json", type=Path, help="file of all units, which a later run continues")
        return add

    add = command(fidelity, "perplexity of texts, and KL to the full cache's predictions")
    add("--text", type=Path, action="append", required=True)
    add("--tokens", type=counts, default=(4096,), help="lengths read of each text")
    add("--start", type=int, default=0, help="first token to read")
    add("--from", dest="first", type=int, help="first token that counts, from --start")
    add("--stretch", type=int, default=2048, help="length of parts with separate perplexity")
    add("--keep-lines", action="store_true", help="for code, tables and chats")
    add("--at-once", type=int, default=CHUNK, help="chunk size; 1: as in generation")

    add = command(recall, "questions about facts in a long text: RULER's tasks")
    add("--task", type=words, default=TASKS_BY_DEFAULT, help=f"all, or some of {', '.join(TASKS)}")
    add("--tokens", type=counts, default=(4096,), help="length of a sample with its answer")
    add("--samples", type=int, default=5, help="per task and length")
    add("--question", type=words, default=("after", "before"), help="relative to eviction")
    add("--text", type=Path, help="prose to hide facts in; default: made up")
    add("--seed", type=int, default=0)

    add = command(story, "how repetitive stories are, and how likely under the full cache")
    add("--prompt", "-p", default=PROMPT)
    add("--tokens", "-n", type=int, default=1000)
    add("--samples", type=int, default=4)
    add("--temp", type=float, default=Sampling().temperature)
    add("--seed", type=int, default=0)
    return top


def shared(given: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that all settings share."""
    policies = policies_of(given.policy or [DEFAULT_POLICY, STREAMING])
    default, share = EvictionSettings(), given.recent_share
    return {
        "model": model_of(given),
        "compute": compute_of(given),
        "caches": CacheSettings(
            policies=tuple(dict.fromkeys(map(policy_named, policies))),
            budgets=given.budget,
            recent_share=default.recent / (default.hh + default.recent) if share is None else share,
            pinned=given.pinned,
            recalls=given.recall,
        ),
    }


def fidelity(given: argparse.Namespace) -> tuple[type[Fidelity], FidelitySettings]:
    joined = str if given.keep_lines else normalised
    return Fidelity, FidelitySettings(
        **shared(given),
        texts=tuple(NamedText(file.name, joined(read_text(file))) for file in given.text),
        tokens=given.tokens,
        start=given.start,
        first=given.first,
        stretch=given.stretch,
        at_once=given.at_once,
    )


def recall(given: argparse.Namespace) -> tuple[type[Recall], RecallSettings]:
    check("--question", given.question, get_args(When))
    text = given.text
    return Recall, RecallSettings(
        **shared(given),
        tasks=tuple(TASKS) if given.task == ("all",) else given.task,
        tokens=given.tokens,
        samples=given.samples,
        questions=given.question,
        prose=None if text is None else NamedText(str(text), normalised(read_text(text))),
        seed=given.seed,
    )


def story(given: argparse.Namespace) -> tuple[type[Stories], StorySettings]:
    return Stories, StorySettings(
        **shared(given),
        prompt=given.prompt,
        tokens=given.tokens,
        samples=given.samples,
        sampling=Sampling(temperature=given.temp, seed=given.seed),
    )


def check(option: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Refuse an unknown value of an option.

    Raises:
        SettingsError: lists the known values.
    """
    if unknown := [word for word in given if word not in known]:
        raise SettingsError(f"unknown {option} {unknown[0]}: give some of {', '.join(known)}")


if __name__ == "__main__":
    main()
