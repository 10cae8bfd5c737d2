"""Load models with damaged headers, and check the outcome.

    python tests/faults/gguf_headers.py --files 1000

Values, types, keys, tensors, counts and bytes are changed in the headers of tiny models of several
architectures. Each file must be refused with one line, by us or by llama.cpp, or give a model that
reads a text and restores its state. A file that ends the process is loaded again with llama_cpp's
own class and the full cache: a process that only pyh2o ends is a bug of pyh2o.

Files are loaded one after the other in a fork, until one of them ends it. Each bug is printed with
the option that repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forks import Fork, allow_seconds

if TYPE_CHECKING:
    from gguf_image import Image

HELPERS = Path(__file__).parents[1] / "helpers"
# Arguments of write_tiny_gguf.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama of q8_0": {"dtype": 8},
    "llama with bpe": {"bpe": True, "chat_template": "{{ messages }}"},
    **{
        name: {"arch_variant": name, "n_layer": 4}
        for name in (
            *("yarn", "longrope", "neox", "learned_positions", "recurrent", "alibi", "mla"),
            *("sliding_window", "gemma2", "gemma3n", "gpt_oss", "llama4", "qwen35moe", "lfm2"),
            *("jamba", "falcon-h1", "qwen2vl", "encoder", "plm"),
        )
    },
}
SIZES = {"n_layer": 2, "n_head": 2, "n_head_kv": 1, "n_ff": 32, "n_vocab": 288, "n_ctx_train": 256}
CACHE = {"n_ctx": 64, "n_batch": 16, "n_ubatch": 16, "n_threads": 1, "n_threads_batch": 1}
FILES_OF_A_FORK = 200
ADDRESS_SPACE = 4 << 30
SECONDS = 2
"""Maximum processor time of a file."""
TEXT = b"Once upon a time, in a town by the sea, there lived a clockmaker."
# Error messages of a process that ended.
_LAST_WORDS = re.compile(r"(?:GGML_ASSERT|GGML_ABORT|fatal error|what\(\):|terminate called).*")
_PLACE = re.compile(r"([\w-]+\.(?:cpp|c|h)):(\d+): (.*)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials; return 1 if any of them found something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--files", type=int, default=1000, help="number of files (default 1000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--repeat", help="one file: SEED:NUMBER, as printed")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="pyh2o-headers-") as name:
        return try_all(options, Path(name))


def try_all(options: argparse.Namespace, work: Path) -> int:
    """Run the trials; return 1 if any of them found something."""
    os.environ |= {"PYH2O_CONFIG": os.devnull, "PYH2O_GPU_LAYERS": "0", "GGML_NO_BACKTRACE": "1"}
    sys.path.insert(0, str(HELPERS))
    # imported before the first fork
    import gguf_mutations  # noqa: F401
    import pyh2o.models.damage  # noqa: F401

    images = tiny_images(work)
    if options.repeat:
        seed, number = map(int, options.repeat.split(":"))
        return repeat(images, seed, number, work)
    seed = options.seed if options.seed is not None else random.randrange(2**32)
    results: Counter[str] = Counter()
    ends: dict[str, list[int]] = {}
    started = time.monotonic()
    n_done = 0
    while n_done < options.files and time.monotonic() - started < options.seconds:
        numbers = range(n_done, min(n_done + FILES_OF_A_FORK, options.files))
        for number, result in results_of_fork(images, seed, numbers, work):
            n_done = number + 1
            kind, text = result["kind"], result["text"]
            results[kind] += 1
            if kind in ("ours", "wrong"):
                print(f"--repeat {seed}:{number}: {text}", flush=True)
            elif kind == "both":
                ends.setdefault(text, []).append(number)
    counts = ", ".join(f"{n} {NAMES[kind]}" for kind, n in results.most_common())
    seconds = time.monotonic() - started
    print(f"{n_done} files: {counts}; {seconds:.0f} s, seed {seed}")
    for text, found in sorted(ends.items(), key=lambda each: -len(each[1])):
        print(f"  llama.cpp, {len(found)} times: {text} (--repeat {seed}:{found[0]})")
    return results["ours"] + results["wrong"] > 0


NAMES = {
    "refused": "refused by us",
    "llama.cpp": "refused by llama.cpp",
    "loaded": "loaded",
    "nan": "with attention or logits that are not finite",
    "both": "that end the process also with llama_cpp's class",
    "ours": "that end it only with ours",
    "wrong": "wrong",
}
"""Descriptions of the outcomes."""


def tiny_images(work: Path) -> list[Image]:
    """Return a model of each kind."""
    from gguf import GGMLQuantizationType

    from gguf_image import read_image
    from tiny_gguf import write_tiny_gguf

    images = []
    for i, kind in enumerate(KINDS.values()):
        given = {**SIZES, **kind}
        given["dtype"] = GGMLQuantizationType(given.get("dtype", 0))
        images.append(read_image(write_tiny_gguf(work / "tiny.gguf", seed=i, **given)))
    return images


def damaged(images: Sequence[Image], seed: int, number: int) -> tuple[bytes, str]:
    """Return the file with this number, and its mutations."""
    from gguf_mutations import mutated

    rng = random.Random(f"{seed} {number}")
    i = rng.randrange(len(images))
    content, names = mutated(images[i], rng)
    return content, f"{list(KINDS)[i]}: {names}"


# -------------------------------------------------------------------------------------------------
# Processes
# -------------------------------------------------------------------------------------------------


def results_of_fork(
    images: Sequence[Image], seed: int, numbers: range, work: Path
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the outcome of each file in one fork, until a file ends the fork."""
    fork = Fork()
    if fork.is_here:
        in_quiet_process(work / "log", lambda: try_files(images, seed, numbers, work, fork))
    number = numbers.start
    for result in fork.answers():
        yield number, result
        number += 1
    fork.end()
    if number < numbers.stop:
        yield number, judged(images, seed, number, work)


def try_files(images: Sequence[Image], seed: int, numbers: range, work: Path, fork: Fork) -> None:
    """Load the files one after the other, and send each outcome."""
    for number in numbers:
        path = write_anew(work / "damaged.gguf", damaged(images, seed, number)[0])
        fork.send(outcome(lambda path=path: use_ours(path)))  # type: ignore[misc]


def judged(images: Sequence[Image], seed: int, number: int, work: Path) -> dict[str, str]:
    """Return how a file ended the process: alone or after others, with our class or both."""
    content, what = damaged(images, seed, number)
    path = write_anew(work / "damaged.gguf", content)
    ours = alone(lambda: use_ours(path, verbose=True), work)
    stock = alone(lambda: use_stock(path), work)
    if ours is None:
        return {"kind": "ours", "text": f"{what}: it ended the process only after other files"}
    if stock is None:
        return {"kind": "ours", "text": f"{what}: {ours}"}
    return {"kind": "both", "text": stock}


def repeat(images: Sequence[Image], seed: int, number: int, work: Path) -> int:
    """Load one file with both classes, and print the logs."""
    content, what = damaged(images, seed, number)
    path = write_anew(work / "damaged.gguf", content)
    print(what)
    for name, use in (("ours", use_ours), ("llama_cpp's", use_stock)):
        ended = alone(lambda use=use: print(outcome(lambda: use(path))), work)  # type: ignore[misc]
        print((work / "log").read_text(errors="replace"))
        print(f"{name}: {ended or 'no crash'}")
    return 0


def alone(work: Callable[[], object], folder: Path) -> str | None:
    """Run a function in a fork; return how it crashed, or None."""
    fork = Fork()
    if fork.is_here:
        in_quiet_process(folder / "log", lambda: (allow_seconds(SECONDS), work()))
    ended = fork.end()
    if ended is None:
        return None
    log = (folder / "log").read_text(errors="replace")
    if place := _PLACE.findall(log):
        file, _, message = place[-1]
        return f"{file}: {message}"
    if words := _LAST_WORDS.findall(log):
        return str(words[-1])
    return ended


def in_quiet_process(log: Path, work: Callable[[], object]) -> None:
    """Run a function with limits and output to a file, and end the process."""
    try:
        to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for standard in (1, 2):
            os.dup2(to, standard)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(0)


def write_anew(path: Path, content: bytes) -> Path:
    """Write a new file: models that were never closed still map the old one."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    return path


# -------------------------------------------------------------------------------------------------
# Models
# -------------------------------------------------------------------------------------------------


def outcome(use: Callable[[], bool]) -> dict[str, str]:
    """Return the outcome of a file: its `kind`, and the `text` of the exception."""
    from pyh2o.core.failures import NO_NUMBERS
    from pyh2o.errors import PyH2OError

    allow_seconds(SECONDS)
    try:
        return {"kind": "loaded" if use() else "nan", "text": ""}
    except (PyH2OError, RuntimeError) as error:
        text = str(error)
        if text.startswith(NO_NUMBERS):  # raised by a compaction
            return {"kind": "nan", "text": text}
        if "\n" in text or not isinstance(error, PyH2OError):
            return {"kind": "wrong", "text": f"{type(error).__name__}: {text!r}"}
        return {"kind": "llama.cpp" if "llama.cpp cannot" in text else "refused", "text": text}
    except BaseException as error:
        return {"kind": "wrong", "text": f"{type(error).__name__}: {error}"}


def use_ours(path: Path, *, verbose: bool = False) -> bool:
    """Read a text, compact, restore the state and continue; return whether logits are finite."""
    from pyh2o import Llama

    cache = {"hh": 8, "recent": 8, "slack": 8, **CACHE}
    try:
        llm = Llama(str(path), verbose=verbose, **cache)
    except ValueError as error:
        if "evict" not in str(error):
            raise
        llm = Llama(str(path), verbose=verbose, evict=False, **CACHE)
    with llm:
        tokens = some_tokens(llm)
        if not llm._ctx.memory:  # encoders do not continue texts
            return True
        llm.eval(tokens)
        finite = finite_logits(llm)
        if llm.evicting:
            llm.load_kv_state(llm.kv_state(), tokens)
        else:
            llm.load_state(llm.save_state())
        llm.eval(tokens[:3])
        return finite and finite_logits(llm)


def use_stock(path: Path) -> bool:
    """Do the same with llama_cpp's class and its full cache."""
    import llama_cpp

    llm = llama_cpp.Llama(str(path), verbose=True, **CACHE)
    tokens = some_tokens(llm)
    if not llm._ctx.memory:
        return True
    llm.eval(tokens)
    finite = finite_logits(llm)
    llm.load_state(llm.save_state())
    llm.eval(tokens[:3])
    return finite and finite_logits(llm)


def some_tokens(llm: Any) -> list[int]:
    """Return enough tokens for a compaction."""
    tokens = llm.tokenize(TEXT) or [0]
    llm.detokenize(tokens[:20])
    n_vocab = llm.n_vocab()
    return [token % n_vocab for token in (tokens * 40)[:40]]


def finite_logits(llm: Any) -> bool:
    """Return whether the logits of the last token are finite."""
    logits = np.ctypeslib.as_array(llm._ctx.get_logits(), (llm.n_vocab(),))
    return bool(np.isfinite(logits).all())


if __name__ == "__main__":
    sys.exit(main())
