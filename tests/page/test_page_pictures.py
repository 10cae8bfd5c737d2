"""Pictures and sound on the page: attached, removed, sent, shown."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import browser as browsers
from browser import (
    IDLE,
    ask,
    box_of,
    edit_last,
    expect_value,
    messages,
    name_of,
    press,
    set_max_tokens,
    until,
)
from many_texts import tiny_engine
from pyh2o.engine import Engine
from tiny_pictures import write_models
from tiny_projector import N_PATCHES, N_SOUNDS, png, wav, write_tiny_projector

CACHE: dict[str, Any] = {"n_ctx": 2048, "hh": 256, "recent": 256}
PHOTO_SIDE = 2100  # 13 MB of PNG
# Drops a picture, or pastes it with or without text.
DROP_OR_PASTE = """(element, [kind, data, text]) => {
  const bytes = Uint8Array.from(atob(data), (sign) => sign.charCodeAt(0));
  const given = new DataTransfer();
  given.items.add(new File([bytes], "cat.png", { type: "image/png" }));
  if (text) for (const type of ["text/plain", "text/html"]) given.setData(type, text);
  const how = { bubbles: true, cancelable: true };
  element.dispatchEvent(kind === "drop" ? new DragEvent(kind, { ...how, dataTransfer: given })
    : new ClipboardEvent(kind, { ...how, clipboardData: given }));
}"""


@pytest.fixture(scope="module")
def vision_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model, mmproj = write_models(tmp_path_factory.mktemp("seer"), n_ctx_train=1 << 16)
    with tiny_engine(model, mmproj=str(mmproj), texts=2, **CACHE) as engine:
        yield engine


@pytest.fixture
def vision_client(serve: Callable[..., Any], vision_engine: Engine, endless: None) -> Any:
    return serve(vision_engine)


@pytest.fixture
def tab(chromium: Any, vision_client: Any) -> Iterator[Callable[..., Any]]:
    with browsers.tabs(chromium, vision_client.server.address) as open_tab:
        yield open_tab


def attach(page: Any, name: str, data: bytes, kind: str = "image/png") -> None:
    picker = page.get_by_label("Files to add", exact=True)
    picker.set_input_files({"name": name, "mimeType": kind, "buffer": data})
    page.get_by_label(f"Remove {name}").wait_for()


def expect_pictures(page: Any, place: str, widths: list[int]) -> None:
    """Wait until an element has pictures of these widths, all loaded."""
    pictures = f"[...document.querySelectorAll('{place} img')].map((each) => each.naturalWidth)"
    until(page, f"{pictures}.join() === '{','.join(map(str, widths))}'")


def test_a_large_photo_is_scaled_down_sent_and_shown(tab: Any, vision_client: Any) -> None:
    """It survives reloads in the box and in the chat, an edit, and an undo."""
    page = tab().page
    photo = png(1, PHOTO_SIDE)
    assert len(photo) > 12_000_000
    attach(page, "photo.png", photo)
    attach(page, "small.png", png(2))
    box_of(page).fill("what is that?")
    page.get_by_label("Remove small.png").click()
    attach(page, "small.png", png(2))
    expect_pictures(page, ".chips", [2048, 32])
    page.reload()
    expect_value(box_of(page), "what is that?")
    expect_pictures(page, ".chips", [2048, 32])
    box_of(page).press("Enter")
    expect_pictures(page, ".user-message", [2048, 32])
    page.locator(f"{IDLE} .turn-actions").wait_for()
    assert page.locator(".chips li").count() == 0
    name = name_of(page)
    assert name == "what is that?"
    [turn] = vision_client.got(f"/{name}")["turns_list"]
    assert turn["answer_start"] - turn["start"] > 2 * N_PATCHES
    page.reload()
    expect_pictures(page, ".user-message", [2048, 32])
    assert messages(page) == ["what is that?"]
    edit_last(page, "and now?")
    page.locator(".user-message").get_by_text("and now?").wait_for()
    page.locator(f"{IDLE} .turn-actions").wait_for()
    expect_pictures(page, ".user-message", [2048, 32])
    press(page, "Undo")
    expect_value(box_of(page), "and now?")
    page.locator(".turn").wait_for(state="detached")
    expect_pictures(page, ".chips", [2048, 32])
    page.reload()
    expect_pictures(page, ".chips", [2048, 32])
    box_of(page).press("Enter")
    page.locator(f"{IDLE} .turn-actions").wait_for()
    expect_pictures(page, ".user-message", [2048, 32])
    assert box_of(page).input_value() == ""


def test_a_photo_is_rotated_as_its_exif_data_says(tab: Any) -> None:
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
    entry = struct.pack("<HHHIHHI", 1, 0x112, 3, 1, 6, 0, 0)  # orientation: rotated by 90 degrees
    exif = b"Exif\0\0" + struct.pack("<2sHI", b"II", 42, 8) + entry
    rotated = jpeg[:2] + struct.pack(">HH", 0xFFE1, len(exif) + 2) + exif + jpeg[2:]
    attach(page, "photo.jpg", rotated, "image/jpeg")
    expect_pictures(page, ".chips", [20])


def test_a_sent_picture_does_not_return_as_a_draft(tab: Any, vision_client: Any) -> None:
    """The page is reloaded during the answer."""
    page = tab().page
    ask(page, "hello")
    set_max_tokens(page, 1_000_000)
    attach(page, "small.png", png(2))
    box_of(page).fill("what is that?")
    box_of(page).press("Enter")
    until(page, "document.querySelector('.turn:last-child .answer').textContent.length > 20")
    page.reload()
    page.locator(".turn").nth(1).wait_for()
    until(page, "document.querySelectorAll('.chips li').length === 0")
    expect_value(box_of(page), "")


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_pictures_can_be_dropped_and_pasted(tab: Any, kind: str) -> None:
    """A pasted picture with text is ignored: office programs add a picture of the text."""
    page = tab().page
    target = page.locator(".chat") if kind == "drop" else box_of(page)
    data = base64.b64encode(png(3)).decode()
    if kind == "paste":
        target.evaluate(DROP_OR_PASTE, [kind, data, "a table"])
    target.evaluate(DROP_OR_PASTE, [kind, data, ""])
    page.get_by_label("Remove cat.png").click()
    assert page.locator(".chips li").count() == 0


def test_a_picture_without_text_is_a_valid_message(tab: Any, vision_client: Any) -> None:
    page = tab().page
    attach(page, "small.png", png(2))
    box_of(page).press("Enter")
    page.locator(f"{IDLE} .turn-actions").wait_for()
    expect_pictures(page, ".user-message", [32])
    page.locator("#sessions").get_by_text("[picture]").wait_for()


def test_sound_can_be_sent_and_played(
    serve: Callable[..., Any], chromium: Any, endless: None, tmp_path: Path
) -> None:
    model, _ = write_models(tmp_path)
    mmproj = write_tiny_projector(tmp_path / "ears.gguf", kind="ultravox")
    with tiny_engine(model, mmproj=str(mmproj), texts=1, **CACHE) as engine:
        client = serve(engine)
        with browsers.tabs(chromium, client.server.address) as open_tab:
            page = open_tab().page
            attach(page, "song.wav", wav(1), "audio/wav")
            ask(page, "what is that?")
            until(page, "document.querySelector('.user-message audio')?.duration === 1")
            [turn] = client.got(f"/{name_of(page)}")["turns_list"]
            assert turn["answer_start"] - turn["start"] > N_SOUNDS


def test_unsupported_files_are_rejected(tab: Any, vision_client: Any, tmp_path: Path) -> None:
    page = tab().page
    picker = page.get_by_label("Files to add", exact=True)
    for name, kind, message in (
        ("song.wav", "audio/wav", "this model cannot read song.wav"),
        ("odd.png", "image/png", "this browser cannot open the picture odd.png"),
        ("film.mp4", "video/mp4", "film.mp4 is a video"),
    ):
        picker.set_input_files({"name": name, "mimeType": kind, "buffer": wav(1, 100)})
        page.get_by_text(message).wait_for()
    assert page.locator(".chips li").count() == 0


def test_pictures_are_accessible_on_desktop_and_phone(tab: Any) -> None:
    axe = browsers.axe_source()
    phone = {"viewport": {"width": 375, "height": 667}}
    for settings, scheme in ((browsers.WIDE, "light"), (phone, "dark")):
        page = tab(color_scheme=scheme, **settings).page
        attach(page, "small.png", png(2))
        ask(page, "what is that?")
        attach(page, "photo.png", png(4, 300))
        expect_pictures(page, ".user-message", [32])
        assert browsers.serious_findings(page, axe) == []
        width = settings["viewport"]["width"]
        assert page.evaluate("document.documentElement.scrollWidth") == width
