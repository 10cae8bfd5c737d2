"""Let every allocation of our C++ fail once, and check the outcome.

    python tests/faults/allocations.py

A model with a tiny cache is loaded, reads, compacts, archives, recalls, is saved and loaded again.
In each allocation the process is forked. The allocation fails in the fork and succeeds in the
parent. In the fork an error must be raised, or the logits must be right. Afterwards the model must
be usable: its state can be saved and loaded, and another text has the right logits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

# before NumPy is loaded: forks have no other threads
os.environ |= {"PYH2O_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import numpy as np

from failing_new import CHECKOUT, FailingNew, our_calls, preload, watch_our_functions
from forked_folder import ForkedFolder
from forks import Fork, allow_seconds, answer_of, in_fork, returned

N_VOCAB = 384
CACHE = {"hh": 22, "recent": 9, "slack": 7, "n_ctx": 128, "n_batch": 16, "recall": 8}
SECONDS = 20
"""Maximum processor time of a fork."""
# Arguments of write_tiny_gguf, and settings of the cache.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "far": ({}, {"policy": "h2o-far"}),
    "snap": ({"head_size": 64}, {"policy": "snap", "type": 8, "recall": 0}),
    "windows": ({"arch_variant": "gemma2", "n_layer": 4}, {"policy": "snap:queries=1,pool=1"}),
    "recurrent": ({"arch_variant": "lfm2", "n_layer": 4}, {"policy": "h2o", "recall": 0}),
    "exact": ({}, {"policy": "snap:queries=8", "prefill": "exact", "recall": 0}),
    "file": ({}, {"policy": "h2o-far", "recall_archive": "files/archive"}),
    "mean": ({}, {"policy": "h2o-mean", "recall_type": "q4_0"}),
    "latent": ({"arch_variant": "mla"}, {"policy": "roco", "recall_type": "f16"}),
}
FOLDER = Path("files")


def main() -> int:
    """Run the trials; return 1 if any of them found something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    kinds = f"kinds of caches: {', '.join(KINDS)}; all of them"
    parser.add_argument("cache", nargs="*", choices=[*KINDS, []], metavar="cache", help=kinds)
    parser.add_argument("--every", type=int, default=1, help="try one of this many allocations")
    parser.add_argument("--kinds", action="store_true", help="only the first of each call stack")
    parser.add_argument("--at", type=int, help="try only this allocation, and print its calls")
    options = parser.parse_args()
    preload()
    with tempfile.TemporaryDirectory(prefix="pyh2o-allocations-") as name:
        return try_all(options, Path(name))


def try_all(options: argparse.Namespace, work: Path) -> int:
    """Run the trials of each kind of cache."""
    os.environ |= {"PYH2O_CONFIG": os.devnull, "PYH2O_GPU_LAYERS": "0"}
    sys.path.insert(0, str(CHECKOUT / "tests" / "helpers"))
    os.chdir(work)  # archives are there
    from pyh2o.core.locks import ModelLock
    from tiny_gguf import write_tiny_gguf

    ModelLock.forked = False  # the parent waits, and does not use the model meanwhile
    watch_our_functions()
    n_wrong = 0
    for name in options.cache or KINDS:
        shape, settings = KINDS[name]
        path = write_tiny_gguf(work / "tiny.gguf", seed=11, n_ctx_train=96, **shape)
        n_wrong += try_kind(name, path, {**CACHE, **settings}, options)
    return n_wrong > 0


def try_kind(name: str, path: Path, settings: dict[str, Any], options: argparse.Namespace) -> int:
    """Run the trials of one kind of cache; return how many found something."""
    started = time.monotonic()
    folder = ForkedFolder(FOLDER)
    calm = in_fork(lambda: life(path, settings, None))
    assert calm.get("error", "") is None, calm
    trials = Trials(name, settings, folder, calm, options)
    result = in_fork(lambda: trials.of_life(path))
    assert "wrong" not in result, result
    found = Counter(result["found"])
    n, seconds = found.total(), time.monotonic() - started
    counts = ", ".join(f"{n} {kind}" for kind, n in found.most_common())
    print(f"{name}: {n} of {result['n']} allocations: {counts}; {seconds:.0f} s", flush=True)
    return found["wrong"]


class Trials:
    """The trials of one kind of cache.

    Args:
        name: the kind of cache.
        settings: settings of the cache.
        folder: the model's files.
        calm: the outcome if nothing fails.
        options: which allocations are tried.
    """

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        folder: ForkedFolder,
        calm: dict[str, Any],
        options: argparse.Namespace,
    ) -> None:
        self._name = name
        self._settings = settings
        self._calm = calm
        self._options = options
        self._folder = folder
        self._found: Counter[str] = Counter()
        self._fork: Fork | None = None

    def of_life(self, path: Path) -> dict[str, Any]:
        """Use a model, with a fork for each tried allocation; return the outcomes and their number.

        In a fork this does not return, but sends its outcome.
        """
        failing = FailingNew(self._fails, kinds=self._options.kinds)
        outcome = returned(lambda: life(path, self._settings, failing))
        if self._fork is not None:
            self._fork.leave(outcome)
        if wrong := self._wrong(outcome):
            raise AssertionError(f"nothing failed: {wrong}")
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread was started"
        return {"n": failing.n, "found": self._found}

    def _fails(self, number: int) -> bool:
        at = self._options.at
        if number % self._options.every if at is None else number != at:
            return False
        self._folder.copy()
        fork = Fork()
        if fork.is_here:
            allow_seconds(SECONDS)
            self._folder.enter_copy()
            self._fork = fork
            if at is not None:
                print(our_calls(), flush=True)
            return True
        self._note(number, answer_of(fork))
        self._folder.drop_copy()
        return False

    def _note(self, number: int, outcome: dict[str, Any]) -> None:
        wrong = self._wrong(outcome)
        if wrong:
            kinds = " --kinds" if self._options.kinds else ""
            print(f"{self._name}{kinds} --at {number}: {wrong}", flush=True)
        kind = "wrong" if wrong else outcome["error"] or "nothing came up"
        self._found[kind.split(":")[0]] += 1

    def _wrong(self, outcome: dict[str, Any]) -> str | None:
        """Return what is wrong with an outcome, or None."""
        if "wrong" in outcome:
            return str(outcome["wrong"])
        if outcome["again"] != self._calm["again"]:
            return f"another text has other logits, after {outcome['error']}"
        error = outcome["error"] or outcome["trouble"]
        if not error and outcome["logits"] != self._calm["logits"]:
            return "other logits without an error"
        return None


def life(path: Path, settings: dict[str, Any], failing: FailingNew | None) -> dict[str, Any]:
    """Use a model whose allocations may fail; return its error and logits."""
    from pyh2o.errors import PyH2OError

    llm, error, logits = None, None, b""
    try:
        with failing or contextlib.nullcontext():
            llm = loaded(path, settings)
            logits = used(llm)
    except (PyH2OError, MemoryError, RuntimeError, ValueError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    trouble = "" if llm is None else llm.text.archive_trouble
    if llm is None:
        llm = loaded(path, settings)
    elif error is not None:
        save_and_load(llm)
    llm.reset()
    again = used(llm)
    llm.close()
    digest = [hash(each) for each in (logits, again)]
    return {"error": error, "trouble": trouble, "logits": digest[0], "again": digest[1]}


def loaded(path: Path, settings: dict[str, Any]) -> Any:
    from tiny_llama import tiny_llama

    given = {name: value for name, value in settings.items() if name != "type"}
    kind = settings.get("type", 0)  # f32
    return tiny_llama(path, type_k=kind, type_v=kind, **given)


def used(llm: Any) -> bytes:
    """Do all operations with a text, and return its logits."""
    tokens = np.random.default_rng(5).integers(3, N_VOCAB, 200).tolist()
    llm.text.cache.pin(3)
    llm.share_fairly([20])
    llm.text.read(tokens[:60])
    llm.pin_spans([(40, 44)])
    for token in tokens[60:70]:
        llm.eval([token])
    llm.kv_rows(0)
    llm.heavy_hitters()
    llm.recalled()
    assert llm.kv.position == 70
    state = llm.kv_state()
    llm.eval(tokens[70:110])
    llm.load_kv_state(state, tokens[:70])
    llm.eval(tokens[110:130])
    llm.text.remove_tail(llm.n_tokens - 2)
    llm.text.cache.mark()
    marked = llm.n_tokens
    llm.eval(tokens[130:134])
    llm.text.remove_tail(marked)
    llm.text.read(tokens[130:190])
    pointer = llm._ctx.get_logits()
    return np.ctypeslib.as_array(pointer, (N_VOCAB,)).tobytes()


def save_and_load(llm: Any) -> None:
    """Load the state after an error; a half-changed text has none."""
    from pyh2o.errors import StateError

    try:
        state = llm.kv_state()
    except StateError:
        return
    llm.load_kv_state(state, llm.input_ids[: llm.n_tokens].copy())


if __name__ == "__main__":
    sys.exit(main())
