"""The tiny model for `generate` with sampled tokens specified by the test; all else is real."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGUFReader

from cli_fakes import LoadedModel, Output, run
from pyh2o import Llama
from pyh2o.cli.options import RunOptions
from pyh2o.sessions import story
from pyh2o.sessions.chats import open_chats
from pyh2o.sessions.listing import story_text
from pyh2o.writing.sampling import Sampling
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

WINDOW = 1024


def tiny_model(folder: Path, **shape: Any) -> Path:
    """Write a model that never ends its text and has a longer trained context than any test needs.

    The logit of its end-of-text token is always 0, and the 40 most probable of 384 have more.
    """
    path = write_tiny_gguf(folder / "tiny.gguf", seed=17, n_ctx_train=1 << 17, **shape)
    reader = GGUFReader(path, "r+")
    end = int(reader.fields["tokenizer.ggml.eos_token_id"].contents())
    [output] = [tensor for tensor in reader.tensors if tensor.name == "output.weight"]
    output.data[end] = 0.0
    return path


@dataclass
class FakeModel(LoadedModel):
    """The model that `generate` loads, with the sampling settings of the story.

    The script is the text to sample, a token per byte; functions in it are called before the next
    token is sampled. At its end the model ends its text.
    """

    script: list[str | Callable[[], None]] = field(default_factory=list)
    sampling: Sampling | None = None

    def n_prompt(self, prompt: str) -> int:
        """Count the tokens of a prompt."""
        return len(self.llm.tokenize(prompt.encode()))

    def tokens(self, start: int) -> Generator[int, None, None]:
        """Yield the script's tokens after the first `start`, and call its functions."""
        for item in self.script:
            if callable(item):
                if start == 0:
                    item()
                continue
            for byte in item.encode():
                if start == 0:
                    yield self.byte_0 + byte
                else:
                    start -= 1
        yield self.llm.token_eos()


def fake_model(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    """Make `generate` load it; a token takes half a second, and so does reading a prompt."""
    fake = FakeModel(llm)

    class ScriptedWriter:
        def __init__(
            self, llm: Llama, sampling: Sampling, *, written: Sequence[int], **_: Any
        ) -> None:
            fake.sampling = sampling
            self._llm = llm
            self._drawn = len(written)

        def write(self, tokens: Sequence[int]) -> Generator[int, None, None]:
            if len(tokens) > 1:
                fake.before_reading()
            self._llm.eval(tokens)
            for token in fake.tokens(self._drawn):
                self._drawn += 1
                yield token
                self._llm.eval([token])

    fake.be_loaded(monkeypatch)
    monkeypatch.setattr(story, "Writer", ScriptedWriter)
    ticks = itertools.count()
    monkeypatch.setattr(story, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 2))
    return fake


def open_tiny(folder: Path) -> Llama:
    """Return the model for `fake_model`; opened once, as its weights do not matter."""
    return tiny_llama(tiny_model(folder), n_ctx=WINDOW, hh=20, recent=20, slack=8)


TALE = "Once upon a time there was \N{SNOWMAN}. The end.\n\nNo: another day came. THE END. So."
"""A script that needs several bytes for a character, and has the same words more than once."""


STORY = Path("story.txt")


def begin(*arguments: str) -> Output:
    return run("generate", "-p", "I: ", "-o", "story.txt", "--seed", "7", *arguments)


def options_of(fake: FakeModel, *arguments: str) -> RunOptions:
    """Return the model's load options."""
    fake.script = ["a"]
    output = run("generate", "-p", "x", *arguments)
    assert output.code == 0, output.notes
    assert isinstance(fake.options, RunOptions)
    return fake.options


def resume(*arguments: str) -> Output:
    return run("generate", "--resume", "-o", "story.txt", *arguments)


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def report(
    fake: FakeModel,
    *,
    wrote: int,
    why: str = "the model ended its text",
    read: int | None = None,
    after: int = 0,
    seed: int = 7,
) -> str:
    """Return the last line: half a second for reading, and for each token after the first."""
    begin = f"continued after {_tokens(after)}" if read is None else _read(read)
    # an end of text also takes time
    steps = wrote if why == "the model ended its text" or after else wrote - 1
    speed = "" if min(wrote - (not after), steps) < 1 else speed_of(wrote - (not after), steps)
    return (
        f"{begin} · wrote {_tokens(wrote)}{speed} · {why} · seed {seed} · {fake.llm.kv.summary()}\n"
    )


def _read(count: int) -> str:
    return f"read {_tokens(count)} at {count / 0.5:.1f} tokens/s"


def speed_of(count: int, steps: int) -> str:
    return f" at {count / (steps / 2):.1f} tokens/s"


def wrote(output: Output) -> int:
    """Return how many tokens a run reports."""
    found = re.search(r"wrote (\d+) tokens?", output.notes)
    assert found is not None
    return int(found[1])


def names(folder: Path = Path()) -> list[str]:
    """Return the names of the files in a folder."""
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def now_there() -> dict[str, bytes]:
    return {name: Path(name).read_bytes() for name in names()}


def saved_stories() -> list[tuple[str, str]]:
    """Return title and text of each saved story."""
    with open_chats() as database:
        texts = [database.read(info.id) for info in database.texts()]
        return [(contents.info.title, story_text(contents)) for contents in texts]
