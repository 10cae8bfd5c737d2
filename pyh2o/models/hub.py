"""Models of repositories on the Hugging Face hub, fetched with huggingface_hub.

Where the hub is and who asks is what huggingface_hub takes from HF_ENDPOINT, HF_TOKEN and HF_HOME.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ..errors import MissingPackageError, ModelError
from ..system.files import flush_to_disk, remove_unlocked, try_lock
from .folder import Fetched, Progress, check_space, disk_message, models_folder, sha256_of
from .quantisations import HubFile, HubModel, choose, models_of

# The hub sends larger files in its own protocol only.
_MOST_BYTES = 50_000_000_000
# Files on their way.
_PREFIX, _SUFFIX = ".hub-", ".part"
_KEPT_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True)
class Chosen:
    """A model of a repository.

    Attributes:
        repository: owner/name.
        revision: the commit that was looked at.
        model: its files.
    """

    repository: str
    revision: str
    model: HubModel


def choose_on_hub(repository: str, wanted: str | None) -> Chosen:
    """Look what a repository has, and choose a model.

    Args:
        repository: owner/name.
        wanted: a quantisation or a file's name; None for Q4_K_M, or the only model.

    Raises:
        ModelError: no such repository or model, an unclear choice, or no answer.
        MissingPackageError: huggingface_hub is not installed.
    """
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
        _check_file(repository, file)
    return Chosen(repository, info.sha, model)


def fetch_chosen(chosen: Chosen, progress: Progress | None = None) -> Fetched:
    """Put a model into the models folder.

    A file gets its name only when all of the model is there and its hashes are right. What has
    arrived of a fetch that is broken off stays, and the next one goes on there.

    Args:
        chosen: which.
        progress: is told of the bytes that have arrived.

    Returns:
        The first of its files.

    Raises:
        ModelError: no network, a repository that has to be agreed to, a full disk, or a file that
            is not the expected one.
    """
    folder = models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_unlocked(folder.glob(f"{_PREFIX}*{_SUFFIX}"), older_than=_KEPT_SECONDS)
        targets = {file: folder / file.name for file in chosen.model.files}
        files = {file: path for file, path in targets.items() if not _is_there(path, file)}
        with ExitStack() as stack:
            partials = [stack.enter_context(Partial(folder, file)) for file in files]
            check_space(folder, sum(each.file.bytes - each.tell() for each in partials))
            _download(chosen, partials, progress)
            for partial in partials:
                partial.check()
            for partial in reversed(partials):  # the first part gives the model its name
                partial.path.replace(files[partial.file])
    except OSError as error:
        raise ModelError(disk_message(folder, error)) from None
    return Fetched(next(iter(targets.values())), new=bool(files))


def _check_file(repository: str, file: HubFile) -> None:
    """Refuse a file that cannot be fetched, or not be checked.

    Raises:
        ModelError: the reason.
    """
    if file.sha256 is None:
        raise ModelError(
            f"the hub says no hash of {file.path} in {repository}, so it could not be checked: "
            "fetch it yourself and give its path with --model"
        )
    if file.bytes > _MOST_BYTES:
        raise ModelError(
            f"{file.path} is larger than the 50 GB that the hub sends over HTTP: choose another, "
            f"or run `hf download {repository} {file.path}` and give its path with --model"
        )


def _is_there(path: Path, file: HubFile) -> bool:
    """Whether a file is there already.

    Raises:
        ModelError: another one has its name.
    """
    if not path.exists():
        return False
    same_size = path.is_file() and path.stat().st_size == file.bytes
    if not (same_size and sha256_of(path) == file.sha256):
        raise ModelError(f"{path} is there and is another file: move or remove it")
    return True


def _download(chosen: Chosen, partials: list[Partial], progress: Progress | None) -> None:
    """Let huggingface_hub write what is missing of the files.

    Raises:
        ModelError: it cannot.
        OSError: the disk's.
    """
    hub = _huggingface_hub()
    headers = hub.utils.build_hf_headers(library_name="pyh2o")
    headers["Accept-Encoding"] = "identity"  # what is gone on with are the file's own bytes
    total = sum(partial.file.bytes for partial in partials)

    def tell() -> None:
        if progress is not None:
            progress(sum(partial.tell() for partial in partials), total)

    for partial in partials:
        partial.on_write = tell
        url = hub.hf_hub_url(chosen.repository, partial.file.path, revision=chosen.revision)
        with _explained(chosen.repository):
            hub.file_download.http_get(
                url,
                partial,
                resume_size=partial.tell(),
                headers=headers,
                expected_size=partial.file.bytes,
            )


# -------------------------------------------------------------------------------------------------
# What is on its way
# -------------------------------------------------------------------------------------------------


class Partial(io.BufferedWriter):
    """The file that a download is written to: it goes on at the end of what an earlier one left.

    Nobody else can write it meanwhile. With no byte in it, it is removed at the end.

    Args:
        folder: where it lies.
        file: what is to arrive.

    Raises:
        ModelError: another process is writing it.
    """

    def __init__(self, folder: Path, file: HubFile) -> None:
        self.path = folder / f"{_PREFIX}{file.sha256}{_SUFFIX}"
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
        """Write what has arrived."""
        n_bytes = super().write(data)
        self.on_write()
        return n_bytes

    def check(self) -> None:
        """See that all has arrived, and reached the disk.

        Raises:
            ModelError: it is not what the hub promised; it is then gone.
        """
        flush_to_disk(self)
        if sha256_of(self.path) != self.file.sha256:
            self.path.unlink()
            raise ModelError(
                f"what arrived as {self.file.name} is not the hub's file (wrong hash): it was "
                "thrown away; try again"
            )

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # moved, or a full disk of which an error tells
            self.flush()
            if self.path.stat().st_size == 0:
                self.path.unlink()
        self.close()


# -------------------------------------------------------------------------------------------------
# huggingface_hub and what it says
# -------------------------------------------------------------------------------------------------


def _huggingface_hub() -> Any:
    """The package, which keeps its bars and warnings to itself.

    Raises:
        MissingPackageError: it is not installed.
    """
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
    """What huggingface_hub raises becomes a line with the cure; errors of the disk stay.

    Raises:
        ModelError: instead of those.
    """
    from huggingface_hub import constants, errors

    cures: dict[type[Exception], str] = {
        errors.GatedRepoError: f"{repository} is for those who agree to its terms: do so at "
        f"{constants.ENDPOINT}/{repository}, then set HF_TOKEN to a token of yours",
        errors.RepositoryNotFoundError: f"there is no repository {repository}, or it is private: "
        "check the name, or set HF_TOKEN to a token that may read it",
        errors.HFValidationError: f"{repository} cannot be the name of a repository: give "
        "owner/name as the hub shows it, or with --model the path of a file that is here already",
        errors.OfflineModeIsEnabled: "HF_HUB_OFFLINE keeps huggingface_hub from the network: unset "
        "it to fetch a model",
    }
    # the base of them all in the HTTP package that this version uses
    http_errors: Any = errors.HfHubHTTPError.__bases__
    try:
        yield
    except tuple(cures) as error:
        raise ModelError(
            next(cure for kind, cure in cures.items() if isinstance(error, kind))
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        raise ModelError(
            f"the hub does not send {repository} (HTTP {status}): try again later, or set HF_TOKEN "
            "to a token that may read it"
        ) from None
    except (*http_errors, OSError, ImportError) as error:  # that of a package for the proxy
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(
            f"{constants.ENDPOINT} cannot be reached, or the connection broke: check the network, "
            f"then try again, and the fetch goes on where it was ({reason})"
        ) from None
    except (ValueError, KeyError, TypeError):
        # A page to log in at, or another server: what it sends is taken apart without a look at it.
        raise ModelError(
            f"{constants.ENDPOINT} does not answer as the hub does: check HF_ENDPOINT and "
            "HF_TOKEN, and whether this network wants a login first"
        ) from None
