"""Comparing products of weights with NumPy's, once, in another process.

A miscompiled library may crash or give wrong results. So each type of weights is tried when a model
with it is first loaded (`pyh2o.core.product_trial`).
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import LibraryError
from . import LIBRARY_FOLDER
from .backends import cpu_library, is_float, type_name, weight_types
from .devices import gpu_names
from .loading import variants
from .verdicts import CURE, Verdicts, keep_verdicts, passed_over_text, read_verdicts

EXACT, ROUNDED = 0.05, 0.2
"""Largest relative error of logits, for weights in floating point and for other types, for which
ggml rounds activations to 8 bits. With 40 seeds each, the largest errors were 0.014 and 0.106; a
missing block of 32 weights gives 0.27."""

PATIENCE = 120
"""Timeout of trying weights, in seconds."""

# Other ends of a process, such as a lack of memory, say nothing about the library. Windows has no
# SIGBUS.
_CRASHES = {"SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE", "SIGABRT"}


@dataclass(frozen=True)
class Products:
    """Results for types of weights on one device.

    Attributes:
        gpus: their names; "" for the CPU.
        right: types with right products.
        plain: types with right products only as stored in the file, and the error after ggml
            rearranges them for the processor.
        wrong: types with wrong products, and the error.
        unknown: types that could not be tried.
    """

    gpus: str
    right: tuple[str, ...]
    plain: Mapping[str, str]
    wrong: Mapping[str, str]
    unknown: tuple[str, ...]

    def problems(self) -> list[str]:
        """Return a line for `plain` and one for `wrong`, if they are not empty."""
        lines = []
        if self.plain:
            lines.append(
                f"the library fails on this processor with weights that it rearranges, in "
                f"{_listed(self.plain)}: they are used as stored in the file, which is slower by "
                f"a third or more; {CURE}"
            )
        if self.wrong:
            where = self.gpus or "this processor"
            cure = "give n_gpu_layers=0 (--gpu-layers 0)" if self.gpus else CURE
            types = _listed(self.wrong)
            lines.append(f"the library fails on {where} with weights in {types}: {cure}")
        return lines


def may_rearrange(types: Iterable[int], *, on_gpus: bool) -> bool:
    """Return whether ggml may rearrange weights of these types; warn if it may not."""
    types = [n for n in types if n in weight_types()]
    all_of = [find_products(types, on_gpus=where) for where in sorted({False, on_gpus})]
    for products in all_of:
        if products.wrong:
            *_, line = products.problems()
            raise LibraryError(line if products.gpus else _next_variant(types, products) or line)
    for line in [line for products in all_of for line in products.problems()]:
        warnings.warn(line, RuntimeWarning, stacklevel=4)
    return not any(products.plain for products in all_of)


def find_products(types: Iterable[int], *, on_gpus: bool, anew: bool = False) -> Products:
    """Look up the results for types of weights, and try the others, or all `anew`."""
    gpus = ", ".join(gpu_names()) if on_gpus else ""
    names = {n: type_name(n) for n in types}
    keys = {n: f"{name} on {gpus}" if gpus else name for n, name in names.items()}
    verdicts = read_verdicts()
    left = [n for n in names if anew or keys[n] not in verdicts.products]
    _, found = _try(left, on_gpus=on_gpus)
    bad = [n for n in found if found[n]]
    _, plain = _try(bad, on_gpus=on_gpus, rearranged=False)
    wrong = {n: found[n] for n in bad if plain.get(n) != ""}
    if left:
        for n in left:
            verdicts.products.pop(keys[n], None)
        verdicts.products |= {keys[n]: why for n, why in found.items() if n not in wrong}
        keep_verdicts(verdicts)
    known = {n: verdicts.products[keys[n]] for n in names if keys[n] in verdicts.products}
    return Products(
        gpus,
        right=tuple(names[n] for n, why in known.items() if not why),
        plain={names[n]: why for n, why in known.items() if why},
        wrong={names[n]: why for n, why in wrong.items()},
        unknown=tuple(names[n] for n in names if n not in known and n not in wrong),
    )


def _next_variant(types: Sequence[int], products: Products) -> str | None:
    """Select the best correct CPU variant for the next process; return the message to restart."""
    before, why = read_verdicts(), _listed(products.wrong)
    passed_over = before.passed_over
    library = first = Path(cpu_library()).name
    while library in {path.name for path in variants(LIBRARY_FOLDER)} - {*passed_over}:
        passed_over = {**passed_over, library: why}
        keep_verdicts(Verdicts(passed_over=passed_over))  # the next process loads another variant
        library, wrong = _try(types)
        if wrong and not any(wrong.values()):
            return f"{passed_over_text(first, why)}: start again, with {library} ({CURE})"
    keep_verdicts(before)
    return None


def _listed(reasons: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({why})" for name, why in reasons.items())


def _try(
    types: Sequence[int], *, on_gpus: bool = False, rearranged: bool = True
) -> tuple[str, dict[int, str]]:
    """Try types of weights in other processes; return the library and each type's error or ""."""
    library, wrong = "", {}
    while left := [n for n in types if n not in wrong]:
        code, printed = _run(left, on_gpus=on_gpus, rearranged=rearranged)
        library, *lines = printed or [""]
        for number, error in zip(lines[::2], lines[1::2], strict=False):
            wrong[int(number)] = _what_is_wrong(int(number), float(error))
        ended_by = signal.Signals(-code).name if code < 0 else ""
        if ended_by not in _CRASHES or len(lines) % 2 == 0:
            break
        wrong[int(lines[-1])] = ended_by
    return library, wrong


def _what_is_wrong(number: int, error: float) -> str:
    if error <= (EXACT if is_float(number) else ROUNDED):
        return ""
    return f"wrong by {error:.0%}" if math.isfinite(error) else "no numbers"


def _run(types: Iterable[int], *, on_gpus: bool, rearranged: bool) -> tuple[int, list[str]]:
    """Run a process that tries the types; return its exit code and the lines that it printed."""
    if not sys.executable or hasattr(sys, "frozen"):  # the executable is not Python
        return 0, []
    call = f"run({[*types]}, on_gpus={on_gpus}, rearranged={rearranged})"
    load = f"import sys; sys.path[:] = {sys.path!r}; from pyh2o.core.product_trial import run"
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"{load}; {call}"],
            # NumPy's threads would spin while other processes compute
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0, []
    return done.returncode, done.stdout.decode().splitlines()
