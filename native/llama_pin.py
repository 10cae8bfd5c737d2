"""The pinned llama-cpp-python source distribution: its identity and its download."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PIN_FILE = Path(__file__).with_name("llama-cpp.toml")


class BuildError(Exception):
    """A build step failed. The message is one line with the cause and the remedy."""


@dataclass(frozen=True)
class Pin:
    """One exact llama-cpp-python source distribution and what it contains."""

    version: str
    sha256: str
    llama_cpp_commit: str
    ggml_version: str

    @property
    def sdist_name(self) -> str:
        return f"llama_cpp_python-{self.version}.tar.gz"


def read_pin(path: Path = PIN_FILE) -> Pin:
    """Read the pin. Raise BuildError if the file is not a complete pin."""
    try:
        return Pin(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise BuildError(f"{path} is not a usable pin ({error}); restore it from git") from error


def cached_sdist(pin: Pin) -> Path:
    """Return the pinned source distribution in the user's cache; download it if necessary.

    Its hash is checked on every call. Raises BuildError if the download fails.
    """
    cache = Path(platformdirs.user_cache_dir("pyh2o", appauthor=False))
    path = cache / pin.sdist_name
    if path.is_file() and sha256_of(path) == pin.sha256:
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            downloaded = download_sdist(pin.version, Path(folder), pin.sha256)
            if sha256_of(downloaded) != pin.sha256:
                raise BuildError(_wrong_hash(pin))
            os.replace(downloaded, path)
    except OSError as error:
        raise BuildError(
            f"cannot keep {pin.sdist_name} in {cache} ({error}); make that folder writable "
            "or set XDG_CACHE_HOME to one that is"
        ) from error
    except DownloadError as error:
        if error.hash_mismatch:
            raise BuildError(_wrong_hash(pin)) from error
        raise BuildError(
            f"cannot download llama-cpp-python {pin.version} ({error}); check the network, "
            f"set PIP_INDEX_URL to a mirror, or put {pin.sdist_name} into {cache}"
        ) from error
    return path


class DownloadError(Exception):
    """pip could not download a source distribution. The message is pip's own, on one line."""

    def __init__(self, pip_output: str) -> None:
        self.hash_mismatch = "DO NOT MATCH THE HASHES" in pip_output
        lines = pip_output.splitlines() or ["pip gave no reason"]
        errors = [line for line in lines if line.startswith("ERROR: ")] or lines
        reason = errors[-1].removeprefix("ERROR: ").strip()
        # pip reports a dead network as "no matching distribution"
        super().__init__("no connection" if "connection broken" in pip_output else reason)


def download_sdist(version: str, folder: Path, sha256: str | None = None) -> Path:
    """Download this version of llama-cpp-python with pip, so that the user's index settings apply.

    Raises DownloadError if pip fails or the file does not have the hash `sha256`.
    """
    requirement = f"llama-cpp-python=={version}"
    if sha256:
        requirement += f" --hash=sha256:{sha256}"
    requirements = folder / "requirements.txt"
    requirements.write_text(requirement + "\n", encoding="utf-8")

    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", "llama-cpp-python"]
    command += ["--requirement", str(requirements), "--dest", str(folder)]
    # Under pip this build inherits its build tracker, which would report our pip as a cycle.
    environment = {name: value for name, value in os.environ.items() if name != "PIP_BUILD_TRACKER"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise DownloadError((result.stdout + result.stderr).strip())
    return next(folder.glob("llama_cpp_python-*.tar.gz"))


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _wrong_hash(pin: Pin) -> str:
    return (
        f"the {pin.sdist_name} that pip found does not have the sha256 of native/llama-cpp.toml; "
        "set PIP_INDEX_URL to an index that carries the published file"
    )
