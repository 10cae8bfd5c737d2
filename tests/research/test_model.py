"""What is known of the machine, the model and its texts."""

from __future__ import annotations

from pathlib import Path

from measured import TRAINED
from pyh2o.library.devices import machine_facts
from pyh2o.library.machine import instruction_sets
from pyh2o.system import bandwidth
from research.eval.model import english_text, read_model, repeated_tokens
from tiny_llama import tiny_llama


def test_bandwidth_is_measured() -> None:
    assert bandwidth.bytes_per_second(2, size=1 << 20, tries=2) > 0


def test_machine_facts() -> None:
    facts = machine_facts(3)
    assert facts["threads"] == 3
    assert facts["cpu"]
    assert not instruction_sets() or set(facts["instructions"]) <= {*instruction_sets()}
    assert facts["llama_cpp_commit"]


def test_model_and_text(path: Path) -> None:
    facts = read_model(path)
    with tiny_llama(path, n_ctx=TRAINED, evict=False) as llm:
        expected = llm.tokenize(b"one text. ")
        again = llm.tokenize(b"one text. ", add_bos=False)
    assert facts.n_ctx_train == TRAINED
    assert facts.weight_bytes < facts.file_bytes == path.stat().st_size
    tokens = repeated_tokens(path, "one text. ", len(expected) + 2 * len(again))
    assert list(tokens) == [*expected, *again, *again]
    assert repeated_tokens(path, "one text. ", 3) == tuple(expected[:3])
    assert len(english_text()) > 100_000
