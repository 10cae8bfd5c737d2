"""Pictures and sound on the page: added, taken away, sent, and shown again."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import browser as browsers
from browser import IDLE, box_of, edit_last, name_of, press, said, say, set_max_tokens, shows, until
from many_texts import tiny_engine
from pyh2o.engine import Engine
from tiny_pictures import write_models
from tiny_projector import N_PATCHES, N_SOUNDS, png, wav, write_tiny_projector

CACHE: dict[str, Any] = {"n_ctx": 2048, "hh": 256, "recent": 256}
PHOTO_SIDE = 2100  # 13 MB of PNG
# Of a picture that is dropped, or pasted alone or with the text that it is a picture of.
BRINGS = """(element, [kind, data, text]) => {
  const bytes = Uint8Array.from(atob(data), (sign) => sign.charCodeAt(0));
  const given = new DataTransfer();
  given.items.add(new File([bytes], "cat.png", { type: "image/png" }));
  if (text) for (const type of ["text/plain", "text/html"]) given.setData(type, text);
  const how = { bubbles: true, cancelable: true };
  element.dispatchEvent(kind === "drop" ? new DragEvent(kind, { ...how, dataTransfer: given })
    : new ClipboardEvent(kind, { ...how, clipboardData: given }));
}"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model, mmproj = write_models(tmp_path_factory.mktemp("seer"), n_ctx_train=1 << 16)
    with tiny_engine(model, mmproj=str(mmproj), texts=2, **CACHE) as engine:
        yield engine


@pytest.fixture
def seer(serve: Callable[..., Any], seeing: Engine, endless: None) -> Any:
    return serve(seeing)


@pytest.fixture
def tab(chromium: Any, seer: Any) -> Iterator[Callable[..., Any]]:
    with browsers.tabs(chromium, seer.server.address) as open_tab:
        yield open_tab


def add(page: Any, name: str, data: bytes, kind: str = "image/png") -> None:
    picker = page.get_by_label("Files to add", exact=True)
    picker.set_input_files({"name": name, "mimeType": kind, "buffer": data})
    page.get_by_label(f"Leave {name} out").wait_for()


def shows_pictures(page: Any, place: str, widths: list[int]) -> None:
    """Wait until the pictures there, all of which can be seen, have these widths."""
    pictures = f"[...document.querySelectorAll('{place} img')].map((each) => each.naturalWidth)"
    until(page, f"{pictures}.join() === '{','.join(map(str, widths))}'")


def test_a_large_photo_is_sent_and_shown_again(tab: Any, seer: Any) -> None:
    """Drawn smaller by the browser; also after a reload, in the box and in the chat."""
    page = tab().page
    photo = png(1, PHOTO_SIDE)
    assert len(photo) > 12_000_000
    add(page, "photo.png", photo)
    add(page, "small.png", png(2))
    box_of(page).fill("what is that?")
    page.get_by_label("Leave small.png out").click()
    add(page, "small.png", png(2))
    shows_pictures(page, ".chips", [2048, 32])
    page.reload()
    shows(box_of(page), "what is that?")
    shows_pictures(page, ".chips", [2048, 32])
    box_of(page).press("Enter")
    shows_pictures(page, ".said", [2048, 32])
    page.locator(f"{IDLE} .turn-actions").wait_for()
    assert page.locator(".chips li").count() == 0
    name = name_of(page)
    assert name == "what is that"
    [turn] = seer.got(f"/{name}")["turns_list"]
    assert turn["answer_start"] - turn["start"] > 2 * N_PATCHES
    page.reload()
    shows_pictures(page, ".said", [2048, 32])
    assert said(page) == ["what is that?"]
    edit_last(page, "and now?")
    page.locator(".said").get_by_text("and now?").wait_for()
    page.locator(f"{IDLE} .turn-actions").wait_for()
    shows_pictures(page, ".said", [2048, 32])
    press(page, "Undo")
    shows(box_of(page), "and now?")
    page.locator(".turn").wait_for(state="detached")
    shows_pictures(page, ".chips", [2048, 32])
    page.reload()
    shows_pictures(page, ".chips", [2048, 32])
    box_of(page).press("Enter")
    page.locator(f"{IDLE} .turn-actions").wait_for()
    shows_pictures(page, ".said", [2048, 32])
    assert box_of(page).input_value() == ""


def test_a_photo_is_upright(tab: Any) -> None:
    """As its file says that a phone was held."""
    page = tab().page
    drawn = page.evaluate(
        """() => {
          const canvas = document.createElement("canvas");
          [canvas.width, canvas.height] = [40, 20];
          canvas.getContext("2d").fillRect(0, 0, 20, 20);
          return canvas.toDataURL("image/jpeg").split(",")[1];
        }"""
    )
    jpeg = base64.b64decode(drawn)
    entry = struct.pack("<HHHIHHI", 1, 0x112, 3, 1, 6, 0, 0)  # turned by a quarter
    exif = b"Exif\0\0" + struct.pack("<2sHI", b"II", 42, 8) + entry
    turned = jpeg[:2] + struct.pack(">HH", 0xFFE1, len(exif) + 2) + exif + jpeg[2:]
    add(page, "photo.jpg", turned, "image/jpeg")
    shows_pictures(page, ".chips", [20])


def test_a_message_that_was_sent_with_a_picture_is_no_draft(tab: Any, seer: Any) -> None:
    """Also where the page is left while it is answered."""
    page = tab().page
    say(page, "hello")
    set_max_tokens(page, 1_000_000)
    add(page, "small.png", png(2))
    box_of(page).fill("what is that?")
    box_of(page).press("Enter")
    until(page, "document.querySelector('.turn:last-child .answer').textContent.length > 20")
    page.reload()
    page.locator(".turn").nth(1).wait_for()
    until(page, "document.querySelectorAll('.chips li').length === 0")
    shows(box_of(page), "")


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_pictures_are_dropped_and_pasted(tab: Any, kind: str) -> None:
    """But not what programs paste beside a text."""
    page = tab().page
    target = page.locator(".chat") if kind == "drop" else box_of(page)
    data = base64.b64encode(png(3)).decode()
    if kind == "paste":
        target.evaluate(BRINGS, [kind, data, "a table"])
    target.evaluate(BRINGS, [kind, data, ""])
    page.get_by_label("Leave cat.png out").click()
    assert page.locator(".chips li").count() == 0


def test_a_picture_alone_is_a_message(tab: Any, seer: Any) -> None:
    page = tab().page
    add(page, "small.png", png(2))
    box_of(page).press("Enter")
    page.locator(f"{IDLE} .turn-actions").wait_for()
    shows_pictures(page, ".said", [32])
    page.locator("#sessions").get_by_text("[picture]").wait_for()


def test_sound_is_sent_and_played(
    serve: Callable[..., Any], chromium: Any, endless: None, tmp_path: Path
) -> None:
    model, _ = write_models(tmp_path)
    mmproj = write_tiny_projector(tmp_path / "ears.gguf", kind="ultravox")
    with tiny_engine(model, mmproj=str(mmproj), texts=1, **CACHE) as engine:
        client = serve(engine)
        with browsers.tabs(chromium, client.server.address) as open_tab:
            page = open_tab().page
            add(page, "song.wav", wav(1), "audio/wav")
            say(page, "what is that?")
            until(page, "document.querySelector('.said audio')?.duration === 1")
            [turn] = client.got(f"/{name_of(page)}")["turns_list"]
            assert turn["answer_start"] - turn["start"] > N_SOUNDS


def test_what_a_model_cannot_take_is_said_at_once(tab: Any, seer: Any, tmp_path: Path) -> None:
    page = tab().page
    picker = page.get_by_label("Files to add", exact=True)
    for name, kind, message in (
        ("song.wav", "audio/wav", "song.wav is sound, and this model has no projector for that"),
        ("odd.png", "image/png", "odd.png is no picture that this browser can show"),
        ("film.mp4", "video/mp4", "film.mp4 is a film"),
    ):
        picker.set_input_files({"name": name, "mimeType": kind, "buffer": wav(1, 100)})
        page.get_by_text(message).wait_for()
    assert page.locator(".chips li").count() == 0


def test_pictures_keep_nobody_out(tab: Any) -> None:
    """On a desk and on a phone, by day and by night."""
    axe = browsers.axe_source()
    phone = {"viewport": {"width": 375, "height": 667}}
    for settings, scheme in ((browsers.WIDE, "light"), (phone, "dark")):
        page = tab(color_scheme=scheme, **settings).page
        add(page, "small.png", png(2))
        say(page, "what is that?")
        add(page, "photo.png", png(4, 300))
        shows_pictures(page, ".said", [32])
        assert browsers.serious_findings(page, axe) == []
        width = settings["viewport"]["width"]
        assert page.evaluate("document.documentElement.scrollWidth") == width
