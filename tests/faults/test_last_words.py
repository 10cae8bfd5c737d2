"""A run of the tests that was started in the background, and in which one ends its process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from compiled import ROOT

TESTS = """
import signal, sys
import llama_cpp, pytest

def test_crash():
    print("this was said before", file=sys.stderr)
    llama_cpp.llama_n_ctx(None)

def test_ctrl_c():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
"""


def test_one_that_crashes_says_where_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").symlink_to(ROOT / "tests" / "conftest.py")
    settings = ["-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, "--numprocesses", "1", tmp_path],
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=False,
    )
    _, _, report = done.stdout.partition("crashed while running 'test_it.py::test_crash'")
    assert "last words" in report, done.stdout + done.stderr
    assert re.search(r"line \d+ in test_crash\n", report)
    assert "\nthis was said before\n" in report
    assert re.search("libllama.*n_ctx", report)
    assert "1 failed, 1 passed" in report
    assert "Fatal Python error" not in done.stderr
