"""Tables of records, in Markdown."""

from __future__ import annotations

from dataclasses import replace

from research.eval.tables import column, table_of


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
