"""An answer in progress: samples tokens after a prompt and turns them into events."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..cache.kv_cache import IntArray
from ..core.detokenizer import detokenizer
from ..core.prefixes import keep_prefix
from ..core.sampled import RecordedText
from ..core.text import Text
from ..errors import BusyError, ChatError, SettingsError
from .chat_guide import ChatGuide
from .chat_parser import ID_LENGTH, ParsedCall
from .chat_prompt import Prompt, history_tokens
from .events import Content, Done, Event, Reasoning, Started, ToolCall, Usage
from .finish import FINISH_LENGTH, FINISH_STOP, FINISH_TOOL_CALLS
from .generation import Generation
from .logprobs import LogprobRecorder, TokenLogprobs
from .pieces import Piece, TextPieces
from .prompt import check_prompt, prompt_text
from .reasoning import drops_reasoning, reasoning_span
from .request import Request, StoppingCriteria
from .writer import Writer


class Answer:
    """The answer to one request, in one text.

    Iterate over it for its events; iteration computes the answer and may stop at any event.

    Attributes:
        prompt_tokens, tokens: tokens of the prompt and of the answer, without dropped reasoning.
        generation: its token loop.
        resumed: events of the tokens in `before`.
        unread: the last tokens of the prompt and `before`, which the text lacks, if its owner has
            prepared it; None to keep the longest prefix of the prompt that the text has.
    """

    def __init__(
        self,
        text: Text,
        request: Request,
        prompt: Prompt,
        *,
        usage: Usage | None = None,
        before: Sequence[int] = (),
        watch: Callable[[int], str | None] | None = None,
        keep_dropped: bool = False,
        drafts: Callable[[IntArray], IntArray] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Check the prompt; nothing is evaluated yet.

        Args:
            text: the prompt replaces its contents, except for a common prefix.
            usage: usage of the prompt; None to count its tokens.
            before: first tokens of the answer, if it was stopped earlier and is continued.
            watch: called with each new token; returns a finish reason or None.
            keep_dropped: whether the client may drop parts of this text from later prompts.
            check: called after each token; its errors end the answer.
        """
        self._text, self._request, self._prompt = text, request, prompt
        self._keep_dropped, self._drafts, self._check = keep_dropped, drafts, check
        model = self._model = text.model
        tokens = prompt.tokens
        check_prompt(text, tokens)
        self._usage = usage or Usage(prompt=len(tokens))
        self.prompt_tokens, self.tokens = list(tokens), list[int]()
        self._processor = request.processor(model.n_vocab)
        self._parser = prompt.parser() if not prompt.call else None
        self._call_id = uuid.uuid4().hex[:ID_LENGTH]
        self._has_called = self._is_over = False
        self._is_stopped = False  # by the stopping criteria
        starts_text = request.messages is None and len(request.prompt) == 0
        self._logprobs: LogprobRecorder | None = None
        if request.top_logprobs is not None:
            parts = detokenizer(model, tokens, starts_text=starts_text)
            is_chat = request.messages is not None
            offset = 0 if is_chat else len(prompt_text(model, request.prompt))
            self._logprobs = LogprobRecorder(model, parts, request.top_logprobs, offset)
        room = None if text.evicting else text.position_limit - len(tokens) - len(before)
        limits = [limit for limit in (request.max_tokens, room) if limit is not None]
        self.generation = Generation(
            self.tokens,
            detokenizer(model, tokens, starts_text=starts_text, shown=prompt.shown),
            TextPieces(prompt.stops),
            is_end=self._is_end,
            limit=min(limits, default=None),
            watch=watch,
        )
        self.unread: Sequence[int] | None = None
        self._held: tuple[TokenLogprobs, ...] = ()
        self._before = before
        self.tokens += before
        if isinstance(prompt.guide, ChatGuide):
            for token in before:
                prompt.guide.take(token)
        self.resumed = [
            event for piece in self.generation.repeat(before) for event in self._events(piece)
        ]

    @property
    def usage(self) -> Usage:
        return replace(self._usage, sampled=len(self.generation.tokens))

    @property
    def calls(self) -> Sequence[ParsedCall]:
        """The tool calls so far."""
        return () if self._parser is None else self._parser.calls

    def __iter__(self) -> Iterator[Event]:
        yield Started(self.usage)
        for piece in self._pieces():
            yield from self._events(piece)
        yield from self.rest()
        self._record_rendered()
        if self._logprobs is not None:  # those of a stop text
            self._held += tuple(self._logprobs.take())
        yield Done(self._finish(), self.usage, self._stop(), self._held)

    def rest(self) -> Iterator[Event]:
        """Yield the text that is held back, once; also after an iteration that was closed early."""
        if self._is_over:
            return
        self._is_over = True
        for piece in self.generation.end():
            yield from self._events(piece)
        yield from self._with_usage(() if self._parser is None else self._parser.end())

    def _events(self, piece: Piece) -> Iterator[Event]:
        if self._logprobs is not None:
            self._held += tuple(self._logprobs.take(piece.tokens))
        events = self._parsed(piece.text)
        if not events and not piece.text:
            events = [Content()]  # a token without text
        return self._with_usage(events)

    def _with_usage(self, events: Iterable[Content | Reasoning | ToolCall]) -> Iterator[Event]:
        for event in events:
            yield replace(event, sampled=self.usage.sampled, logprobs=self._held)
            self._held = ()

    def _parsed(self, text: str) -> Sequence[Content | Reasoning | ToolCall]:
        if self._prompt.call:
            start = [] if self._has_called else [ToolCall(0, self._call_id, self._prompt.call)]
            self._has_called = True
            return [*start, ToolCall(0, arguments=text)]
        return [Content(text)] if self._parser is None else self._parser.add(text)

    def _finish(self) -> str:
        at_end = FINISH_STOP if self._is_stopped else FINISH_LENGTH
        finish = self.generation.finish or at_end
        has_called = self._has_called or self.calls
        return FINISH_TOOL_CALLS if finish == FINISH_STOP and has_called else finish

    def _stop(self) -> str | None:
        found = self.generation.stop
        return next((s.decode() for s in self._request.stops if found.startswith(s)), None)

    # ---------------------------------------------------------------------------------------------
    # Tokens
    # ---------------------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[Piece]:
        """Sample to the end; yield text as soon as no stop string can start in it."""
        drops = not self._request.keep_reasoning and drops_reasoning(self._model)
        try:
            for pieces in self.generation.run(self._sampled()):
                yield from pieces
            if self.generation.finish == FINISH_STOP and drops:
                self._drop_reasoning()
        finally:  # the caller may stop at any token
            if self.tokens and self._prompt.is_text:
                self._recorded = self._model.sampled_texts.record(
                    self.prompt_tokens, self.tokens, keep_dropped=self._keep_dropped
                )

    def _sampled(self) -> Iterator[int]:
        request, text, prompt = self._request, self._text, self._prompt
        if request.max_tokens == 0:
            with text.lock:
                text.read(keep_prefix(text, prompt.tokens))
            return
        with text.lock:
            writer = Writer(
                text,
                request.sampling,
                written=self._before,
                logits_processor=self._processor,
                grammar=prompt.guide,
                drafts=self._drafts,
            )
            unread = self.unread
            if unread is None:
                unread = keep_prefix(text, [*prompt.tokens, *self._before])
        n_tokens = len(prompt.tokens)
        for token in sampled(text, writer, unread, request.stopping_criteria and self._is_to_stop):
            self._check()
            if self._logprobs is not None and not self._is_end(token):
                # The previous token predicts this one. With drafts, which need all logits, it may
                # not be the last token that was evaluated.
                of_all, n_gone = text.keeps_logits, sum(b - a for a, b in text.dropped_spans)
                logits = text.all_logits[n_gone + n_tokens - 1] if of_all else text.logits[-1]
                self._logprobs.record(token, logits)
            n_tokens += 1
            yield token

    def _is_end(self, token: int) -> bool:
        is_own = token in self._request.stop_tokens or self._prompt.ends(token)
        return is_own or self._model.is_end(token)

    def _is_to_stop(self, ids: Any, logits: Any) -> bool:
        assert self._request.stopping_criteria is not None
        self._is_stopped = bool(self._request.stopping_criteria(ids, logits))
        return self._is_stopped

    def _drop_reasoning(self) -> None:
        """Drop the reasoning from the cache, because later prompts will not contain it."""
        text, n_prompt = self._text, len(self.prompt_tokens)
        at = text.kept_positions
        if len(at) <= n_prompt:
            return
        start = int(at[n_prompt])
        found = reasoning_span(self._model, text.tokens, start, text.n_tokens)
        if found is None or found[1] == text.n_tokens:
            return
        with contextlib.suppress(SettingsError):  # the reasoning overlaps the pinned first tokens
            text.drop_spans([found])
            begin, end = (each - start + n_prompt for each in found)
            whole = [*self.prompt_tokens, *self.tokens]
            self.prompt_tokens = whole[: min(begin, n_prompt)]
            self.tokens = whole[n_prompt:begin] + whole[end:]

    def _record_rendered(self) -> None:
        """Record the answer as later prompts will contain it, if it differs from the sampled one.

        The template renders calls anew, and parsers and clients strip white space.
        """
        parser, recorded = self._parser, self._recorded
        if parser is None or recorded is None:
            return
        content = parser.content.strip()
        if not parser.calls and not parser.is_trimmed and content == parser.content:
            return
        message: dict[str, Any] = {"role": "assistant", "content": content}
        reasoning = parser.reasoning.strip().encode()
        if reasoning in self._model.detokenize(recorded.tokens[recorded.n_prompt :]):
            message["reasoning_content"] = parser.reasoning
        else:  # dropped from the cache
            reasoning = b""
        if parser.calls:
            message["tool_calls"] = [call.message() for call in parser.calls]
            more = [
                {"role": "tool", "tool_call_id": call.id, "content": "?"} for call in parser.calls
            ]
        else:
            more = [{"role": "user", "content": "?"}]
        with contextlib.suppress(ChatError):
            tokens = history_tokens(self._model, self._request, message, *more)
            self._model.sampled_texts.record_rendered(self._model, recorded, tokens, reasoning)

    _recorded: RecordedText | None = None


def sampled(
    text: Text, writer: Writer, unread: Sequence[int], criteria: StoppingCriteria | None = None
) -> Generator[int, Sequence[int] | None, None]:
    """Read tokens, then yield sampled tokens until the stopping criteria end the text.

    Tokens sent to the generator are handled as in `Writer.write`.
    """
    n_text = text.n_tokens + len(unread)
    sent: Sequence[int] | None = None
    with contextlib.closing(writer.write(unread)) as writing:
        while True:
            try:
                token = writing.send(sent)
            except StopIteration:
                return
            if criteria is not None and criteria(text.record[:n_text], writer.logits):
                return
            n_tokens = text.n_tokens
            sent = yield token
            if text.n_tokens != n_tokens:
                raise BusyError(
                    "the text was changed during generation: finish a generation before using its "
                    "text for anything else"
                )
            n_text += 1
