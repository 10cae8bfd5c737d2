"""The loop of a chat: answer messages and run commands."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyh2o.errors import PyH2OError
from pyh2o.writing.finish import FINISH_INTERRUPTED, FINISH_REPETITION, FINISH_TOOL_CALLS

from ..errors import InputError, say_error
from ..terminal.terminal import terminal
from ..terminal.wording import count
from .answers import Answers, AnswerStats, footer, say_unread, why_short
from .autosave import Autosave
from .command_table import Commands
from .input import QUOTE, Dropped, Source
from .tools import ChatTools

if TYPE_CHECKING:
    from pyh2o.sessions.conversation import Conversation
    from pyh2o.writing.thinking import Thinking
    from pyh2o.writing.tools import Tool


# Maximum rounds of tool calls in an answer, and of equal calls.
MAX_CALL_ROUNDS = 50
SAME_CALLS = 3


@dataclass
class Chat:
    """A conversation with a user or a script.

    Attributes:
        conversation: the conversation; `/load` replaces it.
        commands: the slash commands.
        source: source of the lines.
        answers: streams answers.
        autosave: saves the conversation.
        tools: tools that the model may call.
        max_tokens: maximum number of tokens of an answer.
        listed: ids of the sessions that `/sessions` listed last.
        left: whether to quit.
        refused: whether an error occurred.
    """

    conversation: Conversation
    commands: Commands
    source: Source
    answers: Answers
    autosave: Autosave
    tools: ChatTools
    max_tokens: int
    listed: list[int] = field(default_factory=list)
    left: bool = False
    refused: bool = False
    _changed: bool = False  # since the last save

    def run(self) -> None:
        """Answer line after line until /quit or the end of the input."""
        self._save_changes()  # changes by options
        while not self.left:
            try:
                self._take(self.source.read())
            except EOFError:
                self.left = True
            except Dropped:
                terminal.say("/quit or Ctrl-D quits")
        if self.source.interactive and self.autosave.enabled and self.conversation.turns:
            if self.autosave.settle():
                name = self.autosave.name
                terminal.say(f"saved as {name}: pyh2o chat -c resumes it", style="dim")
            else:
                terminal.say(self.autosave.failure, style="yellow")

    def _take(self, line: str) -> None:
        self.autosave.settle()
        try:
            if line.startswith(QUOTE):
                self.send(self.source.read_quoted(line))
            elif line.startswith("/"):
                self.commands.run(self, line)
            elif line.strip():
                self.send(line if "\n" in line else line.strip())
        except BrokenPipeError:
            raise
        except (PyH2OError, OSError) as error:
            say_error(error)
            self.refused = True
        finally:
            self._save_changes()

    def _save_changes(self) -> None:
        """Save changes of a command that has ended, as saving uses the conversation."""
        if self._changed:
            self._changed = False
            self.autosave.save(self.conversation)

    def send(self, message: str) -> None:
        """Answer a message; if it is rejected, a script ends."""
        if not message.strip():
            raise InputError("the message is empty: nothing was sent")
        self.answer(
            lambda: self.conversation.say(message, max_tokens=self.max_tokens),
            "your message was removed",
            message=message,
        )

    def answer(
        self,
        start: Callable[[], Generator[str]],
        otherwise: str,
        *,
        n_before: int = 0,
        message: str = "",
    ) -> None:
        """Show an answer while it is generated, then its statistics, and save it.

        Args:
            start: returns a generator of the text.
            otherwise: message if the answer is empty.
            n_before: number of earlier tokens of an answer that is continued.
            message: the new message, if any.
        """
        self.autosave.prepare(self.conversation, message)
        answer = self._stream(start, n_before)
        for _ in range(MAX_CALL_ROUNDS):
            if not (answer.kept and self.conversation.calls) or self._repeats_calls():
                break
            self.autosave.save(self.conversation)
            answer = self._stream(self.results())
        terminal.say(footer(answer, self.conversation.llm.kv), style="dim")
        self._say_end(answer, otherwise)
        self.autosave.save(self.conversation)
        if answer.finish == FINISH_INTERRUPTED and not self.source.interactive:
            raise KeyboardInterrupt

    def _repeats_calls(self) -> bool:
        """Return whether the model makes the same calls for the third time, as small models do."""
        last = self.conversation.turns[-1]
        before = [step.calls for step in last.steps[1 - SAME_CALLS :]]
        made = [[(call.name, call.arguments) for call in calls] for calls in (*before, last.calls)]
        return len(made) == SAME_CALLS and all(each == made[0] for each in made)

    def results(self) -> Callable[[], Generator[str]]:
        """Run the pending tool calls, and return a function that continues with their results."""
        calls = [self.tools.run(call) for call in self.conversation.calls]
        self.autosave.settle()
        return partial(self.conversation.give_results, calls, max_tokens=self.max_tokens)

    def _stream(self, start: Callable[[], Generator[str]], n_before: int = 0) -> AnswerStats:
        """Show a part of an answer; if it fails, a script ends."""
        try:
            return self.answers.stream(self.conversation, start, n_before=n_before)
        except (PyH2OError, OSError):
            self.left = not self.source.interactive
            raise

    def _say_end(self, answer: AnswerStats, otherwise: str) -> None:
        """Print why an answer ended, unless the model ended it, or that it is empty."""
        why = why_short(answer, self.conversation.llm.kv, self.max_tokens)
        if answer.finish == FINISH_INTERRUPTED:
            stays = "the text so far is kept, and /continue continues it"
            terminal.say(f"stopped by Ctrl-C: {stays if answer.kept else otherwise}")
        elif not answer.kept:
            terminal.say(f"{why}: {otherwise}")
        elif why:
            can_continue = (
                answer.finish in (FINISH_REPETITION, FINISH_TOOL_CALLS)
                or answer.written >= self.max_tokens
            )
            cure = (
                "/continue continues it, /regen samples another one"
                if can_continue
                else "all text is kept, but a new chat is needed to continue"
            )
            terminal.say(f"{why}; {cure}", style="yellow")

    def change(self, action: Callable[[], object]) -> None:
        """Change the conversation, to be saved at the end of the command."""
        with self.answers.safe_interrupts():
            action()
        self._changed = True

    def set_system(self, text: str | None) -> None:
        """Set the system prompt, and print how many tokens are read again."""
        self.change(lambda: self.conversation.set_system(text))
        say_unread(self.conversation, self.answers.all)

    def set_tools(self, tools: Sequence[Tool]) -> None:
        """Set the tools, and print how many tokens are read again."""
        self.change(lambda: self.conversation.set_tools(tools))
        say_unread(self.conversation, self.answers.all)

    def set_thinking(self, thinking: Thinking) -> None:
        """Set the reasoning settings, and print how many tokens are read again."""
        self.change(lambda: self.conversation.set_thinking(thinking))
        say_unread(self.conversation, self.answers.all)

    def greet(self) -> None:
        """Show model, session and cache to a user."""
        if not self.source.interactive:
            return
        self.autosave.settle()
        kv = self.conversation.llm.kv
        model = Path(self.conversation.llm.model.path).name
        session = self.autosave.name or ("a new session" if self.autosave.enabled else "not saved")
        cache = f"budget {kv.budget:,} ({kv.parts()})" if kv.evicting else "full cache"
        terminal.say(f"{model} · {session} · window {kv.window:,} tokens, {cache}", style="dim")
        n_tools = len(self.conversation.tools)
        tools = f", /tools the {count(n_tools, 'tool')} that the model may call" if n_tools else ""
        terminal.say(f"/help lists the commands{tools}", style="dim")
