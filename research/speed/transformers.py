"""Hugging Face transformers on the same weights, alone or with kvpress."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pyh2o.bench.process import Use
from pyh2o.errors import MissingPackageError

from .caches import SINKS

PACKAGES = ("torch", "transformers", "gguf", "accelerate")


def check_packages() -> None:
    """Refuse to start without what is needed.

    Raises:
        MissingPackageError: names what is missing, and the extra that brings it.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"--compare transformers needs the package {', '.join(missing)}: "
            "pip install 'pyh2o-llm[compare]'"
        )


def has_kvpress() -> bool:
    """Whether kvpress can be compared, too."""
    return find_spec("kvpress") is not None


def open_transformers(path: str, *, threads: int, on_gpu: bool, rows: int = 0) -> TransformersModel:
    """Load the model from its GGUF file, unpacked to float32 (float16 on a GPU).

    Args:
        path: of the file.
        threads: of the CPU.
        on_gpu: whether to compute there, if there is one.
        rows: that kvpress keeps of a prompt; 0 is a cache that holds all tokens.
    """
    torch = import_module("torch")
    torch.set_num_threads(threads)
    on_gpu = on_gpu and torch.cuda.is_available()
    file = Path(path).resolve()
    model = import_module("transformers").AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, torch_dtype=torch.float16 if on_gpu else torch.float32
    )
    model = model.to("cuda" if on_gpu else "cpu").eval()
    return KVPressModel(model, rows) if rows else TransformersModel(model)


class TransformersModel:
    """A model with a DynamicCache, which holds all tokens."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._torch = import_module("torch")
        self._new_cache = import_module("transformers").DynamicCache
        self._cache = self._new_cache()
        self._n_tokens = 0
        # Logits of the last token are all that is needed; the argument was renamed in 4.50.
        names = inspect.signature(model.forward).parameters
        keep = next((n for n in ("logits_to_keep", "num_logits_to_keep") if n in names), None)
        self._last_logits = {} if keep is None else {keep: 1}

    @property
    def position(self) -> int:
        return self._n_tokens

    def read(self, tokens: Sequence[int], *, last: bool) -> None:
        self._evaluate(tokens)
        self._n_tokens += len(tokens)

    def generate(self, token: int) -> None:
        self._evaluate([token])
        self._n_tokens += 1

    def reset(self) -> None:
        self._cache = self._new_cache()
        self._n_tokens = 0

    def use(self) -> Use:
        tensors = _tensors(self._cache)
        n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        cells = max((tensor.shape[-2] for tensor in tensors), default=0)
        return Use(n_bytes, cells, used=cells)

    def _evaluate(self, tokens: Sequence[int]) -> None:
        torch = self._torch
        device = self._model.device
        ids = torch.tensor([list(tokens)], device=device)
        # The cache may hold fewer tokens than the text has.
        positions = torch.arange(self._n_tokens, self._n_tokens + len(tokens), device=device)
        with torch.inference_mode():
            output = self._model(
                input_ids=ids,
                position_ids=positions[None],
                past_key_values=self._cache,
                use_cache=True,
                **self._last_logits,
            )
            # Waits for a GPU.
            output.logits[0, -1, 0].item()


class KVPressModel(TransformersModel):
    """kvpress's StreamingLLM: it drops rows once, when the whole prompt has been read.

    Its presses work on a prompt that is evaluated in one go.
    """

    def __init__(self, model: Any, rows: int) -> None:
        super().__init__(model)
        self._rows = rows
        self._pending: list[int] = []

    @property
    def position(self) -> int:
        return self._n_tokens + len(self._pending)

    def read(self, tokens: Sequence[int], *, last: bool) -> None:
        self._pending += tokens
        if not last:
            return
        prompt, self._pending = self._pending, []
        with self._press(len(prompt)):
            super().read(prompt, last=True)

    def reset(self) -> None:
        self._pending = []
        super().reset()

    def _press(self, n_tokens: int) -> Any:
        if n_tokens <= self._rows:
            return nullcontext()
        press = import_module("kvpress").StreamingLLMPress(
            compression_ratio=1 - self._rows / n_tokens, n_sink=SINKS
        )
        return press(self._model)


def _tensors(cache: Any) -> list[Any]:
    """Keys and values of all layers; before transformers 4.54 they lay in two lists."""
    if hasattr(cache, "layers"):
        found = [(layer.keys, layer.values) for layer in cache.layers]
    else:
        found = list(zip(cache.key_cache, cache.value_cache, strict=True))
    # A layer that has seen no token yet has none.
    return [tensor for pair in found for tensor in pair if hasattr(tensor, "shape")]
