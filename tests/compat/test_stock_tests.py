"""llama-cpp-python's own tests, with our class in the place of its `Llama`."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from llama_pin import cached_sdist, read_pin
from pyh2o import Llama
from pyh2o.errors import ModelError

TESTS = ("llama", "llama_grammar", "llama_chat_format", "llama_speculative")
VOCABULARY = "vendor/llama.cpp/models/ggml-vocab-llama-spm.gguf"

# Models come from the network there; tests that need one are skipped. Of scipy only they use
# anything.
CONFTEST = """
import sys, types
import huggingface_hub, pytest
import pyh2o, llama_cpp

llama_cpp.Llama = llama_cpp.llama.Llama = pyh2o.Llama
huggingface_hub.hf_hub_download = lambda *_, **__: pytest.skip("needs a model from the network")
scipy, special = types.ModuleType("scipy"), types.ModuleType("scipy.special")
scipy.special = special
special.log_softmax = None
sys.modules.update({"scipy": scipy, "scipy.special": special})
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the pinned source distribution that the tests need."""
    pin = read_pin()
    folder = tmp_path_factory.mktemp("sources")
    top = pin.sdist_name.removesuffix(".tar.gz")
    wanted = [f"{top}/tests/test_{name}.py" for name in TESTS] + [f"{top}/{VOCABULARY}"]
    with tarfile.open(cached_sdist(pin)) as archive:
        for name in wanted:
            file = archive.extractfile(name)
            assert file is not None
            path = folder / Path(name).relative_to(top)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.read())
    (folder / "tests" / "conftest.py").write_text(CONFTEST)
    return folder


def test_they_pass_where_they_need_no_network(sources: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="Hugging Face's package is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    result = subprocess.run(command, cwd=sources, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    summary = result.stdout.splitlines()[-1]
    n_passed = int(re.findall(r"(\d+) passed", summary)[0])
    assert n_passed == 8, summary


def test_a_vocabulary_alone_can_be_opened(sources: Path) -> None:
    with Llama(model_path=str(sources / VOCABULARY), vocab_only=True) as llm:
        assert not llm.evicting
        assert llm.tokenize(b"Hello World") == [1, 15043, 2787]
        assert llm.detokenize([1, 15043, 2787]) == b"Hello World"


def test_a_vocabulary_without_weights_is_no_model(sources: Path) -> None:
    with pytest.raises(ModelError, match="cannot load"):
        Llama(model_path=str(sources / VOCABULARY))
