"""Models of the hub: huggingface_hub is real, the hub is a server of the test."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
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
    """A hub with one repository, for huggingface_hub in this process and in others."""
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
    # what it has read from the environment when it was imported
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
    """What is in the models folder, but for what huggingface_hub never sees."""
    folder = models_folder()
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def refused(wanted: str, message: str) -> None:
    """Nothing is left, and one line says why."""
    output = fetch(wanted)
    assert (output.code, output.text) == (1, "")
    assert re.search(rf"^error: .*{message}.*\n\Z", output.notes, re.MULTILINE), output.notes
    assert content() == {}


def test_fetch(hub: HubServer, tmp_path: Path) -> None:
    path = tmp_path / "models" / "Tiny-Q4_K_M.gguf"
    assert fetch(NAME) == Output(
        0, f"{path}\n", f"Tiny-Q4_K_M, 1 MB, of {NAME}\nfetched and checked: -m Tiny-Q4_K_M\n"
    )
    assert content() == {path.name: CONTENT}
    assert hub.ranges() == [None]
    assert any("pyh2o" in agent for agent in hub.agents)
    assert run("models", "list").text.endswith("\nTiny-Q4_K_M            1 MB  here\n")

    hub.requests.clear()
    assert fetch(NAME).notes.endswith("there already: -m Tiny-Q4_K_M\n")
    assert hub.ranges() == []


@pytest.mark.parametrize("wanted", ["q8_0", "Tiny-Q8_0.gguf"])
def test_fetch_of_a_quantisation(hub: HubServer, wanted: str) -> None:
    assert fetch(f"{NAME}:{wanted}").code == 0
    assert content() == {"Tiny-Q8_0.gguf": CONTENT * 2}


def test_quantisation_that_is_not_there(hub: HubServer) -> None:
    choices = r"give one behind a colon, of Q4_K_M \(0\.0 GB\), Q8_0 \(0\.0 GB\)"
    refused(f"{NAME}:Q2_K", rf"{NAME}: it has no Q2_K: {choices}")


def parts(n_parts: int) -> dict[str, bytes]:
    """A model in several files, each with other bytes."""
    return {
        f"Q4_K_M/Tiny-Q4_K_M-{i:05}-of-{n_parts:05}.gguf": CONTENT + bytes([i])
        for i in range(1, n_parts + 1)
    }


def test_model_in_several_files(hub: HubServer, tmp_path: Path) -> None:
    files = parts(3)
    hub.repositories[NAME].files = files
    output = fetch(NAME)
    first = tmp_path / "models" / "Tiny-Q4_K_M-00001-of-00003.gguf"
    assert output == Output(
        0,
        f"{first}\n",
        f"Tiny-Q4_K_M, 3 MB in 3 files, of {NAME}\nfetched and checked: -m Tiny-Q4_K_M\n",
    )
    assert content() == {Path(path).name: each for path, each in files.items()}
    assert run("models", "list").text.endswith("\nTiny-Q4_K_M            3 MB  here\n")

    (tmp_path / "models" / "Tiny-Q4_K_M-00002-of-00003.gguf").unlink()
    hub.requests.clear()
    assert fetch(NAME).notes.endswith("fetched and checked: -m Tiny-Q4_K_M\n")
    assert [path for _, path, _ in hub.requests if "00002" in path and "resolve" in path]
    assert len(hub.ranges()) == 1
    assert content() == {Path(path).name: each for path, each in files.items()}


def test_several_files_appear_only_when_all_are_there(hub: HubServer) -> None:
    files = parts(2)
    hub.repositories[NAME].files = files
    hub.repositories[NAME].hashes = {next(reversed(files)): "0" * 64}
    assert fetch(NAME).code == 1
    assert not [name for name in content() if name.endswith(".gguf")]


def test_going_on_after_a_break(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)  # before it tries again
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    hub.repositories[NAME].breaks = [600_000] + [0] * 20
    output = fetch(NAME)
    assert (output.code, output.text) == (1, "")
    line = rf"error: {hub.address} cannot be reached, .*check the network, then try again.*\n"
    assert re.fullmatch(rf".*\n{line}", output.notes), output.notes
    [(name, arrived)] = content().items()
    assert not name.endswith(".gguf")
    assert arrived == CONTENT[: len(arrived)]
    assert len(arrived) > 500_000
    assert "Tiny" not in run("models", "list").text

    hub.repositories[NAME].breaks.clear()
    hub.requests.clear()
    assert fetch(NAME).code == 0
    assert hub.ranges() == [f"bytes={len(arrived)}-"]
    assert content() == {"Tiny-Q4_K_M.gguf": CONTENT}


def test_going_on_with_what_is_too_long(hub: HubServer, tmp_path: Path) -> None:
    partial = tmp_path / "models" / f".hub-{hashlib.sha256(CONTENT).hexdigest()}.part"
    partial.parent.mkdir()
    partial.write_bytes(CONTENT + b"x")
    assert fetch(NAME).code == 0
    assert content() == {"Tiny-Q4_K_M.gguf": CONTENT}


def test_going_on_with_what_is_damaged(hub: HubServer, tmp_path: Path) -> None:
    partial = tmp_path / "models" / f".hub-{hashlib.sha256(CONTENT).hexdigest()}.part"
    partial.parent.mkdir()
    partial.write_bytes(b"?" * 1000)
    refused(NAME, r"Tiny-Q4_K_M\.gguf is not the hub's file \(wrong hash\)")
    assert fetch(NAME).code == 0


def test_no_hash(hub: HubServer) -> None:
    hub.repositories[NAME].hashes = {"Tiny-Q4_K_M.gguf": None}
    refused(NAME, "the hub says no hash of Tiny-Q4_K_M.gguf")
    assert hub.ranges() == []


def test_ctrl_c_keeps_what_has_arrived(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)

    def stop(_bars: object, done: int, _total: int) -> None:
        if done > 100_000:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pyh2o.cli.terminal.progress.Bars.fetching", stop)
        assert fetch(NAME).code == 130
    [arrived] = content().values()
    hub.requests.clear()
    assert fetch(NAME).code == 0
    assert hub.ranges() == [f"bytes={len(arrived)}-"]


def test_progress(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    hub.repositories[NAME].files = parts(2)
    seen: list[tuple[int, int]] = []
    chosen = fetching.choose_on_hub(NAME, None)
    fetching.fetch_chosen(chosen, lambda *step: seen.append(step))
    total = 2 * (len(CONTENT) + 1)
    assert seen == sorted(seen)
    assert len(seen) > 20
    assert seen[-1] == (total, total)


def test_two_at_once(hub: HubServer, tmp_path: Path) -> None:
    chosen = fetching.choose_on_hub(NAME, None)
    (tmp_path / "models").mkdir()
    with fetching.Partial(tmp_path / "models", chosen.model.files[0]):
        refused_at_once = fetch(NAME)
    assert refused_at_once.code == 1
    assert "another program is fetching Tiny-Q4_K_M.gguf: wait" in refused_at_once.notes
    assert content() == {}


def test_same_name_of_another_repository(hub: HubServer) -> None:
    hub.repositories["other/Tiny-GGUF"] = Repository({"Tiny-Q4_K_M.gguf": b"GGUF other"})
    assert fetch(NAME).code == 0
    assert "is there and is another file: move or remove it" in fetch("other/Tiny-GGUF").notes
    assert content() == {"Tiny-Q4_K_M.gguf": CONTENT}


def test_no_such_repository(hub: HubServer) -> None:
    refused("nobody/Nothing", "no repository nobody/Nothing, or it is private: check the name")


@pytest.mark.parametrize("name", ["./tiny.gguf", "a--b/c", "somebody/-tiny", "ñ/tiny"])
@pytest.mark.usefixtures("hub")
def test_name_that_no_repository_can_have(name: str) -> None:
    refused(name, f"{re.escape(name)} cannot be the name of a repository: .*--model the path")


@pytest.mark.parametrize("answer", [b"<html>Log in</html>", b"{}"])
def test_answer_of_something_else(hub: HubServer, answer: bytes) -> None:
    hub.answer = answer
    refused(NAME, f"{hub.address} does not answer as the hub does: check HF_ENDPOINT")


def test_token_that_cannot_be_sent(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "“hf_mine”")
    refused(NAME, "check HF_ENDPOINT and HF_TOKEN")
    assert hub.requests == []


@pytest.mark.usefixtures("hub")
def test_proxy_that_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "socksio.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    output = run_program("models", "fetch", NAME)
    assert (output.code, output.text) == (1, "")
    assert re.fullmatch(r"error: .* cannot be reached, .*socks.*\n", output.notes)


def test_repository_without_models(hub: HubServer) -> None:
    hub.repositories[NAME].files = {"model.safetensors": b"0"}
    refused(NAME, f"{NAME} has no GGUF file")


def test_gated_repository(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[NAME].gated = True
    hub.repositories[NAME].token = "hf_mine"
    refused(NAME, f"agree to its terms: do so at {hub.address}/{NAME}, then set HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert fetch(NAME).code == 0


def test_no_network(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    refused(NAME, "http://127.0.0.1:9 cannot be reached, .*: check the network")


def test_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused(NAME, "HF_HUB_OFFLINE keeps huggingface_hub from the network: unset it")


def test_no_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(NAME, r"needs the package huggingface_hub: .* -m pip install 'pyh2o-llm\[hub\]'")


def test_too_little_space(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage(10, 9, 1))
    refused(NAME, r"0 MB free and the fetch needs 1 MB: free some")


def test_disk_that_fills_up(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetching.Partial, "write", full)
    refused(NAME, "became full: free some space")


def test_old_leftovers_go(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    old, young = folder / ".hub-old.part", folder / ".hub-young.part"
    for path in (old, young):
        path.write_bytes(b"part")
    long_ago = time.time() - 8 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    assert fetch(NAME).code == 0
    assert (old.exists(), young.exists()) == (False, True)


@pytest.mark.real
def test_the_program_fetches_a_model_that_can_be_used(hub: HubServer, tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "m.gguf", seed=3)
    hub.repositories[NAME].files = {"Wee-Q4_K_M.gguf": model.read_bytes()}
    fetched = run_program("models", "fetch", NAME)
    assert fetched.code == 0, fetched.notes
    assert run("models", "check", "wee").code == 0
