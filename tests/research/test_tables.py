"""How the tables of measurements are drawn on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from research.eval.fidelity_figures import FidelitySummary, fidelity_tables
from research.eval.output import draw_table
from research.eval.tables import TextTable

FULL = FidelitySummary(
    cache="full",
    policy="full",
    budget="",
    rows=0,
    capacity=0,
    text="sherlock.txt",
    tokens=4096,
    positions="original",
    first=1024,
    perplexity=22.74,
    nll=3.1241,
    nll_to_full=None,
    nll_to_full_error=None,
    nll_to_streaming=None,
    nll_to_streaming_error=None,
    gap_closed=None,
    kl_mean=0.0,
    kl_median=0.0,
    kl_90=0.0,
    kl_99=0.0,
    same_top=1.0,
    stretches=(21.5, 23.125),
)
OURS = FidelitySummary(
    **{
        **vars(FULL),
        "cache": "h2o-far, 20 %, dense",
        "rows": 819,
        "capacity": 1024,
        "perplexity": 23.06,
        "nll_to_full": 0.0139,
        "nll_to_full_error": 0.0021,
        "nll_to_streaming": -0.0123,
        "nll_to_streaming_error": 0.0034,
        "gap_closed": 0.58,
        "kl_mean": 0.0412,
        "kl_median": 0.0123,
        "kl_90": 0.1034,
        "kl_99": 0.4321,
        "same_top": 0.912,
    }
)

AT_80_COLUMNS = """\
sherlock.txt, 4,096 tokens, over those from 1,024 on

                         rows (at
 cache                      most)  perplexity        NLL - full
 ──────────────────────────────────────────────────────────────
 full                                   22.74
 h2o-far, 20 %, dense  819 (1024)       23.06  +0.0139 ± 0.0021


                                            gap      KL      KL   KL 90   KL 99
 cache                  NLL - streaming  closed    mean  median       %       %
 ──────────────────────────────────────────────────────────────────────────────
 full                                            0.0000  0.0000  0.0000  0.0000
 h2o-far, 20 %, dense  -0.0123 ± 0.0034     58%  0.0412  0.0123  0.1034  0.4321


                         same
                          top
 cache                  token
 ────────────────────────────
 full                  100.0%
 h2o-far, 20 %, dense   91.2%

"""


def drawn(table: TextTable, width: int) -> str:
    file = io.StringIO()
    draw_table(table, Console(file=file, width=width, markup=False, highlight=False))
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def test_whole_table_at_80_columns() -> None:
    table, stretches = fidelity_tables([FULL, OURS], 2048)
    assert drawn(table, 80) == AT_80_COLUMNS
    assert drawn(stretches, 80).count("h2o-far, 20 %, dense") == 1


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_cell_is_broken_or_left_out(width: int) -> None:
    table, _ = fidelity_tables([FULL, OURS], 2048)
    text = drawn(table, width)
    assert max(map(len, text.splitlines())) <= width
    assert all(cell in text for row in table.rows for cell in row)
    # A name is there once for each part, and all is in one part where there is room.
    assert (text.count(OURS.cache) == 1) == (width == 200)


def test_remarks_stand_below() -> None:
    table = TextTable("A title", ("cache", "figure"), (("full", "1"),), ("a remark",))
    assert drawn(table, 80).splitlines()[-1] == "a remark"
