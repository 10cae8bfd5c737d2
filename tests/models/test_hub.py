"""Fetch models from the hub: huggingface_hub is real, the hub is a local server."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from cli_fakes import Output, run, run_program
from hub_server import HubServer, Repository
from pyh2o.models import hub as fetching
from pyh2o.models import models_folder
from tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.usefixtures("surroundings")

NAME = "somebody/Tiny-GGUF"
CONTENT = b"GGUF" + bytes(range(256)) * 4096


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Point huggingface_hub, in this process and its children, to a hub with one repository."""
    files = {
        "README.md": b"about",
        "Tiny-Q4_K_M.gguf": CONTENT,
        "Tiny-Q8_0.gguf": CONTENT * 2,
        "mmproj-Tiny-F16.gguf": b"GGUF",
    }
    server = HubServer({NAME: Repository(files)})
    for name in list(os.environ):
        if name.startswith("HF_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    # huggingface_hub read these from the environment when it was imported
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + template)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    yield server
    server.close()


def fetch(wanted: str) -> Output:
    return run("models", "fetch", wanted)


def content() -> dict[str, bytes]:
    """Return the files of the models folder."""
    folder = models_folder()
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def check_refused(wanted: str, message: str) -> None:
    """Check that a fetch fails with one line and leaves no file."""
    output = fetch(wanted)
    assert (output.code, output.text) == (1, "")
    assert re.search(rf"^error: .*{message}.*\n\Z", output.notes, re.MULTILINE), output.notes
    assert content() == {}


def partial_of(file: bytes) -> Path:
    """Return the path of the partial download of a file with this content."""
    return models_folder() / f".hub-{hashlib.sha256(file).hexdigest()}.part"


def test_fetch_downloads_a_file(hub: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "models" / "Tiny-Q4_K_M.gguf"
    assert fetch(NAME) == Output(
        0, f"{path}\n", f"Tiny-Q4_K_M, 1 MB, of {NAME}\nfetched and checked: -m Tiny-Q4_K_M\n"
    )
    assert content() == {path.name: CONTENT}
    assert any("pyh2o" in agent for agent in hub.agents)
    assert run("models", "list").text.endswith("\nTiny-Q4_K_M            1 MB  here\n")

    hub.requests.clear()
    assert fetch(NAME).notes.endswith("there already: -m Tiny-Q4_K_M\n")
    assert hub.ranges() == []

    other = Repository({"Tiny-Q4_K_M.gguf": b"GGUF other"})
    hub.repositories["other/Tiny-GGUF"] = other
    assert "exists and is a different file: move or remove it" in fetch("other/Tiny-GGUF").notes
    assert content() == {path.name: CONTENT}


@pytest.mark.parametrize("wanted", ["q8_0", "Tiny-Q8_0.gguf"])
def test_fetch_of_a_quantisation_selects_its_file(hub: HubServer, wanted: str) -> None:
    assert fetch(f"{NAME}:{wanted}").code == 0
    assert content() == {"Tiny-Q8_0.gguf": CONTENT * 2}


def test_all_parts_of_a_model_are_fetched(hub: HubServer, tmp_path: Path) -> None:
    """Files appear only when all parts are complete; only missing parts are downloaded."""
    repository = hub.repositories[NAME]
    files = {f"Q4/Tiny-Q4_K_M-0000{i}-of-00003.gguf": CONTENT + bytes([i]) for i in (1, 2, 3)}
    names = [Path(path).name for path in files]
    repository.files = files
    repository.hashes = {next(reversed(files)): "0" * 64}
    assert fetch(NAME).code == 1
    assert not [name for name in content() if name.endswith(".gguf")]

    repository.hashes.clear()
    output = fetch(NAME)
    first = tmp_path / "models" / names[0]
    notes = f"Tiny-Q4_K_M, 3 MB in 3 files, of {NAME}\nfetched and checked: -m Tiny-Q4_K_M\n"
    assert output == Output(0, f"{first}\n", notes)
    assert content() == dict(zip(names, files.values(), strict=True))
    assert run("models", "list").text.endswith("\nTiny-Q4_K_M            3 MB  here\n")

    first.with_name(names[1]).unlink()
    hub.requests.clear()
    assert fetch(NAME).notes.endswith("fetched and checked: -m Tiny-Q4_K_M\n")
    assert len(hub.ranges()) == 1
    assert content() == dict(zip(names, files.values(), strict=True))


def test_an_interrupted_fetch_is_resumed(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a lost connection, and after Ctrl-C."""
    monkeypatch.setattr("time.sleep", lambda _seconds: None)  # between retries
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    hub.repositories[NAME].breaks = [600_000] + [0] * 20
    output = fetch(NAME)
    assert (output.code, output.text) == (1, "")
    line = rf"error: {hub.address} cannot be reached, .*check the network, then run the same.*\n"
    assert re.fullmatch(rf".*\n{line}", output.notes), output.notes
    assert "Tiny" not in run("models", "list").text
    hub.repositories[NAME].breaks.clear()

    def stop(_bars: object, done: int, _total: int) -> None:
        if done > 700_000:
            raise KeyboardInterrupt

    for code, least in ((130, 500_000), (0, 700_000)):
        [(name, arrived)] = content().items()
        assert name == partial_of(CONTENT).name
        assert arrived == CONTENT[: len(arrived)]
        assert len(arrived) > least
        hub.requests.clear()
        with monkeypatch.context() as patch:
            if code:
                patch.setattr("pyh2o.cli.terminal.progress.Bars.fetching", stop)
            assert fetch(NAME).code == code
        assert hub.ranges() == [f"bytes={len(arrived)}-"]
    assert content() == {"Tiny-Q4_K_M.gguf": CONTENT}


def test_damaged_partial_downloads_are_discarded(hub: HubServer, tmp_path: Path) -> None:
    partial = partial_of(CONTENT)
    partial.parent.mkdir()
    partial.write_bytes(b"?" * 1000)
    check_refused(NAME, "Tiny-Q4_K_M.gguf does not match the hub's hash and was removed")
    partial.write_bytes(CONTENT + b"x")
    assert fetch(NAME).code == 0
    assert content() == {"Tiny-Q4_K_M.gguf": CONTENT}


def test_partial_downloads_are_removed_after_a_week(hub: HubServer) -> None:
    models_folder().mkdir()
    old, young = (models_folder() / name for name in (".hub-old.part", ".hub-young.part"))
    for path in (old, young):
        path.write_bytes(b"part")
    long_ago = time.time() - 8 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    assert fetch(NAME).code == 0
    assert (old.exists(), young.exists()) == (False, True)


def test_a_second_fetch_of_a_file_is_refused(hub: HubServer, tmp_path: Path) -> None:
    chosen = fetching.choose_on_hub(NAME, None)
    models_folder().mkdir()
    with fetching.Partial(models_folder(), chosen.model.files[0]):
        refused = fetch(NAME)
    assert refused.code == 1
    assert "another program is fetching Tiny-Q4_K_M.gguf: wait" in refused.notes
    assert content() == {}


def test_progress_is_printed(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    seen: list[tuple[int, int]] = []
    fetching.fetch_chosen(fetching.choose_on_hub(NAME, None), lambda *step: seen.append(step))
    assert seen == sorted(seen)
    assert len(seen) > 10
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def answers(answer: bytes) -> Callable[[HubServer], None]:
    return lambda hub: setattr(hub, "answer", answer)


def has(**attributes: object) -> Callable[[HubServer], None]:
    """Return a change of the repository."""
    return lambda hub: vars(hub.repositories[NAME]).update(attributes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (answers(b"<html>Log in</html>"), "does not answer like the hub: check HF_ENDPOINT"),
        (answers(b"{}"), "does not answer like the hub: check HF_ENDPOINT"),
        (has(files={"model.safetensors": b"0"}), f"{NAME} has no GGUF file"),
        (has(hashes={"Tiny-Q4_K_M.gguf": None}), "the hub has no hash of Tiny-Q4_K_M.gguf"),
        (has(files={"a-Q2_K.gguf": b"", "b-Q8_0.gguf": b""}), f"{NAME}: it has no Q4_K_M: add"),
    ],
)
def test_a_repository_without_a_usable_model_is_refused(
    hub: HubServer, change: Callable[[HubServer], None], message: str
) -> None:
    change(hub)
    check_refused(NAME, message)
    assert hub.ranges() == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody/Nothing", "no repository nobody/Nothing, or it is private: check the name"),
        *(
            (name, f"{re.escape(name)} is not a valid repository name: .*--model")
            for name in ("./tiny.gguf", "a--b/c", "somebody/-tiny", "ñ/tiny")
        ),
    ],
)
@pytest.mark.usefixtures("hub")
def test_an_unknown_repository_is_reported(name: str, message: str) -> None:
    check_refused(name, message)


@pytest.mark.parametrize(
    ("constant", "value", "message"),
    [
        ("ENDPOINT", "http://127.0.0.1:9", "http://127.0.0.1:9 cannot be reached, .*: check the"),
        ("HF_HUB_OFFLINE", True, "HF_HUB_OFFLINE turns off network access: unset it"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_missing_network_is_reported(
    monkeypatch: pytest.MonkeyPatch, constant: str, value: object, message: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, constant, value)
    check_refused(NAME, message)


@pytest.mark.usefixtures("hub")
def test_a_proxy_that_needs_a_package_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "socksio.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    output = run_program("models", "fetch", NAME)
    assert (output.code, output.text) == (1, "")
    assert re.fullmatch(r"error: .* cannot be reached, .*socks.*\n", output.notes)


def test_a_gated_repository_is_reported(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[NAME].gated = True
    hub.repositories[NAME].token = "hf_mine"
    check_refused(NAME, f"agree to its terms at {hub.address}/{NAME}, then set HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "“hf_mine”")  # cannot be sent
    check_refused(NAME, "check HF_ENDPOINT and HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert fetch(NAME).code == 0


def test_a_missing_huggingface_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    check_refused(NAME, r"needs the package huggingface_hub: .* -m pip install 'pyh2o-llm\[hub\]'")


def test_a_full_disk_is_reported(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(fetching.Partial, "write", full)
        check_refused(NAME, "is full: free some space")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage(10, 9, 1))
    check_refused(NAME, r"0 MB free and the fetch needs 1 MB: free some space")


@pytest.mark.real
def test_the_program_fetches_a_usable_model(hub: HubServer, tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "m.gguf", seed=3)
    hub.repositories[NAME].files = {"Wee-Q4_K_M.gguf": model.read_bytes()}
    fetched = run_program("models", "fetch", NAME)
    assert fetched.code == 0, fetched.notes
    assert run("models", "check", "wee").code == 0
