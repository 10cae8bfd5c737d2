"""A session and its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyh2o.sessions.session_file import Session, write_session
from session_files import HEADER


@pytest.fixture
def session(rng: np.random.Generator) -> Session:
    return Session(
        kind="conversation",
        header=HEADER,
        tokens=rng.integers(0, 2**31 - 1, 50).tolist(),
        kv=rng.bytes(3000),
    )


@pytest.fixture
def path(tmp_path: Path, session: Session) -> Path:
    path = tmp_path / "chat.session"
    write_session(path, session)
    return path
