"""`pyh2o batch`: files of requests, answered many at once, broken off and gone on with."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_fakes import PATIENCE, Output, run, run_program, start_program, wait_until
from fake_story import names, now_there, tiny_model
from full_disk import full_disk
from needed import needed
from pyh2o.cli import loading

needed("pyh2o.server", name="the server's packages")
on_ray = needed("pyh2o.batch.on_ray")
pytestmark = pytest.mark.usefixtures("surroundings")

real = pytest.mark.real
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def small(tiny: Path) -> list[str]:
    """Options for the tiny model and a small cache."""
    cache = ["--ctx", "1024", "--hh", "32", "--recent", "32", "--slack", "8", "--threads", "1"]
    return ["-m", str(tiny), *cache]


def one_at_a_time(tiny: Path) -> list[str]:
    """A command whose results come in the order of the requests."""
    options = [*small(tiny), "--texts", "1", "--seed", "1"]
    return ["batch", "in.jsonl", "-o", "out.jsonl", *options]


def write_requests(n: int, *, path: str = "in.jsonl", **body: Any) -> None:
    """So many completions, of 10, 20, ... tokens."""
    lines = []
    for number in range(n):
        asked = {"prompt": f"Text {number}", "max_tokens": 10 * (number + 1), **body}
        line = {"custom_id": f"r{number}", "method": "POST", "url": COMPLETIONS, "body": asked}
        lines.append(json.dumps(line))
    Path(path).write_text("\n".join(lines))


def results(path: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def texts(path: str = "out.jsonl") -> list[str]:
    return [line["response"]["body"]["choices"][0]["text"] for line in results(path)]


def n_done(path: str = "out.jsonl.partial") -> int:
    return max(0, Path(path).read_bytes().count(b"\n") - 1) if Path(path).exists() else 0


def test_results_in_the_order_of_the_requests(tiny: Path, tmp_path: Path) -> None:
    write_requests(9)
    output = run(
        "batch", "in.jsonl", "-o", "out.jsonl", *small(tiny), "--seed", "5", "--texts", "3"
    )
    assert (output.code, output.text) == (0, "")
    assert re.fullmatch(
        r"9 requests · 0 errors · read \d+ tokens · wrote 450 tokens at [\d.,]+ tokens/s · "
        r"seed 5 · KV 3 x [\d.]+ MiB\nthe results are in out\.jsonl\n",
        output.notes,
    )
    assert names(tmp_path) == ["in.jsonl", "out.jsonl"]
    lines = results()
    assert [line["custom_id"] for line in lines] == [f"r{n}" for n in range(9)]
    usage = [line["response"]["body"]["usage"]["completion_tokens"] for line in lines]
    assert usage == [10 * n for n in range(1, 10)]
    assert {line["response"]["body"]["model"] for line in lines} == {"tiny"}
    assert len({line["id"] for line in lines}) == 9
    assert {*lines[0]} == {"id", "custom_id", "response", "error"}
    assert {*lines[0]["response"]} == {"status_code", "request_id", "body"}


def test_a_model_file_whose_name_is_not_utf_8(tiny: Path) -> None:
    odd = Path(os.fsdecode(b"m\xff.gguf"))
    odd.symlink_to(tiny)
    write_requests(1)
    assert run(*one_at_a_time(odd)).code == 0
    assert results()[0]["response"]["body"]["model"] == "m\ufffd"


def test_a_file_of_prompts(tiny: Path) -> None:
    Path("in.txt").write_text("Once\n\nTwice\n")
    arguments = ["batch", "in.txt", "-o", "out.jsonl", *small(tiny), "-n", "20", "--seed", "3"]
    assert run(*arguments).code == 0
    assert [line["custom_id"] for line in results()] == ["line-1", "line-3"]
    sampled = texts()
    assert run(*arguments, "--force", "--temp", "0").code == 0
    assert texts() != sampled
    assert run(*arguments, "--force").code == 0
    assert texts() == sampled


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none", "-o", "out"], "cannot read none: No such file or directory; give a file of "),
        (["empty", "-o", "out"], "empty has no requests: write one per line"),
        (["in.jsonl", "-o", "in.jsonl"], "the results would replace the requests in in.jsonl: "),
        (["in.jsonl", "-o", "there"], "there exists: give another --output, or replace it with -"),
        (
            ["in.jsonl", "-o", "there", "-m", "there", "--force"],
            "there is the model: give another ",
        ),
        (["in.jsonl", "-o", "none/out"], "the folder none does not exist"),
        (["in.jsonl", "-o", "out", "--chat"], "chat is for plain text prompts: set it in "),
        (["in.jsonl", "-o", "out", "--temp", "0"], "temperature is for plain text prompts"),
    ],
)
def test_what_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.delattr(loading, "load_engine")
    write_requests(1)
    (tmp_path / "empty").touch()
    (tmp_path / "there").write_text("mine")
    there = now_there()
    output = run("batch", *arguments)
    assert (output.code, output.text) == (1, "")
    assert f"error: {message}" in output.notes.replace(f"{tmp_path}/", "")
    assert now_there() == there


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ray"], f"--ray needs the package ray: {sys.executable} -m pip install 'pyh2o-llm["),
        (["--ray", "--rpc", "10.0.0.1:1"], "--ray and --rpc cannot be combined: a worker has all "),
        (["--workers", "2"], "--workers requires --ray: remove it, or give both"),
    ],
)
def test_what_a_cluster_cannot_have_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    write_requests(1)
    output = run("batch", "in.jsonl", "-o", "out", *small(tiny), *arguments)
    assert output.code == 1
    assert output.notes.startswith(f"error: {message}")
    assert output.notes.count("\n") == 1
    assert names(tmp_path) == ["in.jsonl"]


@real
def test_a_run_that_was_ended_goes_on_with_what_has_no_result(tiny: Path, tmp_path: Path) -> None:
    write_requests(12, max_tokens=1200, seed=4)
    # three have results soon, and the rest has none before the program is ended
    requests = Path("in.jsonl").read_text().replace("1200", "20", 3)
    Path("in.jsonl").write_text(requests + "\nwrong")
    arguments = ["batch", "in.jsonl", "-o", "out.jsonl", *small(tiny), "--texts", "3"]
    program = start_program(*arguments, "--seed", "8")
    wait_until(lambda: n_done() >= 3)
    program.send_signal(signal.SIGINT)
    _, notes = program.communicate(timeout=PATIENCE)
    ended = n_done()
    assert 3 <= ended < 13
    assert program.returncode == 130
    assert names(tmp_path) == ["in.jsonl", "out.jsonl.partial"]
    stopped, how = notes.decode().splitlines()
    assert stopped.startswith(f"stopped by Ctrl-C: of 13 requests, {ended} have a result · 0 err")
    assert how == "to resume: run the same command"
    kept = Path("out.jsonl.partial").read_text().splitlines()[1:]
    output = run_program(*arguments)  # with the seed that it had
    assert output.code == 0, output.notes
    assert output.notes.startswith(
        f"resuming: of 13 requests, {ended} have a result\n13 requests · 1 error · "
    )
    assert " · seed 8 · " in output.notes
    assert names(tmp_path) == ["in.jsonl", "out.jsonl"]
    lines = results()
    assert all(lines[number] == line for number, line in map(json.loads, kept))


def break_off(arguments: list[str], *, after: int) -> Output:
    """Run the command on a disk that is full after so many bytes."""
    with full_disk(after):
        return run(*arguments)


def test_existing_results_stay_until_new_ones_are_there(tiny: Path, tmp_path: Path) -> None:
    write_requests(6)
    Path("out.jsonl").write_text("mine")
    arguments = one_at_a_time(tiny)
    assert run(*arguments).code == 1
    output = break_off([*arguments, "--force"], after=3500)
    assert output.code == 1
    assert Path("out.jsonl").read_text() == "mine"
    done = n_done()
    # it was told to replace them once
    output = run(*arguments)
    assert output.notes.startswith(f"resuming: of 6 requests, {done} have a result\n")
    assert len(results()) == 6
    assert names(tmp_path) == ["in.jsonl", "out.jsonl"]
