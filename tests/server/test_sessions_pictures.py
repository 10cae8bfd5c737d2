"""Pictures in the messages of sessions: sent with them, kept, and shown again."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from many_texts import tiny_engine
from needed import needed
from pyh2o.engine import Engine
from tiny_pictures import write_models
from tiny_projector import N_PATCHES, png, wav, write_tiny_projector

clients = needed("session_client", name="the server's packages")

CACHE: dict[str, Any] = {"n_ctx": 1024, "hh": 128, "recent": 128}
SHORT = {"max_tokens": 8}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model, mmproj = write_models(tmp_path_factory.mktemp("seer"))
    with tiny_engine(model, mmproj=str(mmproj), texts=2, **CACHE) as engine:
        yield engine


@pytest.fixture
def client(seeing: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("PYH2O_CHATS", str(tmp_path / "chats"))
    with clients.serving(seeing) as running:
        yield running


def with_picture(number: int, text: str) -> list[dict[str, Any]]:
    """A message as OpenAI's clients send it."""
    url = f"data:image/png;base64,{base64.b64encode(png(number)).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]


def key_in(mark: str) -> str:
    return mark.removeprefix("<picture:").removesuffix(">")


def file_of(client: Any, name: str, key: str) -> tuple[bytes, Any]:
    """The file of a picture, and the headers that come with it."""
    url = f"http://127.0.0.1:{client.server.port}/v1/sessions/{name}/pictures/{key}"
    with urlopen(url) as response:
        return response.read(), response.headers


def test_a_picture_is_kept_with_its_message(client: Any, seeing: Engine) -> None:
    """And shown, also by a server that has been started again; an edit keeps it or puts another."""
    client.begin("talk")
    turn = client.say("talk", with_picture(1, "\nwhat is that?"), **SHORT)["turn"]
    mark, text = turn["user"].split("\n")
    assert text == "what is that?"
    assert turn["answer_start"] - turn["start"] > N_PATCHES
    assert client.got("")["data"][0]["first"] == "[picture] what is that?"
    for form in ("text", "markdown"):
        exported = client.ask("GET", f"/talk/export?format={form}").body.decode()
        assert "[picture]\nwhat is that?" in exported
        assert mark not in exported
    key = key_in(mark)
    with clients.serving(seeing) as other:
        client.server.close()
        data, headers = file_of(other, "talk", key)
        assert (data, headers["Content-Type"]) == (png(1), "image/png")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "sandbox" in headers["Content-Security-Policy"]
        done = other.done("/talk/answers", edit=f"{mark}\nand now?", **SHORT)
        assert done["turn"]["user"] == f"{mark}\nand now?"
        assert done["turn"]["answer_start"] - done["turn"]["start"] > N_PATCHES
        done = other.done("/talk/answers", edit=with_picture(2, ""), **SHORT)
        assert done["turn"]["user"] != mark
        assert other.refused("GET", f"/talk/pictures/{'0' * 64}", status=404)


def test_files_of_sessions_have_no_other_way_out(client: Any) -> None:
    client.begin("talk")
    client.say("talk", with_picture(3, "see?"), **SHORT)
    for key in ("../header.json", "%2e%2e%2fheader.json", "header.json", "a" * 64, "."):
        reply = client.ask("GET", f"/talk/pictures/{key}")
        assert reply.status == 404, key
    client.refused("GET", f"/other/pictures/{'a' * 64}", status=404)


def test_a_picture_that_is_not_there_is_asked_for(client: Any) -> None:
    client.begin("talk")
    body = {"message": f"<picture:{'0' * 64}>\nwhat is that?"}
    assert "add it again" in client.refused("POST", "/talk/answers", body)
    url = "data:image/png;base64,aGVsbG8="
    body = {"message": [{"type": "image_url", "image_url": {"url": url}}]}
    assert "give JPEG, PNG" in client.refused("POST", "/talk/answers", body)
    assert client.got("/talk")["turns_list"] == []


def test_sound_goes_the_same_way(
    seeing: Engine, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = client.server.get("/v1/machine").json["served"]
    assert [(each["sees"], each["hears"]) for each in served] == [(True, False)]
    folder = tmp_path / "hearing"
    folder.mkdir()
    model, _ = write_models(folder)
    mmproj = write_tiny_projector(folder / "ears.gguf", kind="ultravox")
    sound = {"data": base64.b64encode(wav(1)).decode(), "format": "wav"}
    message = [{"type": "input_audio", "input_audio": sound}]
    with (
        tiny_engine(model, mmproj=str(mmproj), texts=1, **CACHE) as engine,
        clients.serving(engine) as hearing,
    ):
        hearing.begin("heard")
        user = hearing.say("heard", message, **SHORT)["turn"]["user"]
        data, headers = file_of(hearing, "heard", key_in(user))
        assert (data, headers["Content-Type"]) == (wav(1), "audio/wav")


def test_a_model_without_a_projector_says_what_to_do(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYH2O_CHATS", str(tmp_path / "chats"))
    with clients.serving(engine) as blind:
        served = blind.server.get("/v1/machine").json["served"]
        assert [(each["sees"], each["hears"]) for each in served] == [(False, False)]
        blind.begin("talk")
        body = {"message": with_picture(1, "see?")}
        assert "--mmproj FILE" in blind.refused("POST", "/talk/answers", body)
