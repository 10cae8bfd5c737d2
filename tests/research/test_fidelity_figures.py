"""Tables, and the figures of fidelity in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from research.eval.fidelity_figures import fidelity_tables, over_texts
from research.eval.tables import column, table_of

FIGURES: dict[str, Any] = {
    "text": "a.txt",
    "tokens": 4096,
    "cache": "h2o, 20 %",
    "policy": "h2o",
    "budget": "20 %",
    "rows": 819,
    "capacity": 1024,
    "recall": 0,
    "first": 1024,
    "perplexity": 22.345,
    "nll": 3.1067,
    "nll_to_full": 0.0123,
    "nll_to_full_error": 0.0045,
    "nll_to_streaming": -0.02,
    "nll_to_streaming_error": None,
    "gap_closed": 0.615,
    "kl_mean": 0.0321,
    "same_top": 0.9123,
    "attention": None,
    "stretches": (None, 21.5),
}


def test_fidelity_tables() -> None:
    nothing = {"nll_to_full": None, "nll_to_full_error": None, "gap_closed": None}
    full = {**FIGURES, "cache": "full", "rows": 0, "capacity": 0, **nothing}
    first, second = fidelity_tables([full, FIGURES], 2048)
    assert first.title == "a.txt, 4,096 tokens, over those from 1,024 on"
    assert first.rows[0][:4] == ("full", "", "22.34", "")
    assert first.rows[1] == (
        *("h2o, 20 %", "819 (1024)", "22.34", "+0.0123 ± 0.0045", "-0.0200", "62%"),
        *("0.0321", "91.2%"),
    )
    finding = {**FIGURES, "recall": 200, "attention": 0.0625}
    (with_archive, _) = fidelity_tables([full, finding], 2048)
    assert with_archive.headings == (*first.headings, "attention found")
    assert with_archive.rows[1][1] == "619 (1024) + 200"
    assert [row[-1] for row in with_archive.rows] == ["", "6.2%"]
    assert second.headings == ("cache", "4,096")  # of the first stretch no token counts
    assert second.rows[1] == ("h2o, 20 %", "21.50")


def test_several_texts_share_a_table_and_have_one_together() -> None:
    other = {**FIGURES, "cache": "h2o, 10 %", "gap_closed": None}
    second = {
        **FIGURES,
        "text": "b.txt",
        "gap_closed": -0.2,
        "nll_to_full": 0.0323,
        "kl_mean": 0.0121,
    }
    third = {**FIGURES, "text": "c.txt", "gap_closed": None, "same_top": 0.5}
    shown = [FIGURES, other, second, {**other, "text": "b.txt"}, third]
    figures, _, together = fidelity_tables(shown, 2048)
    assert figures.title == "3 texts, 4,096 tokens, over those from 1,024 on"
    assert figures.headings[0] == "text and cache"
    assert [row[0] for row in figures.rows[:3]] == [
        *("a.txt, h2o, 20 %", "a.txt, h2o, 10 %", "b.txt, h2o, 20 %"),
    ]
    assert together.title == "3 texts together, 4,096 tokens"
    assert together.rows[0] == (
        *("h2o, 20 %", "819 (1024)", "+0.0190", "21%", "-20%", "b.txt", "2"),
        *("0.0254", "77.5%"),
    )
    assert together.rows[1][3:7] == ("", "", "", "0")
    (one, _) = over_texts([{**FIGURES, "nll_to_full": None}, other])
    assert (one["nll_to_full"], one["gap_closed"], one["worst_text"]) == (None, 0.615, "a.txt")


def test_markdown() -> None:
    records = [
        {"name": "a|b", "x": 1.5, "x_error": 0.25, "y": None},
        {"name": "c", "x": None, "y": None},
    ]
    columns = [column("name", "name"), column("x", "x", "+.1f±"), column("y", "y", ".0%")]
    table = replace(table_of("Title", records, columns), remarks=("a remark",))
    assert table.markdown() == (
        "**Title**\n\n| name | x |\n|---|---:|\n| a\\|b | +1.5 ± 0.2500 |\n| c |  |\n\na remark\n"
    )
