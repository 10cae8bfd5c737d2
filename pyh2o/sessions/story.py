"""Stories: texts of any length that can be left at any token and gone on with exactly there.

    story = Story(llm, "Once upon a time", sampling=Sampling(seed=7))
    for text in story.write(100_000):
        print(text, end="", flush=True)
        if story.written % 1000 == 0:
            story.save("story.h2o")

    story = Story.load("story.h2o", llm)  # later, in another process

A story's tokens are a function of the model, its settings, the prompt and the sampling: a story
that was saved and loaded goes on with the tokens it would have had without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_cpp import llama_vocab_is_eog

from ..errors import ContextLimitError, PyH2OError, SessionError, SettingsError
from ..generation.repetition import Loop, RepetitionGuard
from ..generation.sampling import Sampling
from ..generation.writer import Writer
from ..llama import Llama
from ..openai.completion import FINISH_LENGTH, FINISH_STOP, FINISH_TRAINED_CONTEXT
from ..system.memory import resident_bytes
from ..text.prompt import check_prompt, prompt_text, prompt_tokens
from ..text.story_text import StoryText
from ..text.text_stream import Detokenizer, detokenizer
from .session_file import (
    Session,
    check_same,
    model_identity,
    read_session,
    settings_identity,
    write_session,
)

KIND = "story"
FINISH_UNTIL = "until"
FINISH_REPETITION = "repetition"
FINISH_INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class StoryRecord:
    """A story at one moment, fit for JSON with `dataclasses.asdict`.

    Attributes:
        time: when, in UTC, as ISO 8601 has it.
        finish: why the writing has ended, or None while it goes on (see `Story.finish`).
        tokens: written so far.
        text_bytes: text given out so far, the opening included.
        seconds: it took to write them, without the reading of the prompt.
        tokens_per_second: since the record before.
        tokens_per_second_overall: since the story began.
        loops: broken so far.
        position: tokens of the prompt and of the story evaluated so far.
        cells_used, capacity: of the KV cache.
        tokens_evicted, compactions, rebases: so far.
        kv_bytes: the KV cache, with its scores.
        resident_bytes: memory of the process.
    """

    time: str
    finish: str | None
    tokens: int
    text_bytes: int
    seconds: float
    tokens_per_second: float
    tokens_per_second_overall: float
    loops: int
    position: int
    cells_used: int
    capacity: int
    tokens_evicted: int
    compactions: int
    rebases: int
    kv_bytes: int
    resident_bytes: int


@dataclass(frozen=True)
class _Saved:
    """A story's own part of the header of its session file.

    `held` is what StoryText holds back, in hexadecimal digits; `ended` is whether the model ended
    its text after the last token.
    """

    prompt_tokens: int
    evaluated: int
    opening: str
    text_bytes: int
    held: str
    unsearched: int
    finish: str | None
    ended: bool
    sampling: dict[str, Any]
    until: list[str]
    loop_guard: bool
    ignore_eos: bool
    seconds: float

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "evaluated", "text_bytes", "unsearched"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"its {name} is {value!r}")


class Story:
    """A text that goes on after a prompt, for as long as one likes.

    The model belongs to the story while it is written. If it was used for something else in
    between, the story is read again.

    Attributes:
        llm: the model.
        tokens: of the prompt and of the story.
        n_prompt: how many of them are the prompt's.
        sampling: how tokens are drawn.
        finish: why the last `write` has ended: "stop" (the model ended its text), "length" (enough
            tokens, or without eviction a full window), "until" (a stop text came), "repetition"
            (loop after loop), "trained_context" (no positions left), or "interrupted" (the caller
            wanted no more). None before, and while it goes on.
        n_read, read_seconds: tokens that were read before the first one was written, and how long
            that took, with the first one.
        seconds: it took to write the others, also in earlier processes.
    """

    def __init__(
        self,
        llm: Llama,
        prompt: str | Sequence[int],
        *,
        sampling: Sampling | None = None,
        until: Sequence[str] = (),
        echo: bool = False,
        loop_guard: bool = True,
        ignore_eos: bool = False,
        on_loop: Callable[[Loop], None] | None = None,
    ) -> None:
        """Begin a story; nothing is evaluated yet.

        Args:
            llm: the model; its cache is emptied.
            prompt: text, or tokens as they are.
            sampling: how tokens are drawn; None for the defaults.
            until: texts that the story ends before.
            echo: whether the text begins with the prompt.
            loop_guard: whether loops are broken (see repetition.py).
            ignore_eos: whether the model may not end its text.
            on_loop: called with each loop that is noticed.

        Raises:
            ValueError: the prompt has no token.
            ContextLimitError: the prompt leaves no position to write at.
        """
        self.tokens = prompt_tokens(llm, prompt, None, None)
        check_prompt(llm, self.tokens, llm.position_limit, llm.evicting)
        self.n_prompt = len(self.tokens)
        self.sampling = sampling or Sampling()
        self.finish: str | None = None
        self.n_read = 0
        self.read_seconds = 0.0
        self.seconds = 0.0

        self.llm = llm
        self._opening = prompt_text(llm, prompt) if echo else ""
        self._until = list(until)
        held = self._opening.encode()
        self._text = StoryText(until, held=held, unsearched=len(held))
        self._parts = self._new_parts()
        self._guard = RepetitionGuard(self.tokens) if loop_guard else None
        self._ignore_eos = ignore_eos
        self._on_loop = on_loop
        self._writer: Writer | None = None
        self._ended = False
        self._refused: list[int] = []
        self._recorded = (0, 0.0)
        llm.reset()

    @property
    def written(self) -> int:
        """Tokens of the story, without the prompt's."""
        return len(self.tokens) - self.n_prompt

    @property
    def loops(self) -> int:
        """Loops broken so far."""
        return 0 if self._guard is None else self._guard.loops

    @property
    def held_back(self) -> str:
        """Text that `write` has not given out: a stop text may begin in it, or one came."""
        return self._text.held.decode(errors="ignore")

    def text(self) -> str:
        """All text given out so far, with the opening."""
        parts = self._new_parts()
        story = b"".join(parts.feed(token) for token in self.tokens[self.n_prompt :])
        whole = self._opening + story.decode(errors="ignore")
        return whole.encode()[: self._text.size].decode()

    def begins_with(self, prompt: str) -> bool:
        """Whether this is the prompt that the story goes on after."""
        return prompt_tokens(self.llm, prompt, None, None) == self.tokens[: self.n_prompt]

    # ---------------------------------------------------------------------------------------------
    # Writing
    # ---------------------------------------------------------------------------------------------

    def write(self, max_tokens: int | None = None) -> Generator[str, None, None]:
        """Go on with the story; may be called again and again.

        To go on after the model ended its text forbids it to do so again at once. To go on after a
        stop text makes that a part of the story.

        Args:
            max_tokens: most tokens to write; None for no limit.

        Yields:
            The text that each token adds, perhaps none. Together they are the story without what is
            `held_back` in the end.

        Raises:
            SettingsError: less than one token is asked for.
            ContextLimitError: there is no position left.
        """
        if max_tokens is not None and max_tokens < 1:
            raise SettingsError(f"max_tokens is {max_tokens}: give 1 or more, or None")
        self.finish = None
        try:
            yield from self._write(max_tokens)
        except (GeneratorExit, KeyboardInterrupt):
            self.finish = self.finish or FINISH_INTERRUPTED
            raise

    def _write(self, max_tokens: int | None) -> Generator[str, None, None]:
        llm, end = self.llm, None if max_tokens is None else self.written + max_tokens
        unread = self._unread()
        # The token written last is always unread; to read more, or the prompt, is no writing.
        n_read = len(unread) if len(unread) > 1 or not self.written else 0
        self._refused = _end_tokens(llm) if self._ended or self._ignore_eos else []
        self._writer = self._writer or self._new_writer()
        asked = time.monotonic()
        for token in self._writer.write(unread):
            self._count(time.monotonic() - asked, n_read)
            n_read = 0
            yield self._add(token, end)
            if self.finish is not None:
                return
            asked = time.monotonic()
        self.finish = FINISH_TRAINED_CONTEXT if llm.evicting else FINISH_LENGTH

    def _unread(self) -> list[int]:
        """Tokens to evaluate before the next one can be drawn: usually the one written last."""
        llm, n_tokens = self.llm, self.llm.n_tokens
        if len(self.tokens) > llm.position_limit:
            raise ContextLimitError(
                f"the story has come to the end of the {llm.position_limit} positions there are: "
                "begin a new one with its last part, or turn eviction on"
            )
        is_ours = n_tokens <= len(self.tokens) and np.array_equal(
            llm.input_ids[:n_tokens], self.tokens[:n_tokens]
        )
        # All is evaluated when the model has ended its text; the logits are needed once more.
        is_all = n_tokens == len(self.tokens)
        if not is_ours or (is_all and not llm.remove_tail(n_tokens - 1)):
            llm.reset()
        return self.tokens[llm.n_tokens :]

    def _add(self, token: int, end: int | None) -> str:
        """Add a token that was drawn; return the text that is certain now.

        Args:
            token: the next one, or one that means "end of text".
            end: number of tokens that the story ends with.
        """
        if not self._ignore_eos:
            self._refused = []
        self._ended = llama_vocab_is_eog(self.llm._model.vocab, token)
        if self._ended:
            self._writer = None  # another one goes on as if this token had not been drawn
            self.finish = FINISH_STOP
            return self._text.feed(b"")
        self.tokens.append(token)
        loop = None if self._guard is None else self._guard.add(token)
        text = self._text.feed(self._parts.feed(token))
        if self._text.stopped:
            self.finish = FINISH_UNTIL
        elif loop is not None and self._guard is not None and self._guard.hopeless:
            self.finish = FINISH_REPETITION
        elif self.written == end:
            self.finish = FINISH_LENGTH
        if loop is not None and self._on_loop is not None:
            self._on_loop(loop)
        return text

    def _count(self, seconds: float, n_read: int) -> None:
        """Time a token; if others were read for it, that was the reading."""
        if n_read:
            self.n_read += n_read
            self.read_seconds += seconds
        else:
            self.seconds += seconds

    def _new_writer(self) -> Writer:
        written = self.tokens[self.n_prompt :]
        return Writer(self.llm, self.sampling, written=written, logits_processor=self._forbid)

    def _new_parts(self) -> Detokenizer:
        prompt = self.tokens[: self.n_prompt]
        starts_text = prompt == [self.llm.token_bos()]
        return detokenizer(self.llm, prompt, starts_text=starts_text)

    def _forbid(
        self, _input_ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        forbidden = [] if self._guard is None else self._guard.forbidden
        logits[forbidden + self._refused] = -np.inf
        return logits

    # ---------------------------------------------------------------------------------------------
    # Records and files
    # ---------------------------------------------------------------------------------------------

    def record(self) -> StoryRecord:
        """The story at this moment; speeds are since the last record."""
        tokens, seconds = self._recorded
        self._recorded = (self.written, self.seconds)
        kv = self.llm.kv
        return StoryRecord(
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            finish=self.finish,
            tokens=self.written,
            text_bytes=self._text.size,
            seconds=round(self.seconds, 3),
            tokens_per_second=_speed(self.written - tokens, self.seconds - seconds),
            tokens_per_second_overall=_speed(self.written, self.seconds),
            loops=self.loops,
            position=kv.position,
            cells_used=kv.used,
            capacity=kv.capacity,
            tokens_evicted=kv.tokens_evicted,
            compactions=kv.compactions,
            rebases=kv.rebases,
            kv_bytes=kv.bytes_total,
            resident_bytes=resident_bytes(),
        )

    def save(self, path: str | Path) -> None:
        """Write a session file that `load` goes on from; an old one stays whole until it is there.

        It can be called while `write` waits to be asked for more.

        Raises:
            SessionError: the file cannot be written.
        """
        saved = _Saved(
            prompt_tokens=self.n_prompt,
            evaluated=self.llm.n_tokens,
            opening=self._opening,
            text_bytes=self._text.size,
            held=self._text.held.hex(),
            unsearched=self._text.unsearched,
            finish=self.finish,
            ended=self._ended,
            sampling=asdict(self.sampling),
            until=self._until,
            loop_guard=self._guard is not None,
            ignore_eos=self._ignore_eos,
            seconds=self.seconds,
        )
        header = {
            "model": model_identity(self.llm),
            "settings": settings_identity(self.llm),
            KIND: asdict(saved),
        }
        write_session(path, Session(KIND, header, self.tokens, self.llm.kv_state()))

    @classmethod
    def load(cls, path: str | Path, llm: Llama, **changes: Any) -> Story:
        """Go on with a story that was saved, in the same model with the same settings.

        Args:
            path: of the session file.
            llm: the model; its cache is replaced.
            **changes: see `resume`.

        Raises:
            SessionError: no such file, a damaged one, or of another model or other settings.
            StateError: the state of the cache does not fit the model.
        """
        return cls.resume(read_session(path, KIND), llm, **changes)

    @classmethod
    def resume(
        cls,
        session: Session,
        llm: Llama,
        *,
        until: Sequence[str] | None = None,
        loop_guard: bool | None = None,
        ignore_eos: bool | None = None,
        on_loop: Callable[[Loop], None] | None = None,
    ) -> Story:
        """Like `load`, from a session file that was read already.

        Args:
            session: of the kind "story".
            llm: the model; its cache is replaced.
            until: texts that the story ends before from now on; None for those it had.
            loop_guard: whether loops are broken from now on; None for what it was.
            ignore_eos: whether the model may not end its text from now on; None for what it was.
            on_loop: called with each loop that is noticed.

        Raises:
            SessionError, StateError: see `load`.
        """
        check_same(session, llm)
        try:
            saved = _Saved(**session.header[KIND])
            story = cls(
                llm,
                session.tokens[: saved.prompt_tokens],
                sampling=Sampling(**saved.sampling),
                until=saved.until if until is None else until,
                loop_guard=saved.loop_guard if loop_guard is None else loop_guard,
                ignore_eos=saved.ignore_eos if ignore_eos is None else ignore_eos,
                on_loop=on_loop,
            )
            story._go_on_from(session, saved)
        except PyH2OError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise SessionError(
                f"the session file is damaged ({error}): use another copy of it"
            ) from error
        return story

    def _go_on_from(self, session: Session, saved: _Saved) -> None:
        self.tokens = list(session.tokens)
        self.finish = saved.finish
        self._ended = saved.ended
        self.seconds = saved.seconds
        self._opening = saved.opening
        self._text = StoryText(
            self._until,
            held=bytes.fromhex(saved.held),
            unsearched=saved.unsearched,
            size=saved.text_bytes,
        )
        for token in self.tokens[self.n_prompt :]:
            self._parts.feed(token)
            if self._guard is not None:
                self._guard.add(token)
        self._recorded = (self.written, self.seconds)
        self.llm.load_kv_state(session.kv, self.tokens[: saved.evaluated])


def _end_tokens(llm: Llama) -> list[int]:
    """The tokens that end a text."""
    vocab = llm._model.vocab
    return [token for token in range(llm.n_vocab()) if llama_vocab_is_eog(vocab, token)]


def _speed(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 2) if seconds > 0 else 0.0
