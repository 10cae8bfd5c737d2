"""What the rounds of caches come to: figures, tables, files and pictures."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import Any

import pytest

from needed import needed
from research.eval.caches import FULL_CACHE, MeasuredCache
from research.speed import table
from research.speed.figures import (
    Basis,
    Figures,
    HistoryResult,
    Range,
    Report,
    as_csv,
    as_json,
    full_bytes,
    history_result,
)
from research.speed.messages import KVUse
from research.speed.turns import (
    CacheRun,
    Reading,
    Round,
)

MIB = 2**20
STOCK = replace(FULL_CACHE, cells=200)
FLASH = replace(STOCK, name="full, flash attention", flash_attention=True)
OURS = MeasuredCache("20 %", policy="h2o", cells=100, rows=40)
BASIS = Basis(full_bytes=8 * MIB, weight_bytes=3 * MIB, bytes_per_second=100 * MIB)


def run_of(cache: MeasuredCache, *seconds: float, **changes: Any) -> CacheRun:
    """Rounds of 10 tokens that take so long, over a MiB of rows; 30 tokens were read in 6 s."""
    rounds = tuple(Round(10, one, 1, 0.1, MIB) for one in seconds)
    run = CacheRun(cache, 30, (Reading(30, 30, 6.0),), rounds, KVUse(2 * MIB, 0, 100, 50), 7)
    return replace(run, **changes)


def figures_of(*runs: CacheRun, basis: Basis = BASIS) -> tuple[Figures, ...]:
    return history_result(30, runs, basis).figures


def test_figures() -> None:
    [figures] = figures_of(run_of(OURS, 1.0, 2.0, 4.0))
    assert figures == Figures(
        cache="20 %",
        position=30,
        kv_bytes=2 * MIB,
        share_of_full=0.25,
        peak_bytes=7,
        device_bytes=0,
        archive_bytes=0,
        found_share=None,
        read_per_second=5.0,
        first_token_seconds=6.2,
        generated_per_second=Range(5.0, 2.5, 10.0),
        ratio=None,
        compactions=3,
        compaction_share=pytest.approx(0.3 / 7),
        compaction_seconds=pytest.approx(0.1),
        bytes_per_token=4 * MIB,
        roofline_per_second=25.0,
        roofline_share=0.2,
    )


def test_ratio_is_that_of_each_round_to_the_better_stock_mode() -> None:
    slow, fast, ours = figures_of(
        run_of(STOCK, 9.0, 9.0, 1.0), run_of(FLASH, 2.0, 4.0, 6.0), run_of(OURS, 1.0, 1.0, 2.0)
    )
    assert fast.ratio == Range(1.0, 1.0, 1.0)
    assert ours.ratio == Range(pytest.approx(3.0), pytest.approx(2.0), pytest.approx(4.0))
    assert slow.ratio == Range(pytest.approx(4 / 9), pytest.approx(2 / 9), pytest.approx(6.0))


def test_q8_and_short_texts_are_no_measure_for_others() -> None:
    q8 = replace(STOCK, name="full, q8_0", kv_type="q8_0")
    short = replace(STOCK, name="full at 40 rows", cells=100, text=40)
    *_, ours = figures_of(
        run_of(STOCK, 4.0), run_of(q8, 1.0), run_of(short, 1.0), run_of(OURS, 2.0)
    )
    assert ours.ratio == Range(2.0, 2.0, 2.0)


def test_tokens_that_need_not_be_read_again_count_for_the_first_token() -> None:
    readings = (Reading(10, 10, 2.0), Reading(20, 15, 3.0))
    [figures] = figures_of(run_of(OURS, 1.0, readings=readings))
    assert figures.first_token_seconds == pytest.approx(2.0 + 4.0 + 0.1)
    assert figures.read_per_second == 5.0


def test_figures_that_there_are_not() -> None:
    rounds = (Round(10, 1.0, 0, 0.0, MIB),)
    basis = replace(BASIS, bytes_per_second=None)
    [figures] = figures_of(run_of(OURS, readings=(), rounds=rounds), basis=basis)
    assert figures.read_per_second is None
    assert figures.first_token_seconds == 0.1
    assert figures.compaction_seconds is None
    assert figures.roofline_per_second is None
    assert figures.roofline_share is None


@pytest.mark.parametrize(("kv_type", "per_cell"), [("f16", 2), ("f32", 4), ("q8_0", 34 / 32)])
def test_full_bytes_from_any_cache(kv_type: str, per_cell: float) -> None:
    use = KVUse(round(per_cell * 3200), 999, 100, 0)
    assert full_bytes(use, kv_type, 1000) == 2 * 32 * 1000


def report() -> Report:
    """Two caches at two histories; the third was given up."""
    lost = MeasuredCache("10 %", policy="h2o", cells=100)
    runs = [run_of(STOCK, 2.0, 4.0), run_of(OURS, 1.0, 1.0)]
    return Report(
        machine={
            "cpu": "a processor",
            "instructions": ["avx2", "fma"],
            "threads": 1,
            "model": "tiny.gguf",
            "model_file_bytes": 2_000_000,
            "pyh2o": "1.0",
            "llama_cpp_commit": "abc",
            "gpus": [],
        },
        settings={"histories": [0, 30], "rounds": 2, "n": 10, "window": 200},
        basis=BASIS,
        caches=(STOCK, OURS, lost),
        histories=(
            history_result(0, [replace(run, readings=()) for run in runs], BASIS),
            history_result(30, runs, BASIS),
        ),
        failures=(("10 %", "it fell over"),),
        notes=("a note",),
        complete=True,
    )


def test_json_has_the_rounds_and_csv_the_same_figures() -> None:
    data = json.loads(as_json(report()))
    lines = list(csv.DictReader(io.StringIO(as_csv(report()))))
    assert data["failures"] == {"10 %": "it fell over"}
    figures = [
        {"history": history["history"], **figures}
        for history in data["histories"]
        for figures in history["figures"]
    ]
    assert len(figures) == len(lines) == 4
    assert figures[3]["rounds"][0]["seconds"] == 1.0
    for one, line in zip(figures, lines, strict=True):
        assert int(line["history"]) == one["history"]
        assert line["cache"] == one["cache"]
        assert float(line["ratio"]) == one["ratio"]["median"]
        assert float(line["generated_per_second_high"]) == one["generated_per_second"]["high"]
        assert line["read_per_second"] == ("" if one["history"] == 0 else "5.0")


def test_markdown() -> None:
    whole = report()
    text = table.history_table(whole, whole.histories[1]).markdown()
    assert text == (
        "**After 30 tokens of text**\n"
        "\n"
        "| cache | KV memory | of full | peak MiB | read tok/s | first token s | generate tok/s "
        "(range) | x full (range) | compactions, % of time | of roofline |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
        "| full | 2.0 MiB | 25.0% | 0 | 5 | 6.27 | 3.8 (2.5-5.0) | 1.00 (1.00-1.00) | 2, 3.3% "
        "| 15% |\n"
        "| 20 % | 2.0 MiB | 25.0% | 0 | 5 | 6.10 | 10.0 (10.0-10.0) | 3.00 (2.00-4.00) "
        "| 2, 10.0% | 40% |\n"
        "| 10 % |  |  |  |  |  |  |  |  |  |\n"
        "\n"
        "10 %: it fell over\n"
        "\n"
        "a note\n"
    )


def test_a_gpu_has_a_column_and_a_name() -> None:
    whole = report()
    on_gpu = run_of(OURS, 1.0, use=KVUse(2 * MIB, 0, 100, 50, bytes_device=9 * MIB))
    shown = table.history_table(whole, history_result(30, [on_gpu], BASIS))
    assert dict(zip(shown.headings, shown.rows[1], strict=True))["GPU MiB"] == "9"
    named = replace(whole, machine={**whole.machine, "gpus": ["a card"]})
    assert " · a card · tiny.gguf" in table.head(named)
    assert "instructions that are used: avx2 fma\n" in table.head(named)


def test_recall_has_columns_where_it_is_compared() -> None:
    whole = report()
    without = table.history_table(whole, whole.histories[1])
    finding = replace(OURS, name="20 %, recall 8 rows", recall=8)
    use = KVUse(2 * MIB, 0, 100, 58, bytes_archive=3 * MIB, found_share=0.125)
    runs = [run_of(STOCK, 2.0), run_of(finding, 1.0, use=use)]
    result = history_result(30, runs, BASIS)
    compared = replace(whole, caches=(STOCK, finding))
    shown = table.history_table(compared, result)
    more = [one for one in shown.headings if one not in without.headings]
    assert more == ["archive", "attention found"]
    rows = [dict(zip(shown.headings, row, strict=True)) for row in shown.rows]
    assert [rows[0][one] for one in more] == ["", ""]
    assert [rows[1][one] for one in more] == ["3.0 MiB", "12.5%"]
    figures = json.loads(as_json(replace(compared, histories=(result,))))["histories"][0]["figures"]
    assert [one["found_share"] for one in figures] == [None, 0.125]


def test_title_says_what_is_missing() -> None:
    whole = report()
    started = replace(whole, settings={**whole.settings, "rounds": 5})
    title = table.title(started, whole.histories[1])
    assert title == "After 30 tokens of text, stopped after 2 of 5 rounds"
    assert table.title(whole, HistoryResult(30, (), ())) == "After 30 tokens of text"


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_picture(kind: str, start: bytes) -> None:
    needed("matplotlib")
    from research.speed.plot import picture

    data = picture(report(), kind)
    assert data.startswith(start)
    if kind == "svg":
        # Text is drawn as outlines, but each has its words in a comment.
        assert data.count(b"<!-- full -->") == 2
        assert data.count(b"<!-- 20 % -->") == 2
        assert b"<!-- 10 % -->" not in data
