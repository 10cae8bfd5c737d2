"""Fails every allocation of our C++ once, and looks at what becomes of it.

    python tests/faults/allocations.py

A model with a tiny cache is loaded, reads, compacts, archives, recalls, is saved and loaded again.
Where an allocation fails an error has to come up. Then, and where none does, the model must be
usable: the text is begun anew, and the logits are those of a model for which nothing failed.

Which allocations are ours is known from the call stack: the function is one of ours, or one of
llama.cpp's or the standard library's that ours has called; ggml's own are not looked at.
So it needs the library with its symbols, which is in the build folder.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from faulty_process import in_front_of_libraries

SOURCE = Path(__file__).with_name("failing_new.cpp")
CHECKOUT = Path(__file__).parents[2]
LIBRARY = "libllama.so"
N_VOCAB = 384
CACHE = {"hh": 14, "recent": 9, "slack": 7, "n_ctx": 128, "n_batch": 16, "recall": 8}
PATIENCE = 60


def main() -> int:
    """Run the trials; 1 if any of them found something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--every", type=int, default=1, help="only each so many-th allocation")
    parser.add_argument("--kinds", action="store_true", help="count one of each call stack only")
    parser.add_argument("--at", type=int, help="only this one, as it was told")
    options = parser.parse_args()
    in_front_of_libraries(SOURCE)
    with tempfile.TemporaryDirectory(prefix="pyh2o-allocations-") as name:
        return try_all(options, Path(name))


def try_all(options: argparse.Namespace, work: Path) -> int:
    """The trials of each kind of cache."""
    os.environ |= {"PYH2O_THREADS": "1", "PYH2O_CONFIG": os.devnull, "PYH2O_GPU_LAYERS": "0"}
    sys.path.insert(0, str(CHECKOUT / "tests" / "helpers"))
    import pyh2o  # noqa: F401
    from tiny_gguf import write_tiny_gguf

    watch(our_functions())
    n_wrong = 0
    for name, shape, settings in (
        ("far", {}, {"policy": "h2o-far"}),
        ("snap, q8_0, no recall", {"head_size": 64}, {"policy": "snap", "type": 8, "recall": 0}),
        ("windows", {"arch_variant": "gemma2", "n_layer": 4}, {"policy": "tova"}),
        ("recurrent", {"arch_variant": "lfm2", "n_layer": 4}, {"policy": "h2o", "recall": 0}),
        ("exact prefill", {}, {"policy": "expected", "prefill": "exact", "recall": 0}),
        ("archive in a file", {}, {"policy": "h2o-far", "recall_archive": str(work / "archive")}),
    ):
        path = write_tiny_gguf(work / "tiny.gguf", seed=11, n_ctx_train=96, **shape)
        n_wrong += try_kind(name, path, {**CACHE, **settings}, options)
    return n_wrong > 0


def try_kind(name: str, path: Path, settings: dict[str, Any], options: argparse.Namespace) -> int:
    """The trials of one kind of cache; returns how many found something."""
    kinds = options.kinds
    calm = in_fork(lambda: life(path, settings, kinds, at=2**40))
    assert calm.get("error", "") is None, calm
    found: Counter[str] = Counter()
    started = time.monotonic()
    numbers = range(0, calm["n"], options.every) if options.at is None else [options.at]
    for at in numbers:
        result = in_fork(lambda at=at: life(path, settings, kinds, at=at))  # type: ignore[misc]
        wrong = result.get("wrong")
        if not wrong and result["again"] != calm["again"]:
            wrong = f"another text has other logits, after {result['error']}"
        elif not wrong and result["error"] is None and result["logits"] != calm["logits"]:
            wrong = result["trouble"] == "" and "other logits, and nothing was said"
        if wrong:
            print(f"{name}{' --kinds' if kinds else ''} --at {at}: {wrong}", flush=True)
        kind = "wrong" if wrong else result["error"] or "nothing came up"
        found[kind.split(":")[0]] += 1
    counts = ", ".join(f"{n} {kind}" for kind, n in found.most_common())
    seconds = time.monotonic() - started
    print(
        f"{name}: {len(numbers)} of {calm['n']} allocations: {counts}; {seconds:.0f} s", flush=True
    )
    return found["wrong"]


def life(path: Path, settings: dict[str, Any], kinds: bool, at: int) -> dict[str, Any]:
    """Of a model whose allocation of this number fails: what came up, and its logits."""
    from pyh2o.errors import PyH2OError

    shim = ctypes.CDLL(None)
    shim.failing_disarm.restype = ctypes.c_long
    llm, error, logits = None, None, b""
    shim.failing_arm(ctypes.c_long(at), ctypes.c_int(kinds))
    try:
        llm = loaded(path, settings)
        logits = used(llm)
    except (PyH2OError, MemoryError, RuntimeError, ValueError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    n = shim.failing_disarm()
    trouble = "" if llm is None else llm.archive_trouble
    if llm is None:
        llm = loaded(path, settings)
    llm.reset()
    again = used(llm)
    llm.close()
    digest = [hash(each) for each in (logits, again)]
    return {"n": n, "error": error, "trouble": trouble, "logits": digest[0], "again": digest[1]}


def loaded(path: Path, settings: dict[str, Any]) -> Any:
    from tiny_llama import tiny_llama

    given = dict(settings)
    kind = given.pop("type", 0)  # f32
    return tiny_llama(path, type_k=kind, type_v=kind, **given)


def used(llm: Any) -> bytes:
    """The logits of a text, in whose course all is done that a text can have done to it."""
    tokens = np.random.default_rng(5).integers(3, N_VOCAB, 200).tolist()
    llm.pin(3)
    llm.read(tokens[:60])
    llm.pin_spans([(40, 44)])
    for token in tokens[60:70]:
        llm.eval([token])
    llm.kv_rows(0)
    llm.heavy_hitters()
    if llm.recalls:
        llm.recall()
    state = llm.kv_state()
    llm.eval(tokens[70:110])
    llm.load_kv_state(state, tokens[:70])
    llm.eval(tokens[110:130])
    llm.remove_tail(llm.n_tokens - 2)
    llm.read(tokens[130:190])
    pointer = llm._ctx.get_logits()
    return np.ctypeslib.as_array(pointer, (N_VOCAB,)).tobytes()


def in_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` returns in a fork; a crash or a hang is told as `wrong`."""
    get, give = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(get)
            answer = json.dumps(work())
        except BaseException as error:
            answer = json.dumps({"wrong": f"{type(error).__name__}: {error}"})
        os.write(give, answer.encode())
        os._exit(0)
    os.close(give)
    deadline = time.monotonic() + PATIENCE
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
        time.sleep(0.001)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(get) as file:
        answer = file.read()
    if status != 0 or not answer:
        return {"wrong": f"it ended by {os.waitstatus_to_exitcode(status)}"}
    result: dict[str, Any] = json.loads(answer)
    return result


def mapped(name: str) -> list[tuple[Path, int, int]]:
    """Files of this name that are in memory: each with the begin and the end of where it is."""
    found: dict[Path, tuple[int, int]] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split()[-1])
        if path.name.startswith(name):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            first, last = found.get(path, (begin, end))
            found[path] = (min(first, begin), max(last, end))
    return [(path, begin, end) for path, (begin, end) in found.items()]


def our_functions() -> Iterator[tuple[int, int]]:
    """Begin and end of each of our functions in the library that is loaded."""
    import llama_cpp  # noqa: F401

    [(installed, base, _)] = mapped(LIBRARY)
    found = [each for each in CHECKOUT.glob(f"build/*/bin/{LIBRARY}") if same(each, installed)]
    if not found:
        sys.exit(f"no build of {installed} with symbols: run `make .venv/tested`")
    names = subprocess.run(
        ["nm", "--print-size", "--defined-only", str(found[0])],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for line in names.splitlines():
        match = re.match(r"([0-9a-f]+) ([0-9a-f]+) [tTwWuV] (.*h2o.*)", line)
        if match:
            begin = base + int(match[1], 16)
            yield begin, begin + int(match[2], 16)


def same(one: Path, other: Path) -> bool:
    """Whether two libraries were made by the same build."""
    return build_id(one) == build_id(other)


def build_id(path: Path) -> str:
    notes = subprocess.run(["readelf", "-n", str(path)], capture_output=True, text=True, check=True)
    found = re.search(r"Build ID: (\w+)", notes.stdout)
    return found[1] if found else str(path)


def watch(functions: Iterator[tuple[int, int]]) -> None:
    """Tell the library whose allocations are ours; what ggml allocates for us is its own."""
    ours = sorted(functions)
    theirs = sorted((begin, end) for _, begin, end in mapped("libggml"))
    ranges = np.array(ours + theirs, dtype=np.uintp)
    ctypes.CDLL(None).failing_watch(
        ranges.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_long(len(ours)),
        ctypes.c_long(len(theirs)),
    )


if __name__ == "__main__":
    sys.exit(main())
