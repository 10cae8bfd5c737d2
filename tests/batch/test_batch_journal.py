"""The journal of a batch: what a crash or a full disk leaves of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from full_disk import full_disk
from needed import needed
from pyh2o.errors import BatchError
from pyh2o.writing.sampling import Sampling

NAME = "the server's packages"
answering = needed("pyh2o.batch.answering", name=NAME)
journals = needed("pyh2o.batch.journal", name=NAME)

HEAD = journals.BatchHead(
    "12ab",
    {"bytes": 5, "sha256": "ff"},
    {"ctx": 64},
    answering.RequestDefaults(Sampling(seed=3)),
    False,
)


def result(number: int, size: int = 10, *, status: int = 200) -> dict[str, Any]:
    response = {"status_code": status, "body": {"text": "\N{SNOWMAN}" * size}}
    return {"custom_id": f"r{number}", "response": response, "error": None}


def done(journal: Any) -> set[int]:
    """Numbers of the requests that have a result."""
    found = {number for number in range(10) if number in journal}
    assert len(found) == journal.n_done
    return found


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def written(path: Path, *numbers: int) -> Path:
    """A journal with these results; its file of results."""
    with journals.Journal(path) as journal:
        journal.start(HEAD, restart=False)
        for number in numbers:
            journal.add(number, result(number))
    return path


def test_results_come_in_the_order_of_the_requests(tmp_path: Path) -> None:
    out = written(tmp_path / "out.jsonl", 2, 0)
    with journals.Journal(out) as journal:
        assert journal.head == HEAD
        assert done(journal) == {0, 2}
        journal.start(HEAD, restart=False)
        journal.add(1, result(1, status=400))
        assert journal.n_failed == 1
        assert not out.exists()
        journal.finish(3)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == [result(0), result(1, status=400), result(2)]
    assert names(tmp_path) == ["out.jsonl"]


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    """And nobody else reads the results before they are there."""
    out = tmp_path / "out.jsonl"
    out.write_text("of an earlier batch\n")
    out.chmod(0o600)
    with journals.Journal(out) as journal:
        journal.start(HEAD, restart=True)
        journal.add(0, result(0))
        assert journal.path.stat().st_mode & 0o777 == 0o600
        journal.finish(1)
    assert json.loads(out.read_text()) == result(0)
    assert out.stat().st_mode & 0o777 == 0o600


def test_what_was_cut_off_comes_again(tmp_path: Path) -> None:
    """At any byte: by a crash, or by a disk that was full."""
    whole = written(tmp_path / "whole", 0, 1).with_name("whole.partial").read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    out = tmp_path / "out"
    for size in (0, 1, 5, 30, ends[0] - 1, ends[0], ends[0] + 1, ends[1] - 1, ends[1], ends[2] - 1):
        (tmp_path / "out.partial").write_bytes(whole[:size])
        n_done = sum(end <= size for end in ends[1:])
        with journals.Journal(out) as journal:
            assert journal.head == (HEAD if size >= ends[0] else None)
            assert done(journal) == set(range(n_done))
            journal.start(HEAD, restart=False)
            for number in range(n_done, 2):
                journal.add(number, result(number))
        assert (tmp_path / "out.partial").read_bytes() == whole


def test_a_power_cut_at_the_beginning_leaves_an_empty_batch(tmp_path: Path) -> None:
    """As long as it was, and nothing of it written."""
    (tmp_path / "out.partial").write_bytes(b"\0" * 300)
    out = written(tmp_path / "out", 0)
    with journals.Journal(out) as journal:
        assert done(journal) == {0}
        journal.finish(1)
    assert out.read_text() == f"{json.dumps(result(0), ensure_ascii=False)}\n"


@pytest.mark.parametrize(
    "damage", [b"\0" * 20, b"[7]", b'{"a": 1}', b'["x", {}]', b"[1, 2]", b'["1", {"error": {}}]']
)
def test_damage_costs_no_other_result(tmp_path: Path, damage: bytes) -> None:
    out = written(tmp_path / "out", 0, 1, 2)
    path = tmp_path / "out.partial"
    head, first, _, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head + first + damage + b"\n" + third)
    with journals.Journal(out) as journal:
        assert done(journal) == {0, 2}
        journal.start(HEAD, restart=False)
        journal.add(1, result(1))
    with journals.Journal(out) as journal:
        assert done(journal) == {0, 1, 2}
        journal.finish(3)
    assert [json.loads(line) for line in out.open()] == [result(number) for number in range(3)]


def test_a_full_disk_keeps_what_was_added(tmp_path: Path) -> None:
    out = written(tmp_path / "out", 0)
    before = (tmp_path / "out.partial").read_bytes()
    with journals.Journal(out) as journal:
        journal.start(HEAD, restart=False)
        message = r"File too large; the 1 finished ones stay in .*out\.partial: free some space"
        with full_disk(len(before) + 20), pytest.raises(BatchError, match=message):
            journal.add(1, result(1))
    with journals.Journal(out) as journal:
        assert done(journal) == {0}
        journal.start(HEAD, restart=False)
        journal.add(1, result(1))
        with (
            full_disk(30),
            pytest.raises(BatchError, match=r"File too large; the 2 finished ones stay in"),
        ):
            journal.finish(2)
    assert names(tmp_path) == ["out.partial"]
    with journals.Journal(out) as journal:
        journal.finish(2)
    assert out.read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"input": "34cd"}, "a different input"),
        ({"model": {"bytes": 5, "sha256": "00"}}, "a different model"),
        ({"settings": {"ctx": 65}}, "ctx 64 instead of 65"),
        ({"settings": {"ctx": 64, "policy": "h2o"}}, 'policy null instead of "h2o"'),
        ({"defaults": answering.RequestDefaults(Sampling(seed=4))}, "seed 3 instead of 4"),
        (
            {"defaults": answering.RequestDefaults(Sampling(seed=3), 5)},
            "max_tokens null instead of 5",
        ),
    ],
)
def test_another_batch_is_refused_and_its_results_stay(
    tmp_path: Path, changes: dict[str, Any], difference: str
) -> None:
    out = written(tmp_path / "out", 0)
    there = (tmp_path / "out.partial").read_bytes()
    head = replace(HEAD, **changes)
    with journals.Journal(out) as journal:
        with pytest.raises(BatchError, match=f"results of a batch with {difference}: use the "):
            journal.start(head, restart=False)
        assert (tmp_path / "out.partial").read_bytes() == there
        journal.start(head, restart=True)
        assert done(journal) == set()
    with journals.Journal(out) as journal:
        assert (journal.head, done(journal)) == (head, set())


@pytest.mark.parametrize("content", [b"notes of mine", b"notes of mine\n", b'{"a": 1}\n', b"[1]\n"])
def test_a_file_that_is_no_journal_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.partial"
    path.write_bytes(content)
    with (
        pytest.raises(BatchError, match="is not a journal"),
        journals.Journal(tmp_path / "out"),
    ):
        pass
    assert path.read_bytes() == content


def test_a_batch_has_one_run(tmp_path: Path) -> None:
    out = written(tmp_path / "out", 0)
    message = "another run is writing"
    with journals.Journal(out), pytest.raises(BatchError, match=message):
        journals.Journal(out).__enter__()
    with journals.Journal(out) as journal:
        assert done(journal) == {0}


def test_places_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="is not a regular file"):
        journals.Journal(tmp_path)
    with pytest.raises(BatchError, match="does not exist"):
        journals.Journal(tmp_path / "none" / "out")
