"""One browser for all tests of the page, and the page behind a fake of the API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import browser as browsers
from needed import needed


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    with browsers.browser() as running:
        yield running


@pytest.fixture
def fake(chromium: Any) -> Iterator[Any]:
    sessions = needed("fake_sessions", name="the server's packages")
    running = sessions.FakeServer()
    yield running
    running.close()


@pytest.fixture
def tab(chromium: Any, fake: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page as a new person; what went wrong in it is found at the end."""
    with browsers.tabs(chromium, fake.address) as open_tab:
        yield open_tab
