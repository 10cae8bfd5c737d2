"""Rows of the archive that its file has lost, computed again from their text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import Llama


def restore(llm: Llama) -> None:
    """Read the text again as far as rows of the archive are lost, and go back to where it was.

    What is read again sees the pinned first tokens, what eviction leaves, and what it finds among
    the rest. If anything is raised meanwhile, text and cache are as before.

    Args:
        llm: a model with an archive.
    """
    archive, budget = llm.archive, llm.budget
    if archive is None or budget is None or archive.lost.n_tokens == 0:
        return
    lost, n_pinned = archive.lost, llm.kv.pinned
    tokens: list[int] = llm.input_ids[: llm.n_tokens].tolist()
    state = llm.kv_state()
    try:
        with archive.keeping_file():
            llm.reset()
        llm.pin(n_pinned)
        archive.restore(lost)
        # So much later at most all tokens before have left the recent ones.
        llm.eval(tokens[: lost.end + budget.capacity])
    finally:
        with archive.keeping_file():
            llm.load_kv_state(state, tokens)
