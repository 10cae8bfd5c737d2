"""`pyh2o batch`: a journal of the answers, which become the results at last."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from faulty_process import NO_TROUBLE, Ended, Fault, Trouble, run
from subject import CACHE, SAMPLING, Found, check_end, emptied


class Batch:
    """`pyh2o batch`, which goes on where it was."""

    name = "batch"
    prompts = tuple(f"Chapter {n}. It was a {word}" for n, word in enumerate("abcdefgh"))

    def __init__(self, model: Path) -> None:
        self._model = ["-m", str(model)]
        self.n_operations = 0
        self.answers: dict[str, str] = {}

    def _run(self, folder: Path, trouble: Trouble = NO_TROUBLE) -> Ended:
        folder.with_name("prompts.txt").write_text("".join(f"{each}\n" for each in self.prompts))
        arguments = ["batch", "../prompts.txt", "-o", "out.jsonl", "-n", "6", "--texts=3"]
        return run(folder, [*arguments, *self._model, *CACHE, *SAMPLING], trouble)

    def prepare(self, folder: Path) -> None:
        """Find out what the answers are."""
        ended = self._run(emptied(folder))
        assert ended.code == 0, ended.notes
        self.n_operations = ended.n_operations
        self.answers = {key: text for key, (_, text) in results_in(folder / "out.jsonl").items()}
        assert len(self.answers) == len(self.prompts)

    def check(self, folder: Path, trouble: Trouble) -> Found:
        """As `Subject` says."""
        ended = self._run(folder, trouble)
        check_end(ended, trouble)
        results, journal = folder / "out.jsonl", folder / "out.jsonl.partial"
        complete = results.exists()
        assert complete or ended.code != 0, "it was said to be complete"
        before = results_in(results if complete else journal)
        if trouble.fault in (Fault.KILL, Fault.POWER) and ended.killed:
            # the file and its head take five operations, each result three
            assert len(before) >= min((trouble.at - 5) // 3, len(self.prompts)), "results are gone"
        if not complete:
            rest = self._run(folder)
            assert rest.code == 0, rest.notes
        after = results_in(results)
        assert {key: text for key, (_, text) in after.items()} == self.answers
        for key, result in before.items():
            assert after[key] == result, f"{key} was answered, and again"
        return Found(ended, complete)


def results_in(path: Path) -> dict[str, tuple[str, str]]:
    """The id of the response and the text of each result there is; the last line may be cut."""
    found: dict[str, tuple[str, str]] = {}
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    for line in lines:
        if not line.endswith("\n"):
            continue
        with suppress(KeyError, TypeError):
            result = json.loads(line)
            if isinstance(result, list):  # of the journal: the number of the request comes first
                _, result = result
            body = result["response"]["body"]
            found[result["custom_id"]] = (body["id"], body["choices"][0]["text"])
    return found
