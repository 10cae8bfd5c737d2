"""Kills programs in the midst of their writing; lets power and disks fail, and clocks jump.

    python tests/faults/faults.py --kills 1000 --cuts 1000 --failures 200 --clocks 200

For each subject (*_subject.py) so many trials: the operation on a file that the trouble begins
with is drawn, and how much of a write is done then. Clocks jump by amounts that are drawn, or the
program sleeps at a moment that is drawn. What a trial finds wrong is told with the options that
repeat it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from faulty_process import in_front_of_libraries

if TYPE_CHECKING:
    from subject import Subject

SOURCES = tuple(map(Path(__file__).with_name, ("jumping_clock.c", "faulty_files.c")))
HELPERS = Path(__file__).parents[1] / "helpers"
FAILURES = ("EIO", "FULL", "SHORT")
CLOCKS = ("CLOCK", "SLEEP")
# A program sleeps after so many milliseconds at most; the tiny ones take no longer.
LONGEST_EVENING = 1500


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials; 1 if any of them found something."""
    options = parsed(arguments)
    in_front_of_libraries(*SOURCES)
    with tempfile.TemporaryDirectory(prefix="pyh2o-faults-") as name:
        return try_all(options, Path(name).resolve())


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("subjects", nargs="*", help="chat, story, batch, server; default: all")
    parser.add_argument("--kills", type=int, default=25, help="of each subject")
    parser.add_argument("--cuts", type=int, default=25, help="of the power, of each subject")
    parser.add_argument("--failures", type=int, default=10, help="of each subject and kind")
    parser.add_argument("--clocks", type=int, default=10, help="of each subject and kind")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--repeat", help="one trial: FAULT:OPERATION:SEED, as it was told")
    return parser.parse_args(arguments)


def try_all(options: argparse.Namespace, work: Path) -> int:
    """The trials of all subjects."""
    os.environ |= {"PYH2O_THREADS": "1", "PYH2O_CONFIG": os.devnull, "PYH2O_GPU_LAYERS": "0"}
    sys.path.insert(0, str(HELPERS))
    from batch_subject import Batch
    from chat_subject import Chat
    from fake_story import tiny_model
    from server_subject import Server
    from story_subject import Story
    from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

    model = write_tiny_gguf(
        work / "tiny.gguf", seed=17, n_ctx_train=1 << 17, chat_template=CHAT_TEMPLATE
    )
    (work / "endless").mkdir()
    endless = tiny_model(work / "endless")
    load_everything()
    seed = options.seed if options.seed is not None else random.randrange(2**32)
    n_wrong = 0
    for subject in (Chat(model), Story(endless), Batch(model), Server(model)):
        if subject.name in options.subjects or not options.subjects:
            subject.prepare(work / "files")
            n_wrong += try_subject(subject, options, seed, work)
    return n_wrong > 0


def load_everything() -> None:
    """Import what the commands import when they run."""
    import llama_cpp  # noqa: F401
    import uvicorn  # noqa: F401

    import pyh2o.cli.app
    import pyh2o.server
    import pyh2o.sessions.conversation
    import pyh2o.sessions.story  # noqa: F401


def try_subject(subject: Subject, options: argparse.Namespace, seed: int, work: Path) -> int:
    """The trials of one subject; returns how many found something."""
    from faulty_process import Fault, Trouble
    from subject import emptied

    rng = random.Random(f"{seed} {subject.name}")
    kinds = [Fault.KILL] * options.kills
    kinds += [Fault.POWER] * options.cuts
    kinds += [Fault[kind] for kind in FAILURES for _ in range(options.failures)]
    kinds += [Fault[kind] for kind in CLOCKS for _ in range(options.clocks)]
    troubles = []
    for kind in kinds:
        places = LONGEST_EVENING if kind is Fault.SLEEP else subject.n_operations
        if kind is Fault.POWER:  # a fifth of the cuts come after the end
            places += places // 4
        troubles.append(Trouble(kind, rng.randrange(places), rng.randrange(2**32)))
    if options.repeat:
        kind, at, drawn = options.repeat.split(":")
        troubles = [Trouble(Fault[kind], int(at), int(drawn))]
    found: Counter[str] = Counter()
    started = time.monotonic()
    for trouble in troubles:
        try:
            result = subject.check(emptied(work / "files"), trouble)
            assert result.complete or trouble.fault.name not in CLOCKS, "it was not completed"
        except Exception as error:
            found["wrong"] += 1
            again = f"{trouble.fault.name}:{trouble.at}:{trouble.seed}"
            print(f"{subject.name} --repeat {again}: {type(error).__name__}: {error}", flush=True)
        else:
            found[trouble.fault.name] += 1
            found["complete"] += result.complete
            found["jumps of clocks"] += result.ended.n_jumps
    seconds = time.monotonic() - started
    counts = ", ".join(f"{n} {kind.lower()}" for kind, n in sorted(found.items()))
    print(
        f"{subject.name}: {len(troubles)} trials over {subject.n_operations} operations on files: "
        f"{counts}; {seconds:.0f} s, seed {seed}",
        flush=True,
    )
    return found["wrong"]


if __name__ == "__main__":
    sys.exit(main())
