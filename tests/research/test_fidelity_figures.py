"""Figures of several texts together."""

from __future__ import annotations

from typing import Any

import pytest

from research.eval.fidelity_figures import over_texts


def figures(text: str, **changed: Any) -> dict[str, Any]:
    own = {"cache": "h2o, 20 %", "text": text, "gap_closed": 0.6}
    return {**own, "nll_to_full": 0.01, "kl_mean": 0.03, "same_top": 0.9, **changed}


def test_each_text_counts_as_much_and_the_worst_is_named() -> None:
    """A text without a clear gap counts for all but the gap."""
    worse = figures("b.txt", gap_closed=-0.2, nll_to_full=0.04)
    unclear = figures("c.txt", gap_closed=None, same_top=0.6)
    own, full = over_texts([figures("a.txt"), worse, figures("a.txt", cache="full"), unclear])
    means = [own[name] for name in ("nll_to_full", "gap_closed", "kl_mean", "same_top")]
    assert means == pytest.approx([0.02, 0.2, 0.03, 0.8])
    assert (own["worst"], own["worst_text"], own["clear"]) == (-0.2, "b.txt", 2)
    assert full["clear"] == 1
