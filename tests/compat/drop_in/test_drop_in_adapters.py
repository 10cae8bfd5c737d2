"""LoRA adapters."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFWriter

from drop_in_cases import PROMPT, ROOMY, SMALL, WINDOW, complete
from pyh2o.errors import ModelError, StateError
from same_results import as_llama_cpp_names, assert_equal
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama, tiny_parent


def write_lora(path: Path) -> Path:
    """A random adapter of rank 4 for the queries and the feed-forward layers of a tiny model."""
    rng = np.random.default_rng(8)
    writer = GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    for name, n_out, n_in in (("attn_q", 128, 128), ("ffn_up", 192, 128)):
        for layer in range(3):
            tensor = f"blk.{layer}.{name}.weight"
            down, up = rng.standard_normal((4, n_in)), rng.standard_normal((n_out, 4))
            writer.add_tensor(f"{tensor}.lora_a", (down / np.sqrt(n_in)).astype(np.float32))
            writer.add_tensor(f"{tensor}.lora_b", up.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_lora_adapter_equals_the_parent_s(
    path: Path, parent: llama_cpp.Llama, tmp_path: Path
) -> None:
    lora = {"lora_path": str(write_lora(tmp_path / "lora.gguf")), "lora_scale": 0.5}
    stock = tiny_parent(path, n_ctx=WINDOW, logits_all=True, **lora)
    with contextlib.closing(stock), tiny_llama(path, logits_all=True, **ROOMY, **lora) as ours:
        results = [complete(llm, PROMPT, "log probabilities") for llm in (stock, ours)]
    assert_equal(results[0], as_llama_cpp_names(results[1]))
    plain = complete(parent, PROMPT, "log probabilities")
    assert results[0]["choices"][0]["text"] != plain["choices"][0]["text"]


def test_a_state_is_of_its_adapter(path: Path, tmp_path: Path) -> None:
    """An adapter of another name is the same one."""
    lora = write_lora(tmp_path / "lora.gguf")
    copy = shutil.copy(lora, tmp_path / "copy.gguf")
    with tiny_llama(path, **SMALL, lora_path=str(lora), lora_scale=0.5) as llm:
        llm.eval(tokens := [1, 40, 41])
        state = llm.kv_state()
    with tiny_llama(path, **SMALL, lora_path=str(copy), lora_scale=0.5) as llm:
        llm.load_kv_state(state, tokens)
    for other in ({}, {"lora_path": str(lora)}):
        with tiny_llama(path, **SMALL, **other) as llm, pytest.raises(StateError, match="LoRA"):
            llm.load_kv_state(state, tokens)


@pytest.mark.parametrize("settings", [SMALL, {"n_ctx": WINDOW, "evict": False}], ids=str)
def test_a_file_that_is_no_adapter_is_refused(
    path: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The process ended."""
    (tmp_path / "adapter.safetensors").write_bytes(b"another format")
    whole = write_lora(tmp_path / "lora.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=1, n_head=2)
    files = [tmp_path / name for name in ("adapter.safetensors", "cut.gguf", "none.gguf")]
    for file in (*files, path, tmp_path):
        with pytest.raises(ModelError, match="cannot load the LoRA adapter") as error:
            tiny_llama(path, lora_path=str(file), **settings)
        assert "\n" not in str(error.value)
    with pytest.raises(ModelError, match="for another model"):
        tiny_llama(other, lora_path=str(tmp_path / "lora.gguf"), **settings)
