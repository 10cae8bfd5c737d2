"""What the tests of session files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyh2o.errors import SessionError
from pyh2o.sessions.session_file import Session, read_session

HEADER = {
    "model": {"file": "a.gguf"},
    "settings": {"ctx": 100, "rope_freq_scale": 0.1},
    "turns": [{"user": 'say "\ud800 ñ 日本"', "answer": "\n\t"}],
}


def reread(path: Path) -> Session:
    return read_session(path, "conversation")


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def one_line(error: pytest.ExceptionInfo[SessionError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message
