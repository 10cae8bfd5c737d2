"""The identity of a model, and of the settings on which a KV cache depends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from ..cache.settings import saved_names
from ..core.model import Model
from ..core.parameters import KV_TYPES, ROPE_NAMES
from .records import Scalar, in_one_line

# Cache settings by name (see `settings_identity`).
Settings = dict[str, Scalar | dict[str, Scalar]]
# Settings and their command-line options.
_OPTIONS = {
    "ctx": "--ctx",
    **{saved: f"--{name.replace('_', '-')}" for name, saved in saved_names().items()},
    "type_k": "--kv-type",
    "type_v": "--kv-type",
}


@dataclass(frozen=True)
class ModelIdentity:
    """The identity of a model's file.

    Attributes:
        file: name of the file.
        bytes: size of the file.
        sha256: hash of its header, in hexadecimal digits.
        path: last known path; the same model may be elsewhere.
    """

    file: str
    bytes: Annotated[int, range(2**63)]
    sha256: str
    path: str = ""

    def is_same(self, other: ModelIdentity) -> bool:
        """Return whether it is the same model, at any path."""
        return (self.sha256, self.bytes) == (other.sha256, other.bytes)

    def why_reread(self) -> str:
        """Return why a text of this model is read again by another model."""
        return f"it was saved with another model ({self.file})" if self.file else "it was imported"


# The model of an imported text.
IMPORTED = ModelIdentity("", 0, "")


def model_identity(model: Model) -> ModelIdentity:
    """Return the identity of a model."""
    file = model.file
    return ModelIdentity(**file.record(), path=str(file.path))


def settings_identity(model: Model) -> dict[str, Any]:
    """Return the settings on which a state of the cache depends.

    Threads, batch sizes and devices are not among them, as they only change rounding.
    """
    params = model.context_params
    lora = (
        None
        if model.lora_file is None
        else model.lora_file.record() | {"scale": model.parameters.lora_scale}
    )
    types = {number: name for name, number in KV_TYPES.items()}
    return {
        "evict": model.evicting,
        "ctx": model.window,
        **({} if model.budget is None else model.budget.saved()),
        "type_k": types.get(params.type_k, str(params.type_k)),
        "type_v": types.get(params.type_v, str(params.type_v)),
        "flash_attn": int(params.flash_attn_type),
        **{name: getattr(params, name) for name in ROPE_NAMES},
        "lora": lora,
        "kv_overrides": model.parameters.kv_overrides,
    }


def difference(saved: Mapping[str, Any], model: Model) -> str:
    """Return the first difference of saved settings from those of a model; "" for none."""
    now = settings_identity(model)
    for name in {**now, **saved}:
        if name not in now or name not in saved or saved[name] != now[name]:
            return f"{_shown(name, saved)}, and the model is loaded {_shown(name, now)}"
    return ""


def _shown(name: str, settings: Mapping[str, Any]) -> str:
    """Return a setting as a phrase with its command-line option."""
    if name == "evict":
        return "with eviction" if settings.get(name) else "with --no-evict"
    option = _OPTIONS.get(name) or in_one_line(name)
    if name not in settings:
        return f"without {option}"
    value = settings[name]
    text = value if isinstance(value, str) else json.dumps(value)
    return f"with {option} {in_one_line(text)}"
