"""What a session depends on: the model that its text was written with, and the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from ..core.model import Model
from ..core.parameters import KV_TYPES
from ..errors import SessionError
from ..models.file_identity import identify
from .records import Count, Range, Scalar, value_of

# The settings of a cache by their names (see `settings_identity`).
Settings = dict[str, Scalar | dict[str, Scalar]]
# Of those that the command line takes from a session.
_SETTING_TYPES: dict[str, Any] = {
    "evict": bool,
    **dict.fromkeys(("ctx", "heavy", "recent", "pinned", "slack", "n_pos", "recall"), Count),
    **dict.fromkeys(("policy", "positions", "recall_type", "type_k", "type_v"), str),
}
_ROPE = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)


@dataclass(frozen=True)
class ModelIdentity:
    """What tells a model from others.

    Attributes:
        file: name of the file.
        bytes: its size.
        sha256: hash of its header, in hexadecimal digits.
        path: where to look for it first; the same model elsewhere is as good.
    """

    file: str
    bytes: Annotated[int, Range(0, 2**63 - 1)]
    sha256: str
    path: str = ""

    def is_same(self, other: ModelIdentity) -> bool:
        """Whether it is the same model, wherever its file lies."""
        return (self.sha256, self.bytes) == (other.sha256, other.bytes)


def model_identity(model: Model) -> ModelIdentity:
    """What tells a model from others."""
    file = model.file
    return ModelIdentity(**file.record(), path=str(file.path))


def file_identity(path: str) -> dict[str, Any]:
    """What tells a model file from others, without loading it: its name, size and header's hash.

    Raises:
        SessionError: the file is gone.
    """
    try:
        return identify(path).record()
    except OSError as error:
        raise SessionError(
            f"cannot tell which model {path} is: {error.strerror}; put the file back"
        ) from error


def settings_identity(model: Model) -> dict[str, Any]:
    """The settings that a state of the cache depends on, and how the text goes on after it.

    Threads, batch sizes and devices may differ: they change the rounding of a result, no more.
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
        **{name: getattr(params, name) for name in _ROPE},
        "lora": lora,
        "kv_overrides": model.parameters.kv_overrides,
    }


def check_settings(settings: Settings) -> None:
    """Refuse settings that the command line could not read.

    Raises:
        ValueError: one is something else than it should be.
    """
    for name in settings.keys() & _SETTING_TYPES.keys():
        value_of(_SETTING_TYPES[name], settings[name], name)
