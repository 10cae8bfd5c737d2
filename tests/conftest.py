"""Fixtures for all tests, and where their random numbers come from."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

# Tests may run on several cores at once, each in a process that stays on its own with all that it
# starts: threads of two of them on one core would only wait for each other.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
if WORKER and hasattr(os, "sched_setaffinity"):
    CORES = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {CORES[int(WORKER) % len(CORES)]})

# The user's defaults are none of the tests'.
os.environ["PYH2O_CONFIG"] = os.devnull
# A test that names no folder of its own must not save into the user's.
CHATS = tempfile.TemporaryDirectory(prefix="pyh2o-chats-")
os.environ["PYH2O_CHATS"] = CHATS.name

# Rich and Typer look at these when they are imported, before a test can set them.
for variable in ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TERMINAL_WIDTH"):
    os.environ.pop(variable, None)

# Their servers are on this machine, whatever else is behind a proxy.
for variable in ("NO_PROXY", "no_proxy"):
    os.environ[variable] = f"{os.environ.get(variable, '')},127.0.0.1,localhost".lstrip(",")

# Programs in the background are started with Ctrl-C ignored, and so is what they start themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest

import checkout  # noqa: F401
import pyh2o  # noqa: F401  # before any test imports llama_cpp, which then runs on its library
from cli_fakes import own_state
from random_cases import Cases, Randomness
from tiny_chat import write_chat_gguf
from tiny_gguf import write_tiny_gguf

RANDOMNESS = pytest.StashKey[Randomness]()


@pytest.fixture
def randomness(request: pytest.FixtureRequest) -> Randomness:
    request.node.stash[RANDOMNESS] = Randomness(request.node.name)
    return request.node.stash[RANDOMNESS]


@pytest.fixture
def seed(randomness: Randomness) -> int:
    """Of this test's random numbers, told when it fails."""
    return randomness.seed


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Random numbers."""
    return np.random.default_rng(seed)


@pytest.fixture
def dice(rng: np.random.Generator) -> random.Random:
    """Random numbers for choices of Python's own."""
    return random.Random(int(rng.integers(2**32)))


@pytest.fixture
def cases(randomness: Randomness) -> Cases:
    """Many cases in one test, each with random numbers of its own: told when one fails."""
    return randomness.cases


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and RANDOMNESS in item.stash:
        report.sections.append(("random numbers", str(item.stash[RANDOMNESS])))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each reason for skipped tests in one line; pytest -rs has a line for each test."""
    skipped = terminalreporter.stats.get("skipped", [])
    for reason, n in sorted(Counter(report.longrepr[2] for report in skipped).items()):
        terminalreporter.write_line(f"{n} x {reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what other seeds can tell more about."""
    for item in items:
        if "randomness" in getattr(item, "fixturenames", ()):
            item.add_marker("randomised")


@pytest.fixture(scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the settings in the test file's MODEL; "template" is a chat template."""
    file, settings = tmp_path_factory.mktemp("model") / "tiny.gguf", dict(request.module.MODEL)
    if template := settings.pop("template", None):
        return write_chat_gguf(file, template, **settings)
    return write_tiny_gguf(file, **settings)


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tests of the command line: a user with nothing but tmp_path."""
    own_state(tmp_path, monkeypatch)
