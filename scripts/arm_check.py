"""Compile for 64-bit ARM on another processor and run tests there, emulated: `make arm`.

Needs a network, and Debian or a derivative with g++-aarch64-linux-gnu and qemu-user. Python for ARM
comes from Debian, its packages from wheels. All files are in build/aarch64; nothing is installed.
Arguments are passed to pytest; by default the tests of the kernels run.
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
# Address space: the emulator's table of mapped addresses would otherwise take gigabytes.
ADDRESSES = ("-R", hex(2**36))
TOOLS = (COMPILER, EMULATOR, "apt-get", "dpkg-deb")

# apt adds their dependencies, down to the C library.
FROM_DEBIAN = ("python3", "libpython3-dev", "libstdc++6", "libgomp1")

# A script that starts Debian's Python, emulated; it is `sys.executable` there.
PYTHON = SYSTEM / "usr" / "bin" / "python-emulated"

# Packages that pyh2o, llama_cpp and the tests import, in the versions installed here.
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
    # CXX: some tests compile C++
    return emulated(*pytest, CXX=COMPILER, PYTHONPATH=str(PACKAGES)).returncode


def fetch_system() -> None:
    """Download and unpack Debian's Python for ARM, with a separate apt state for ARM."""
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
    """Write a script that runs Python in the emulator."""
    emulator = [str(shutil.which(EMULATOR)), *ADDRESSES, "-L", str(SYSTEM)]
    program = str(SYSTEM / "usr" / "bin" / "python3")
    PYTHON.write_text(
        f'#!/bin/sh\nexec {shlex.join(emulator)} -0 "$0" {shlex.quote(program)} "$@"\n'
    )
    PYTHON.chmod(0o755)


def fetch_packages() -> None:
    """Fetch wheels for that Python, and copy llama_cpp, which is pure Python."""
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
    """Build pyh2o for ARM; pip labels it as a package of this machine, which does no harm."""
    say("pyh2o, compiled for ARM")
    # Python's headers include headers for its processor, next to those of its C library
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
    """Run Python for ARM with these arguments."""
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
