"""The model that measurements are tested with."""

from __future__ import annotations

from pathlib import Path

import pytest

from measured import TRAINED
from tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_gguf(folder / "tiny.gguf", seed=3, n_ctx_train=TRAINED)
