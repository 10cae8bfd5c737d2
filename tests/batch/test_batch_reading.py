"""Files of requests: what each line is taken for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from needed import needed
from pyh2o.errors import BatchError

reading = needed("pyh2o.batch.reading", name="the server's packages")


def request_line(custom_id: object, **changes: object) -> str:
    line = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "once"},
    }
    return json.dumps({**line, **changes})


def read(tmp_path: Path, content: str | bytes) -> object:
    path = tmp_path / "requests"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return reading.read_batch(path)


@pytest.mark.parametrize("before", ["", "\n \n", "\ufeff"])
def test_requests_in_json(tmp_path: Path, before: str) -> None:
    batch = read(tmp_path, f"{before}{request_line('a')}\r\n\n{request_line('b')}")
    assert not batch.has_prompts
    assert [(each.number, each.custom_id) for each in batch.requests] == [(0, "a"), (1, "b")]
    assert all(each.error is None for each in batch.requests)


def test_prompts(tmp_path: Path) -> None:
    batch = read(tmp_path, "\n Once \r\nA {curly} text\n\n[1, 2]\n")
    assert batch.has_prompts
    assert [(each.custom_id, each.data) for each in batch.requests] == [
        ("line-2", b" Once "),
        ("line-3", b"A {curly} text"),
        ("line-5", b"[1, 2]"),
    ]


@pytest.mark.parametrize(
    ("line", "custom_id", "code", "message"),
    [
        ("a prompt", None, "invalid_json_line", "line 2 is not valid JSON: write one object per"),
        ("[1]", None, "invalid_json_line", "line 2 must be an object with custom_id, method, u"),
        (request_line(5), None, "invalid_request", "line 2: custom_id: input should be a"),
        (request_line(None), None, "invalid_request", "line 2: custom_id is missing"),
        (request_line("a"), "a", "duplicate_custom_id", "line 2: line 1 has the same custom_id"),
    ],
)
def test_a_wrong_line_is_no_harm_to_the_others(
    tmp_path: Path, line: str, custom_id: str | None, code: str, message: str
) -> None:
    batch = read(tmp_path, f"{request_line('a')}\n{line}\n{request_line('c')}\n")
    first, wrong, last = batch.requests
    assert (first.error, last.error) == (None, None)
    assert (wrong.custom_id, wrong.error["code"]) == (custom_id, code)
    assert wrong.error["message"].startswith(message)


def test_a_wrong_line_does_not_take_the_id_of_a_right_one(tmp_path: Path) -> None:
    batch = read(
        tmp_path, f"{request_line('a')}\n{request_line('b', url='x')}\n{request_line('b')}"
    )
    assert batch.requests[1].error["code"] == "invalid_request"
    assert batch.requests[2].error is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"caf\xe9", "line 2 is not UTF-8 text (byte 3): save the file as UTF-8"),
        (request_line("a").encode(), "line 2 is a JSON request, but the file starts with prompt"),
    ],
)
def test_a_wrong_line_among_prompts(tmp_path: Path, line: bytes, message: str) -> None:
    batch = read(tmp_path, b"Once\n" + line + b"\nTwice")
    errors = [each.error for each in batch.requests]
    assert (errors[0], errors[2]) == (None, None)
    assert errors[1]["code"] == "invalid_text_line"
    assert errors[1]["message"].startswith(message)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="has no requests: write one per line"):
        read(tmp_path, "\n \r\n")
    with pytest.raises(BatchError, match="No such file or directory; give a file of requests"):
        reading.read_batch(tmp_path / "none")
    with pytest.raises(BatchError, match="Is a directory"):
        reading.read_batch(tmp_path)
