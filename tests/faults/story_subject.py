"""`pyh2o generate -o`: a text, a checkpoint, and a line for each of them."""

from __future__ import annotations

import json
from pathlib import Path

from faulty_process import NO_TROUBLE, Ended, Fault, Trouble, run
from pyh2o.sessions.headers import STORY
from pyh2o.sessions.session_file import read_session
from subject import ARCHIVE_LOST, CACHE, SAMPLING, Found, check_end, emptied


class Story:
    """`pyh2o generate -o`, which leaves the text, a checkpoint and a line for each of them."""

    name = "story"

    def __init__(self, model: Path) -> None:
        self._model = ["-m", str(model)]
        self.n_operations = 0
        self.text = b""

    def _begin(self, folder: Path, trouble: Trouble = NO_TROUBLE) -> Ended:
        beginning = ["generate", "-p", "Once upon a time", "-n", "240", "--checkpoint=30"]
        arguments = [*beginning, "-o", "story.txt", *self._model, *CACHE, *SAMPLING]
        return run(folder, [*arguments, "--ignore-eos", "--no-loop-guard"], trouble)

    def prepare(self, folder: Path) -> None:
        """Find out what the story is."""
        ended = self._begin(emptied(folder))
        assert ended.code == 0, ended.notes
        self.n_operations = ended.n_operations
        self.text = (folder / "story.txt").read_bytes()

    def check(self, folder: Path, trouble: Trouble) -> Found:
        """As `Subject` says."""
        ended = self._begin(folder, trouble)
        check_end(ended, trouble)
        text, checkpoint = folder / "story.txt", folder / "story.txt.h2o"
        written = text.read_bytes() if text.exists() else b""
        is_same = not ARCHIVE_LOST.search(ended.notes)
        # what came after the checkpoint was not flushed
        if is_same and trouble.fault is not Fault.POWER:
            assert self.text.startswith(written), "not the beginning of the story"
        if ended.code == 0:
            assert written == self.text or not is_same, "it was said to be whole"
        if checkpoint.exists():
            read_session(checkpoint, STORY)
            rest = run(folder, ["generate", "--resume", "-o", "story.txt", *self._model])
            assert rest.code == 0, rest.notes
        else:  # the first one is written before the first token
            rest = self._begin(emptied(folder))
        # a story that was whole already gets no line break any more
        assert text.read_bytes().rstrip(b"\n") == self.text.rstrip(b"\n") or not is_same
        # a line that was cut off at the end goes with the next one
        records = (folder / "story.txt.jsonl").read_text().splitlines(keepends=True)
        lengths = [json.loads(line)["tokens"] for line in records if line.endswith("\n")]
        assert lengths == sorted(set(lengths)), lengths
        return Found(ended, written == self.text)
