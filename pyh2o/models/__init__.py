"""Where models live, what they are called, and how they get there."""

from __future__ import annotations

from .folder import Fetched, Progress, models_folder
from .names import ModelFile, demo_model_path, find_model, list_models
from .packaged import DEMO, GEMMA, PACKAGED, QWEN, PackagedModel, fetch_model

__all__ = [
    "DEMO",
    "GEMMA",
    "PACKAGED",
    "QWEN",
    "Fetched",
    "ModelFile",
    "PackagedModel",
    "Progress",
    "demo_model_path",
    "fetch_model",
    "find_model",
    "list_models",
    "models_folder",
]
