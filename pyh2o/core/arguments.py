"""Load a model from the arguments of `Llama`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from llama_cpp.llama_tokenizer import LlamaTokenizer

from ..cache.settings import EvictionSettings
from ..library.rpc import parse_servers
from .model import READING, Model
from .parameters import FORMER, PARAMETER_NAMES, Parameters, check_names

_SETTINGS = tuple(field.name for field in fields(EvictionSettings))
# Arguments that are not passed to llama.cpp: those of `Model`, of llama_cpp and of pyh2o.
_OF_MODEL = ("evict", "n_ctx", "mmproj", "store_mib", "load_progress", "verbose")
_OWN = ("seed", "last_n_tokens_size", "lora_base", "draft_model", "tokenizer", "spm_infill")
_OF_CHATS = ("chat_format", "chat_handler")
_OURS = ("recall_archive", "rpc_servers", "prompt_progress")
_KNOWN = {*_SETTINGS, *PARAMETER_NAMES, *_OF_MODEL, *_OWN, *_OF_CHATS, *_OURS, *FORMER}


def load_model(
    model_path: str,
    *,
    n_texts: int = 1,
    shared: bool = False,
    reading: int = READING,
    **arguments: Any,
) -> Model:
    """Load a model from the arguments of `Llama`, and those of `Model` for several texts."""
    check_names(arguments, _KNOWN)

    def given(names: Sequence[str]) -> dict[str, Any]:
        return {name: arguments[name] for name in names if name in arguments}

    parameters = Parameters(**given(PARAMETER_NAMES))
    if arguments.get("draft_model") is not None:
        parameters = replace(parameters, logits_all=True)
    model = Model(
        model_path,
        EvictionSettings(**given(_SETTINGS)),
        n_texts=n_texts,
        shared=shared,
        reading=reading,
        parameters=parameters,
        rpc_servers=parse_servers(arguments.get("rpc_servers")),
        **given(_OF_MODEL),
    )
    tokenizer = arguments.get("tokenizer")
    model.tokenizer = None if type(tokenizer) is LlamaTokenizer else tokenizer
    model.spm_infill = arguments.get("spm_infill", False)
    name, handler = (arguments.get(each) for each in _OF_CHATS)
    if name is not None or handler is not None:
        model.chat.name, model.chat.handler = name, handler
    elif model.verbose:
        print(f"pyh2o: chat format {model.chat.name}", file=sys.stderr)
    return model
