"""Models of repositories on the Hugging Face hub, fetched with huggingface_hub.

huggingface_hub takes the endpoint and the token from HF_ENDPOINT, HF_TOKEN and HF_HOME. Its
`hf_hub_download` is not used: since version 1.18 it discards a partial file when a download is
interrupted.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ..errors import MissingPackageError, ModelError
from ..system.files import flush_to_disk, try_lock
from .folder import (
    HUB_PREFIX,
    Fetched,
    Progress,
    check_space,
    disk_message,
    models_folder,
    prepare_folder,
    sha256_of,
)
from .quantisations import HubFile, HubModel, choose, models_of

# The hub sends larger files with its own protocol only.
_MOST_BYTES = 50_000_000_000


@dataclass(frozen=True)
class Chosen:
    """A model of a repository, at the commit that was listed."""

    repository: str
    revision: str
    model: HubModel


def choose_on_hub(repository: str, wanted: str | None) -> Chosen:
    """Choose a model of a repository by quantisation or file name; see `choose`."""
    api = _huggingface_hub().HfApi()
    with _explained(repository):
        info = api.model_info(repository, files_metadata=True)
    files = [
        HubFile(each.rfilename, each.size or 0, each.lfs and each.lfs.sha256)
        for each in info.siblings or ()
    ]
    models = models_of(files)
    if not models:
        raise ModelError(
            f"{repository} has no GGUF file: look for a repository of the same model whose name "
            "ends with GGUF"
        )
    try:
        model = choose(models, wanted)
    except ModelError as error:
        raise ModelError(f"{repository}: {error}") from None
    for file in model.files:
        if file.sha256 is None:
            raise ModelError(
                f"the hub has no hash of {file.path} in {repository}, so a download cannot be "
                "checked: download it yourself and give its path with --model"
            )
        if file.bytes > _MOST_BYTES:
            raise ModelError(
                f"{file.path} is larger than the 50 GB that the hub sends over HTTP: choose "
                f"another quantisation, or run `hf download {repository} {file.path}` and give its "
                "path with --model"
            )
    return Chosen(repository, info.sha, model)


def fetch_chosen(chosen: Chosen, progress: Progress | None = None) -> Fetched:
    """Download a model into the models folder, or resume its download.

    Files get their names only after all of them are complete and their hashes match.

    Returns:
        The first of its files.
    """
    folder = models_folder()
    names = [file.name for file in chosen.model.files]
    try:
        prepare_folder(folder)
        missing = [file for file in chosen.model.files if not _is_present(folder / file.name, file)]
        with ExitStack() as stack:
            partials = [stack.enter_context(Partial(folder, file)) for file in missing]
            check_space(folder, sum(each.file.bytes - each.tell() for each in partials))
            _download(chosen, partials, progress)
            for partial in partials:
                partial.check()
            for partial in reversed(partials):  # the first part makes the model visible
                partial.path.replace(folder / partial.file.name)
    except OSError as error:
        raise ModelError(disk_message(folder, error)) from None
    return Fetched(folder / names[0], new=bool(missing))


def _is_present(path: Path, file: HubFile) -> bool:
    """Return whether a file was fetched before; a different file of its name is an error."""
    if not path.exists():
        return False
    same_size = path.is_file() and path.stat().st_size == file.bytes
    if not (same_size and sha256_of(path) == file.sha256):
        raise ModelError(f"{path} exists and is a different file: move or remove it")
    return True


def _download(chosen: Chosen, partials: list[Partial], progress: Progress | None) -> None:
    hub = _huggingface_hub()
    headers = hub.utils.build_hf_headers(library_name="pyh2o")
    headers["Accept-Encoding"] = "identity"  # byte ranges are those of the uncompressed file
    total = sum(partial.file.bytes for partial in partials)

    def report() -> None:
        if progress is not None:
            progress(sum(partial.tell() for partial in partials), total)

    for partial in partials:
        partial.on_write = report
        url = hub.hf_hub_url(chosen.repository, partial.file.path, revision=chosen.revision)
        with _explained(chosen.repository):
            hub.file_download.http_get(
                url,
                partial,
                resume_size=partial.tell(),
                headers=headers,
                expected_size=partial.file.bytes,
            )


class Partial(io.BufferedWriter):
    """A partial download, locked against other programs. An empty one is removed at the end."""

    def __init__(self, folder: Path, file: HubFile) -> None:
        self.path = folder / f"{HUB_PREFIX}{file.sha256}.part"
        self.file = file
        self.on_write: Callable[[], None] = lambda: None
        super().__init__(io.FileIO(self.path, "a"))
        if not try_lock(cast(IO[bytes], self)):
            self.close()
            raise ModelError(
                f"another program is fetching {file.name}: wait until it is done, or end it"
            )
        if self.tell() > file.bytes:
            self.seek(0)
            self.truncate()

    def write(self, data: Any) -> int:
        n_bytes = super().write(data)
        self.on_write()
        return n_bytes

    def check(self) -> None:
        """Flush to the disk and compare the hash."""
        flush_to_disk(self)
        if sha256_of(self.path) != self.file.sha256:
            self.path.unlink()
            raise ModelError(
                f"the downloaded {self.file.name} does not match the hub's hash and was removed: "
                "fetch it again"
            )

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # the file was renamed, or the disk is full
            self.flush()
            if self.path.stat().st_size == 0:
                self.path.unlink()
        self.close()


# -------------------------------------------------------------------------------------------------
# huggingface_hub and its exceptions
# -------------------------------------------------------------------------------------------------


def _huggingface_hub() -> Any:
    """Return the package, with its progress bars and warnings turned off."""
    try:
        import huggingface_hub
        import huggingface_hub.file_download
        import huggingface_hub.utils
    except ImportError as error:
        raise MissingPackageError("a model of a repository", "huggingface_hub", "hub") from error
    package: Any = huggingface_hub
    package.utils.disable_progress_bars()
    package.utils.logging.set_verbosity_error()
    return package


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Convert the exceptions of huggingface_hub to one line with the cure; pass disk errors on."""
    from huggingface_hub import constants, errors

    cures: dict[type[Exception], str] = {
        errors.GatedRepoError: f"{repository} is gated: agree to its terms at "
        f"{constants.ENDPOINT}/{repository}, then set HF_TOKEN to a token of yours",
        errors.RepositoryNotFoundError: f"there is no repository {repository}, or it is private: "
        "check the name, or set HF_TOKEN to a token that may read it",
        errors.HFValidationError: f"{repository} is not a valid repository name: give owner/name "
        "as the hub shows it, or the path of a local file with --model",
        errors.OfflineModeIsEnabled: "HF_HUB_OFFLINE turns off network access: unset it to fetch "
        "a model",
    }
    # the base class of exceptions of the HTTP package that this version uses
    http_errors: Any = errors.HfHubHTTPError.__bases__
    try:
        yield
    except tuple(cures) as error:
        cure = next(cure for kind, cure in cures.items() if isinstance(error, kind))
        raise ModelError(cure) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        raise ModelError(
            f"the hub does not send {repository} (HTTP {status}): try again later, or set HF_TOKEN "
            "to a token that may read it"
        ) from None
    except (*http_errors, OSError, ImportError) as error:  # a proxy may need another package
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(
            f"{constants.ENDPOINT} cannot be reached, or the connection broke: check the network, "
            f"then run the same command again to resume ({reason})"
        ) from None
    except (ValueError, KeyError, TypeError):
        # huggingface_hub does not check the answer of a login page or of another server.
        raise ModelError(
            f"{constants.ENDPOINT} does not answer like the hub: check HF_ENDPOINT and HF_TOKEN, "
            "and whether this network requires a login"
        ) from None
