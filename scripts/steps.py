"""The steps of a check that takes minutes: what is done is said, and what fails ends it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(
    command: Sequence[str | Path],
    variables: Mapping[str, str] | None = None,
    capture: bool = False,
) -> str:
    """Run a program in the checkout.

    Args:
        command: the program and its arguments.
        variables: added to the environment.
        capture: whether what it prints is wanted.

    Returns:
        What it has printed, if that is captured.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(variables or {})},
        check=True,
        stdout=subprocess.PIPE if capture else None,
        text=True,
    )
    return result.stdout or ""


def say(text: str) -> None:
    """What comes next."""
    print(f"==> {text}", flush=True)
