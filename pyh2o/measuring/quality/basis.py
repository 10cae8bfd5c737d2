"""What the units of a file of results have in common, by the names that people know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...llama import check_file
from ...sessions.session_file import file_identity
from ...system.machine import machine_facts
from .caches import CacheSettings, Compute


def basis_of(
    model: Path, compute: Compute, caches: CacheSettings, **options: Any
) -> dict[str, Any]:
    """The model, the program and the settings that change the numbers of every unit.

    What only decides which units there are, such as budgets and texts, is no part of it: a later
    run may add some.

    Args:
        model: a GGUF file.
        compute: a GPU rounds otherwise than the CPU.
        caches: what is compared.
        **options: further settings of the command, by the names of its options.

    Raises:
        ModelError: the file is missing or no model.
    """
    check_file(str(model))
    identity = file_identity(str(model))
    facts = machine_facts(1)
    return {
        "--model": f"{identity['file']} ({identity['bytes']} bytes, {identity['sha256'][:12]})",
        **{name: facts[name] for name in ("pyh2o", "llama_cpp_commit", "patches")},
        "--gpu-layers": compute.gpu_layers,
        "--recent-share": caches.recent_share,
        "--pinned": caches.pinned,
        **{f"--{name.replace('_', '-')}": value for name, value in options.items()},
    }
