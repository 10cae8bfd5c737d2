"""Compile for 64-bit ARM on another processor and run tests there, emulated: `make arm`.

Needs Debian (or what is made from it) with g++-aarch64-linux-gnu and qemu-user, and a network. The
Python for ARM comes from Debian, its packages from wheels. All that is written is in build/aarch64,
and nothing is installed. Arguments are those of pytest; without any, the tests of the kernels.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

from steps import ROOT, run, say

FOLDER = ROOT / "build" / "aarch64"
SYSTEM = FOLDER / "root"
PACKAGES = FOLDER / "packages"
TOOLCHAIN = ROOT / "native" / "aarch64-linux-gnu.cmake"

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
# It keeps a table of all addresses that were ever mapped: without an end they would take gigabytes.
ADDRESSES = ("-R", hex(2**36))
TOOLS = (COMPILER, EMULATOR, "apt-get", "dpkg-deb")

# With all that they need, down to the C library.
FROM_DEBIAN = ("python3", "libpython3-dev", "libstdc++6", "libgomp1")

# Beside Debian's Python, and starts it: what asks for `sys.executable` gets this one, emulated too.
PYTHON = SYSTEM / "usr" / "bin" / "python-emulated"

# What pyh2o, llama_cpp and the tests import, in the versions that are installed here.
FROM_WHEELS = (
    *("cffi", "diskcache", "gguf", "jinja2", "numpy", "platformdirs", "portalocker"),
    *("prompt-toolkit", "psutil", "pytest", "rich", "typer", "typing-extensions"),
)
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64")

TESTS = ("tests/native/test_kernels.py", "tests/native/test_native_recall.py")


def main() -> int:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        sys.exit(
            f"{', '.join(missing)} not found: on Debian, apt install g++-aarch64-linux-gnu "
            "qemu-user; elsewhere run the tests on a machine with an ARM processor"
        )
    try:
        if not SYSTEM.exists():
            fetch_system()
        write_python()
        fetch_packages()
        build()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]} failed, see above")
    say("tests, emulated")
    pytest = ("-P", "-m", "pytest", "-p", "no:cacheprovider", *(sys.argv[1:] or TESTS))
    # the compiler is for what tests compile themselves
    return emulated(*pytest, CXX=COMPILER, PYTHONPATH=str(PACKAGES)).returncode


def fetch_system() -> None:
    """Debian's Python for ARM, from where this machine gets its packages, without installing it.

    apt has a state of its own here: in that one nothing is installed, and ARM is the machine.
    """
    say("Debian's Python for ARM")
    state = FOLDER / "apt"
    for folder in ("lists/partial", "archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
    }
    apt = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in settings.items())]
    run([*apt, "update"])
    run([*apt, "install", "--yes", "--no-install-recommends", "--download-only", *FROM_DEBIAN])

    unfinished = FOLDER / "root.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    for package in sorted((state / "archives").glob("*.deb")):
        run(["dpkg-deb", "--extract", str(package), str(unfinished)])
    unfinished.rename(SYSTEM)


def write_python() -> None:
    """The kernel runs no program of another processor, but it runs a script, which does."""
    emulator = [str(shutil.which(EMULATOR)), *ADDRESSES, "-L", str(SYSTEM)]
    program = str(SYSTEM / "usr" / "bin" / "python3")
    PYTHON.write_text(
        f'#!/bin/sh\nexec {shlex.join(emulator)} -0 "$0" {shlex.quote(program)} "$@"\n'
    )
    PYTHON.chmod(0o755)


def fetch_packages() -> None:
    """Wheels for that Python, and llama_cpp from here, which is Python alone."""
    say("packages for it")
    version = emulated("-c", "import sys; print('%d.%d' % sys.version_info[:2])", capture=True)
    run(
        [
            *pip_install("--only-binary", ":all:"),
            *(text for each in PLATFORMS for text in ("--platform", each)),
            *("--python-version", version.stdout.strip()),
            *(f"{name}=={metadata.version(name)}" for name in FROM_WHEELS),
        ]
    )
    found = util.find_spec("llama_cpp")
    assert found is not None
    assert found.origin is not None
    shutil.copytree(Path(found.origin).parent, PACKAGES / "llama_cpp", dirs_exist_ok=True)


def build() -> None:
    """pyh2o itself. pip takes it for a package of this machine, which does no harm here."""
    say("pyh2o, compiled for ARM")
    # Python's headers ask for those of its processor, which lie beside the headers of its C library
    headers = {"CFLAGS": f"-idirafter {SYSTEM / 'usr' / 'include'}"}
    settings = (f"build-dir={FOLDER / 'objects'}", f"cmake.define.CMAKE_TOOLCHAIN_FILE={TOOLCHAIN}")
    run(
        [
            *pip_install("--no-deps", str(ROOT)),
            *(text for each in settings for text in ("--config-settings", each)),
        ],
        headers,
    )


def pip_install(*arguments: str) -> list[str]:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    return [*pip, "--upgrade", "--target", str(PACKAGES), *arguments]


def emulated(
    *arguments: str, capture: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Python for ARM with these arguments."""
    return subprocess.run(
        [str(PYTHON), *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        check=capture,
        capture_output=capture,
        text=True,
    )


if __name__ == "__main__":
    sys.exit(main())
