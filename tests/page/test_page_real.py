"""The page with the real server and a tiny model behind it: what is shown is what there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import browser as browsers
from browser import answers, axe_source, say, serious_findings, shows, until
from many_texts import tiny_engine
from needed import needed
from pyh2o.engine import Engine
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

clients = needed("session_client", name="the server's packages")
serving = needed("serving_program", name="the server's packages")

WIDE = {"viewport": {"width": 1400, "height": 800}}
CACHE: dict[str, Any] = {"n_ctx": 256, "hh": 56, "recent": 32, "slack": 16, "recall": 24}
IDLE = "body:not(.making)"
LIVE = "document.querySelector('#live').textContent"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_gguf(
        folder / "tiny.gguf", seed=5, n_ctx_train=1 << 16, chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    with tiny_engine(model_path, texts=2, **CACHE) as running:
        yield running


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYH2O_CHATS", str(tmp_path / "chats"))


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text ends by itself: random weights draw end tokens, and fall into loops.

    Nor are tokens faster than those of models that people have: a browser on the same core, which
    a test may get, would have no time to show them.
    """

    def go_on(*_: Any) -> None:
        time.sleep(0.003)

    monkeypatch.setattr("pyh2o.sessions.answers.EndlessText.add", go_on)
    monkeypatch.setattr("pyh2o.sessions.story.RepetitionGuard.add", go_on)
    for module in ("pyh2o.sessions.answers", "pyh2o.sessions.story", "pyh2o.generation.writer"):
        monkeypatch.setattr(f"{module}.is_end_token", lambda _llm, _token: False)


@pytest.fixture
def client(chats: None, endless: None, engine: Engine) -> Iterator[Any]:
    """Asks the server what is so."""
    with clients.serving(engine) as running:
        yield running


@pytest.fixture
def tab(chromium: Any, client: Any) -> Iterator[Callable[..., Any]]:
    with browsers.tabs(chromium, client.server.address.removesuffix("/v1")) as open_tab:
        yield open_tab


def set_max_tokens(page: Any, n: int) -> None:
    page.evaluate(f"localStorage.setItem('pyh2o-max-tokens', '{n}')")


def name_of(page: Any) -> str:
    """Of the session that is open."""
    return str(page.evaluate("decodeURIComponent(location.hash.slice('#/s/'.length))"))


def figure(page: Any, name: str) -> str:
    """A figure of the memory, as it is shown."""
    return str(page.locator(f".numbers dt:text-is('{name}') + dd").inner_text())


def test_thirty_turns_and_their_memory(tab: Any, client: Any) -> None:
    """The map moves, the figures are the server's, and reloads and other tabs show the same."""
    one = tab(**WIDE)
    page = one.page
    set_max_tokens(page, 12)
    pictures = set()
    for n in range(30):
        say(page, f"message {n}")
        if n % 10 == 9:
            page.wait_for_timeout(200)
            pictures.add(page.evaluate("document.querySelector('.strip canvas').toDataURL()"))
    assert len(pictures) == 3
    name = name_of(page)
    session, found = client.got(f"/{name}"), client.got(f"/{name}/map")
    assert [turn["user"] for turn in session["turns_list"]] == [f"message {n}" for n in range(30)]
    kv = found["kv"]
    assert kv["compactions"] > 10
    page.locator(".numbers").get_by_text(f"{kv['position']:,} tokens", exact=True).wait_for()
    assert figure(page, "Cache") == f"{kv['used']} of {kv['capacity']} cells"
    assert figure(page, "Compactions") == str(kv["compactions"])
    places = client.server.get("/v1/kv").json["data"]
    assert kv["position"] in [place["tokens"] for place in places]
    summary = page.locator("#memory .summary").inner_text()
    assert summary.startswith(f"Of {session['tokens']:,} tokens the cache holds")
    n_recalled = sum(end - start for start, end in found["recalled"])
    assert n_recalled
    assert f" {n_recalled} recalled" in summary
    shown = answers(page)
    page.reload()
    page.locator(".turn").nth(29).wait_for()
    assert answers(page) == shown
    second = one.open(f"#/s/{name}")
    second.locator(".turn").nth(29).wait_for()
    assert answers(second) == shown


def test_what_is_changed_on_the_page_is_changed_on_the_server(tab: Any, client: Any) -> None:
    page = tab(**WIDE).page
    set_max_tokens(page, 6)
    say(page, "The word is mellon")
    say(page, "second")
    name = name_of(page)
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("2 of 2").wait_for()
    page.locator(IDLE).wait_for()
    page.get_by_role("button", name="Earlier answer").click()
    page.get_by_role("group", name="Answers").filter(has_text="1 of 2").wait_for()
    [_, chosen] = client.got(f"/{name}")["turns_list"]
    assert (chosen["attempt"], chosen["attempts"]) == (0, [0, 1])
    # a browser shows any white space as a space
    assert answers(page)[1].split() == chosen["answer"].split()
    page.get_by_role("button", name="Edit").click()
    say(page, "second, in other words")
    turns = client.got(f"/{name}")["turns_list"]
    assert [turn["user"] for turn in turns] == ["The word is mellon", "second, in other words"]
    assert answers(page)[1].split() == turns[1]["answer"].split()
    page.get_by_role("button", name="Undo").click()
    shows(page.get_by_label("Message", exact=True), "second, in other words")
    page.locator(".turn").nth(1).wait_for(state="detached")
    assert client.got(f"/{name}")["turns"] == 1

    before = client.got(f"/{name}/map")["pinned"]
    page.locator(".said").select_text()
    page.get_by_role("button", name="Pin", exact=True).click()
    until(page, f"{LIVE} === 'Pinned'")
    [(start, end)] = [span for span in client.got(f"/{name}/map")["pinned"] if span not in before]
    texts = client.got(f"/{name}/tokens?start={start}&end={end}")["texts"]
    assert "".join(texts).strip() == "The word is mellon"
    n_pinned = sum(end - start for start, end in client.got(f"/{name}/map")["pinned"])
    page.get_by_text(f"{n_pinned} pinned").wait_for()
    page.locator(".said").select_text()
    page.get_by_role("button", name="Unpin").click()
    until(page, f"{LIVE} === 'Unpinned'")
    assert client.got(f"/{name}/map")["pinned"] == before


def test_a_story_grows_and_is_stopped(tab: Any, client: Any) -> None:
    page = tab("#/new-story", **WIDE).page
    page.get_by_label("Beginning of the story").fill("Once upon a time")
    page.get_by_label("Tokens of a passage").fill("40")
    page.get_by_role("button", name="Write", exact=True).click()
    page.get_by_role("button", name="Undo passage").wait_for()
    page.locator(IDLE).wait_for()
    name = name_of(page)
    first = client.got(f"/{name}")
    page.get_by_label("Tokens of a passage").fill("1000000")
    page.get_by_role("button", name="Write on").click()
    until(page, f"document.querySelector('.page-text').textContent.length > {len(first['text'])}")
    # at once: the text moves the button
    page.get_by_role("button", name="Stop").click(force=True)
    page.locator(IDLE).wait_for()
    second = client.got(f"/{name}")
    assert second["text"].startswith(first["text"])
    assert first["text"].startswith("Once upon a time")
    assert first["tokens"] < second["tokens"] < 900_000
    shown = "document.querySelector('.page-text').textContent"
    until(page, f"Array.from({shown}).length === {len(second['text'])}")
    assert page.evaluate(shown) == second["text"]
    page.get_by_role("button", name="Undo passage").click()
    until(page, f"{LIVE} === 'The last passage was taken back.'")
    assert client.got(f"/{name}")["text"] == first["text"] == page.evaluate(shown)


@pytest.mark.real
def test_the_server_is_killed_and_comes_back(chromium: Any, model_path: Path, chats: None) -> None:
    budget = ("--ctx", 256, "--hh", 32, "--recent", 32)
    server = serving.Program("--model", model_path, "--port", 0, *budget)
    try:
        address = server.address().removesuffix("/v1")
        with browsers.tabs(chromium, address) as open_tab:
            page = open_tab().page
            set_max_tokens(page, 6)
            say(page, "before")
            shown = answers(page)
            server.process.kill()
            server.end()
            box = page.get_by_label("Message", exact=True)
            box.fill("after")
            box.press("Enter")
            page.get_by_text("the server does not answer: is it still running?").wait_for()
            shows(box, "after")
            page.get_by_role("button", name="Regenerate").wait_for()
            assert answers(page) == shown
            port = address.rpartition(":")[2]
            server = serving.Program("--model", model_path, "--port", port, *budget)
            server.address()
            box.press("Enter")
            page.locator(".turn").nth(1).wait_for()
            page.locator(f"{IDLE} .turn-actions").wait_for()
            now = answers(page)
            assert now[:1] == shown
            assert len(now) == 2
            page.reload()
            page.locator(".turn").nth(1).wait_for()
            assert answers(page) == now
    finally:
        server.process.kill()
        server.end()


def test_keyboard_only_and_nothing_that_keeps_people_out(tab: Any, client: Any) -> None:
    axe = axe_source()
    page = tab(**WIDE).page
    page.locator("textarea:focus").wait_for()
    set_max_tokens(page, 6)
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    page.locator(f"{IDLE} .turn-actions").wait_for()
    first = name_of(page)
    page.keyboard.press("Control+Shift+O")
    page.get_by_role("heading", name="New chat").wait_for()
    set_max_tokens(page, 1_000_000)
    page.keyboard.type("a long answer")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.answer')?.textContent.length > 20")
    page.keyboard.press("Escape")
    page.get_by_text("The answer was stopped.").wait_for()
    page.locator(f"{IDLE} .turn-actions").wait_for()
    name = name_of(page)
    assert name != first
    [stopped] = client.got(f"/{name}")["turns_list"]
    assert stopped["finish"] == "interrupted"
    set_max_tokens(page, 6)
    for _ in range(20):  # back from the box, which has the focus
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.textContent") == "Regenerate":
            break
    page.keyboard.press("Enter")
    page.get_by_text("2 of 2").wait_for()
    page.locator(IDLE).wait_for()
    assert client.got(f"/{name}")["turns_list"][0]["attempt"] == 1
    assert serious_findings(page, axe) == []
    page.get_by_role("button", name="Shade the text").click()
    page.locator("[data-p]").first.wait_for()
    assert serious_findings(page, axe) == []
