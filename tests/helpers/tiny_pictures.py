"""A tiny model with a projector, and mtmd's results with both."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf import TokenType

from pyh2o import Llama
from pyh2o.core.projector import is_of_picture
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import EXACT_ROWS, tiny_llama, tiny_parent
from tiny_projector import write_tiny_projector

WINDOW = 1024
ALL: dict[str, Any] = {"n_ctx": WINDOW, "hh": WINDOW // 2, "recent": WINDOW // 2}
FEW: dict[str, Any] = {"n_ctx": WINDOW, "hh": 24, "recent": 24, "slack": 16}
TAIL = " and then the hare runs over the hill, " * 3


def write_models(folder: Path, *, kind: str = "mlp", **sizes: Any) -> tuple[Path, Path]:
    """Write a model and its projector."""
    model = write_tiny_gguf(folder / "tiny.gguf", seed=3, chat_template=CHAT_TEMPLATE, **sizes)
    return model, write_tiny_projector(folder / "mmproj.gguf", kind=kind)


def write_shaped(folder: Path, arch: str = "qwen2vl", **sizes: Any) -> tuple[Path, Path]:
    """Write a model whose pictures have rows and columns (M-RoPE), and its projector."""
    marks = dict.fromkeys(["<|vision_start|>", "<|vision_end|>"], TokenType.CONTROL)
    return write_models(folder, kind=f"{arch}_merger", arch_variant=arch, marks=marks, **sizes)


def tiny_seer(models: tuple[Path, Path], **settings: Any) -> Llama:
    """Return our class with both."""
    return tiny_llama(models[0], mmproj=str(models[1]), **settings)


def mark_of(llm: Llama, picture: bytes) -> str:
    """Return the marker of a picture in a prompt."""
    assert llm.text.model.projector is not None
    return llm.text.model.projector.mark(picture)


def tokens_of(llm: Llama, prompt: str, *pictures: bytes) -> list[int]:
    """Return the tokens of a prompt with {} for each picture."""
    marks = [mark_of(llm, picture) for picture in pictures]
    return llm.tokenize(prompt.format(*marks).encode(), special=True)


def first_of_picture(tokens: list[int]) -> int:
    return next(n for n, token in enumerate(tokens) if is_of_picture(token))


def logits_after(llm: Llama, tokens: list[int]) -> np.ndarray:
    llm.reset()
    llm.eval(tokens)
    return llm.text.logits[-1].copy()


def logits_of_mtmd(
    models: tuple[Path, Path], prompt: str, pictures: Sequence[bytes]
) -> tuple[np.ndarray, int]:
    """Return llama.cpp's logits after a prompt with {} for each picture, and its positions."""
    prompt = prompt.replace("{}", "<__media__>")
    with closing(tiny_parent(models[0], n_ctx=1024, **EXACT_ROWS)) as parent:
        return eval_by_mtmd(parent, models[1], prompt, pictures)


def eval_by_mtmd(
    llm: llama_cpp.Llama, projector: Path, prompt: str, pictures: Sequence[bytes]
) -> tuple[np.ndarray, int]:
    """Do the same in a given context with an empty text."""
    from llama_cpp import mtmd_cpp as mtmd

    params = mtmd.mtmd_context_params_default()
    params.n_threads, params.warmup = 1, False
    context = mtmd.mtmd_init_from_file(str(projector).encode(), llm.model, params)
    bitmaps = (ctypes.c_void_p * len(pictures))()
    for number, data in enumerate(pictures):
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        bitmaps[number] = mtmd.mtmd_helper_bitmap_init_from_buf(context, buffer, len(data), False)
    text = prompt.encode()
    given = mtmd.mtmd_input_text(text, len(text), True, True)
    chunks = mtmd.mtmd_input_chunks_init()
    count = ctypes.c_int32()
    assert not mtmd.mtmd_tokenize(context, chunks, ctypes.byref(given), bitmaps, len(pictures))
    assert not mtmd.mtmd_helper_eval_chunks(
        context, llm.ctx, chunks, 0, 0, 512, True, ctypes.byref(count)
    )
    found = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    logits = np.ctypeslib.as_array(found, (llm.n_vocab(),)).copy()
    mtmd.mtmd_input_chunks_free(chunks)
    for bitmap in bitmaps:
        mtmd.mtmd_bitmap_free(bitmap)
    mtmd.mtmd_free(context)
    return logits, count.value
