"""A chat: line after line is answered, or done if it is a command."""

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
from .answers import Answer, Answers, footer, say_unread, why_short
from .autosave import Autosave
from .command_table import Commands
from .input import QUOTE, Dropped, Source
from .tools import ChatTools

if TYPE_CHECKING:
    from pyh2o.sessions.conversation import Conversation
    from pyh2o.sessions.saved import SavedChat
    from pyh2o.writing.thinking import Thinking
    from pyh2o.writing.tools import Tool


# Of one answer, against models that call without end.
MOST_ROUNDS_OF_CALLS = 50
SAME_CALLS = 3


@dataclass
class Chat:
    """A conversation with a person or a script.

    Attributes:
        conversation: what has been said; `/load` puts another one here.
        commands: what a line that begins with a slash may say.
        source: where the lines come from.
        answers: what streams them.
        autosave: where the conversation is saved.
        tools: that the model may call.
        max_tokens: most tokens of an answer.
        listed: the saved conversations that `/sessions` has shown last.
        left: set to leave.
        refused: whether anything could not be done.
    """

    conversation: Conversation
    commands: Commands
    source: Source
    answers: Answers
    autosave: Autosave
    tools: ChatTools
    max_tokens: int
    listed: list[SavedChat] = field(default_factory=list)
    left: bool = False
    refused: bool = False
    _changed: bool = False  # and not saved yet
    _trouble: str = ""  # that was said last

    def run(self) -> None:
        """Answer line after line until /quit or the end of the input."""
        self._save_changes()  # by options
        while not self.left:
            try:
                self._take(self.source.read())
            except EOFError:
                self.left = True
            except Dropped:
                terminal.say("/quit or Ctrl-D leaves")
        if self.source.interactive and self.autosave.enabled and self.conversation.turns:
            if self.autosave.settle():
                terminal.say(f"saved as {self.autosave.name}: pyh2o chat -c goes on", style="dim")
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
        """Save what a command has changed, now that it needs the conversation no more."""
        if self._changed:
            self._changed = False
            self.autosave.save(self.conversation)

    def send(self, message: str) -> None:
        """Have a message answered; a script ends with a message that is refused."""
        if not message.strip():
            raise InputError("the message is empty: nothing was sent")
        self.answer(
            lambda: self.conversation.say(message, max_tokens=self.max_tokens),
            "your message was taken back",
        )

    def answer(
        self, start: Callable[[], Generator[str]], otherwise: str, *, n_before: int = 0
    ) -> None:
        """Show an answer as it comes, then what it took, and save it.

        Args:
            start: gives its text, piece by piece.
            otherwise: what happens if there is no answer.
            n_before: tokens that are there already of an answer that goes on.
        """
        self.autosave.begin(self.conversation)
        self.conversation.noted_beside = self.autosave.path
        answer = self._stream(start, n_before)
        for _ in range(MOST_ROUNDS_OF_CALLS):
            if not (answer.kept and self.conversation.calls) or self._repeats_calls():
                break
            self.autosave.save(self.conversation)
            answer = self._stream(self.results())
        terminal.say(footer(answer, self.conversation.llm.kv), style="dim")
        self._say_end(answer, otherwise)
        self.say_trouble()
        self.autosave.save(self.conversation)
        if answer.finish == FINISH_INTERRUPTED and not self.source.interactive:
            raise KeyboardInterrupt

    def _repeats_calls(self) -> bool:
        """Whether the model makes the same calls for the third time, as small ones do for ever."""
        last = self.conversation.turns[-1]
        before = [step.calls for step in last.steps[1 - SAME_CALLS :]]
        made = [[(call.name, call.arguments) for call in calls] for calls in (*before, last.calls)]
        return len(made) == SAME_CALLS and all(each == made[0] for each in made)

    def results(self) -> Callable[[], Generator[str]]:
        """Run the calls that wait for results; what goes on with those."""
        calls = [self.tools.run(call) for call in self.conversation.calls]
        self.autosave.settle()
        return partial(self.conversation.give_results, calls, max_tokens=self.max_tokens)

    def _stream(self, start: Callable[[], Generator[str]], n_before: int = 0) -> Answer:
        """Show a part of an answer; a script ends with one that fails."""
        try:
            return self.answers.stream(self.conversation, start, n_before=n_before)
        except (PyH2OError, OSError):
            self.left = not self.source.interactive
            raise

    def _say_end(self, answer: Answer, otherwise: str) -> None:
        """Say why an answer ended, unless the model ended it, or what there is without one."""
        why = why_short(answer, self.conversation.llm.kv, self.max_tokens)
        if answer.finish == FINISH_INTERRUPTED:
            stays = "what was said so far stays, and /continue goes on"
            terminal.say(f"stopped by Ctrl-C: {stays if answer.kept else otherwise}")
        elif not answer.kept:
            terminal.say(f"{why}: {otherwise}")
        elif why:
            can_go_on = (
                answer.finish in (FINISH_REPETITION, FINISH_TOOL_CALLS)
                or answer.written >= self.max_tokens
            )
            cure = (
                "/continue goes on, /regen draws another one"
                if can_go_on
                else "all text is kept, but start a new chat to go on"
            )
            terminal.say(f"{why}; {cure}", style="yellow")

    def say_trouble(self) -> None:
        """Say once, in one line, what is wrong with the archive."""
        trouble = self.conversation.llm.archive_trouble
        if trouble and trouble != self._trouble:
            terminal.say(f"warning: {trouble}", style="yellow")
        self._trouble = trouble

    def change(self, action: Callable[[], object]) -> None:
        """Change the conversation; it is saved at the end of the command."""
        with self.answers.undisturbed():
            action()
        self._changed = True

    def set_system(self, text: str | None) -> None:
        """Go on under another system prompt, and say what that costs."""
        self.change(lambda: self.conversation.set_system(text))
        say_unread(self.conversation)

    def set_tools(self, tools: Sequence[Tool]) -> None:
        """Go on with other tools, and say what that costs."""
        self.change(lambda: self.conversation.set_tools(tools))
        say_unread(self.conversation)

    def set_thinking(self, thinking: Thinking) -> None:
        """Have other thoughts from now on, and say what that costs."""
        self.change(lambda: self.conversation.set_thinking(thinking))
        say_unread(self.conversation)

    def greet(self) -> None:
        """Tell a person where they are."""
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
