"""A chat: line after line is answered, or done if it is a command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyh2o.errors import OtherSettingsError, PyH2OError
from pyh2o.generation.finish import (
    FINISH_INTERRUPTED,
    FINISH_LENGTH,
    FINISH_REPETITION,
    FINISH_STOP,
)

from ..endings import why_ended
from ..errors import InputError, one_line, say_error
from ..terminal.terminal import harmless, terminal
from ..terminal.wording import count, excerpt
from .answers import Answer, Answers
from .autosave import Autosave
from .commands import run_command
from .input import PROMPT, QUOTE, Dropped, Source
from .markdown import answer_writer
from .report import Tally, footer, statistics
from .rereading import is_wanted, say_recompute, say_reread

if TYPE_CHECKING:
    from pyh2o.sessions.conversation import Conversation
    from pyh2o.sessions.saved import SavedChat


class Chat:
    """A conversation with a person or a script.

    Attributes:
        conversation: what has been said; `/load` puts another one here.
        source: where the lines come from.
        autosave: where the conversation is saved.
        max_tokens: most tokens of an answer.
        listed: the saved conversations that `/sessions` has shown last.
        left: set to leave.
        refused: whether anything could not be done.
    """

    def __init__(
        self,
        conversation: Conversation,
        source: Source,
        answers: Answers,
        autosave: Autosave,
        *,
        max_tokens: int,
        markdown: bool,
    ) -> None:
        self.conversation = conversation
        self.source = source
        self.autosave = autosave
        self.max_tokens = max_tokens
        self.listed: list[SavedChat] = []
        self.left = False
        self.refused = False
        self._answers = answers
        self._markdown = markdown
        self._tally = Tally()
        self._last: Answer | None = None
        self._changed = False  # and not saved yet
        self._copies: set[Path] = set()
        self._trouble = ""  # that was said last
        self._n_evicted = conversation.llm.kv.tokens_evicted  # when that was looked at last

    def run(self) -> None:
        """Answer line after line until /quit or the end of the input.

        Raises:
            InputError: a line of a script that is not UTF-8.
            KeyboardInterrupt: Ctrl-C while a script is answered, or pressed twice.
        """
        self._save_changes()  # by options
        while not self.left:
            try:
                self._take(self.source.read())
            except EOFError:
                self.left = True
            except Dropped:
                terminal.say("/quit or Ctrl-D leaves")
        if self.source.interactive and self.autosave.enabled and self.conversation.turns:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        if self.autosave.settle():
            terminal.say(f"saved as {self.autosave.name}: pyh2o chat -c goes on", style="dim")
        else:
            terminal.say(self.autosave.describe(self.conversation), style="yellow")

    def _take(self, line: str) -> None:
        self.autosave.settle()
        try:
            if line.startswith(QUOTE):
                self.send(self.source.read_quoted(line))
            elif line.startswith("/"):
                run_command(self, line)
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
        try:
            with answer_writer(markdown=self._markdown) as write:
                answer = self._answers.run(self.conversation, start, write, n_before=n_before)
        except BrokenPipeError:
            raise
        except (PyH2OError, OSError) as error:
            say_error(error)
            self.refused = True
            self.left = not self.source.interactive
            return
        self._last = answer
        self._tally.add(answer)
        terminal.say(footer(answer, self.conversation.llm.kv), style="dim")
        self._say_end(answer, otherwise)
        self._say_fading()
        self._say_trouble()
        self.autosave.save(self.conversation)
        if answer.finish == FINISH_INTERRUPTED and not self.source.interactive:
            raise KeyboardInterrupt

    def _say_end(self, answer: Answer, otherwise: str) -> None:
        """Say why an answer ended, unless the model ended it, or what there is without one."""
        if answer.finish == FINISH_INTERRUPTED:
            stays = "what was said so far stays, and /continue goes on"
            what = stays if answer.kept else otherwise
            terminal.say(f"stopped by Ctrl-C: {what}")
        elif not answer.kept:
            terminal.say(f"the model had nothing to say: {otherwise}")
        elif answer.finish == FINISH_STOP and not answer.written:
            terminal.say("the model had nothing to add")
        elif answer.finish == FINISH_LENGTH and answer.written >= self.max_tokens:
            terminal.say(
                f"the answer was cut at {count(self.max_tokens, 'token')}: /continue goes on, or "
                "give a larger --max-tokens",
                style="yellow",
            )
        elif answer.finish == FINISH_REPETITION:
            terminal.say(
                "the answer was ended because it only repeated itself: /continue goes on all the "
                "same, /regen draws another one",
                style="yellow",
            )
        elif answer.finish != FINISH_STOP:
            why = why_ended(answer.finish, self.conversation.llm.kv)
            terminal.say(
                f"the answer ends here: {why}; all text is kept, but start a new chat to go on",
                style="yellow",
            )

    def _say_fading(self) -> None:
        """Say once in a conversation that tokens of it are evicted from now on."""
        n_evicted = self.conversation.llm.kv.tokens_evicted
        if n_evicted and not self._n_evicted:
            terminal.say(
                "from here on older words fade: /kv shows what is still there", style="dim"
            )
        self._n_evicted = max(self._n_evicted, n_evicted)

    def _say_trouble(self) -> None:
        """Say once, in one line, what is wrong with the archive."""
        trouble = self.conversation.llm.archive_trouble
        if trouble and trouble != self._trouble:
            terminal.say(f"warning: {trouble}", style="yellow")
        self._trouble = trouble

    def change(self, action: Callable[[], object]) -> None:
        """Change the conversation; it is saved at the end of the command."""
        with self._answers.undisturbed():
            action()
        self._changed = True

    def choose(self, attempt: int) -> None:
        """Have an answer back that was replaced, and show it as it was shown."""
        self.change(lambda: self.conversation.choose(attempt))
        with answer_writer(markdown=self._markdown) as write:
            write(self.conversation.turns[-1].answer)

    def clear(self) -> None:
        """Begin a new conversation; the one so far stays where it is saved.

        Raises:
            InputError: it is to be saved, and cannot be.
        """
        turns = len(self.conversation.turns)
        left = self._make_sure_it_is_saved()
        with self._answers.undisturbed():
            self.conversation.clear()
        self._n_evicted = 0
        if left:
            self.autosave.move()
        stays = "; the system prompt stays" if self.conversation.system else ""
        what = (
            f"a new conversation begins, and `pyh2o chat --session {shlex.quote(left)}` goes on "
            "with the one so far"
        )
        terminal.say((what if left else f"forgotten: {count(turns, 'turn')}") + stays)

    def _make_sure_it_is_saved(self) -> str:
        """The name that the conversation is saved under, or "" if it is not to be saved."""
        if not self.autosave.enabled or not self.conversation.turns:
            return ""
        if not self.autosave.settle():
            self.autosave.save_now(self.conversation)
        return self.autosave.name

    def set_system(self, text: str | None) -> None:
        """Go on under another system prompt, and say what that costs."""
        self.change(lambda: self.conversation.set_system(text))
        if self.conversation.turns:
            tokens = count(self.conversation.turns[-1].end, "token")
            terminal.say(f"{tokens} will be read again with the next message")

    def save_copy(self, path: Path) -> None:
        """Save the conversation in a file, and go on saving it where it is.

        Raises:
            InputError: there is a file that this chat has not written.
            SessionError: it cannot be written.
        """
        if path.exists() and path.resolve() not in self._copies:
            raise InputError(f"{path} exists: give another name")
        self.conversation.save(path, portable=True)
        self._copies.add(path.resolve())

    def load(self, path: Path, session: SavedChat | None = None, *, reread: bool = False) -> None:
        """Go on with a saved conversation; this one stays where it is saved.

        Args:
            path: its file.
            session: what is saved there, to be saved there again; None for a copy.
            reread: have its text read again; a person is asked where model or settings were others.

        Raises:
            InputError: this conversation is to be saved, and cannot be, or the session is open
                elsewhere, or here, or its text shall not be read again.
            SessionError: there is no such file, or it does not fit; nothing is changed then.
        """
        if session is not None and session.name == self.autosave.name:
            raise InputError(f"this is session {session.name} already")
        speed = self._tally.seconds_per_token_read
        try:
            loaded = self._moved(path, session, reread=reread)
        except OtherSettingsError as error:
            if not is_wanted(error, path, self.source, speed):
                name = session.name if session is not None else path
                raise InputError(
                    f"{one_line(error)}; or have its text read again: /load {name} --reread"
                ) from None
            reread = True
            loaded = self._moved(path, session, reread=True)
        if reread:
            is_kept = session is not None and self.autosave.enabled
            say_reread(loaded, self.autosave.keep(session) if is_kept and session else None, speed)
        self.leave_archive_alone()
        self.say_last_exchange()
        if session is None:
            self.autosave.save(loaded)

    def _moved(self, path: Path, session: SavedChat | None, *, reread: bool) -> Conversation:
        """Load a conversation, to be saved elsewhere than the one before."""
        now = self.conversation
        left = self._make_sure_it_is_saved()
        with self.autosave.moving(session, leave=bool(left)), self._answers.undisturbed():
            loaded = now.load(
                path,
                now.llm,
                reread=reread,
                on_recompute=say_recompute,
                copies_mib=now.copies.mib,
            )
        self.conversation = loaded
        self._n_evicted = loaded.llm.kv.tokens_evicted
        return loaded

    def statistics(self) -> Iterator[tuple[str, str]]:
        """Labels and lines for `/stats`."""
        saved = self.autosave.describe(self.conversation)
        return statistics(self.conversation, self._last, self._tally, saved)

    def greet(self) -> None:
        """Tell a person where they are."""
        if not self.source.interactive:
            return
        self.autosave.settle()
        kv = self.conversation.llm.kv
        model = Path(self.conversation.llm.model_path).name
        session = f"session {self.autosave.name}" if self.autosave.name else "a new session"
        if not self.autosave.enabled:
            session = "not saved"
        terminal.say(f"{model} · {session}", style="dim")
        cache = f"budget {kv.budget:,} ({kv.parts()})" if kv.evicting else "full cache"
        terminal.say(f"window {kv.window:,} tokens, {cache}", style="dim")
        terminal.say("/help lists the commands", style="dim")

    def leave_archive_alone(self) -> None:
        """Go on in a copy of a saved archive that ends with the program, if the chat is not saved.

        Nothing that is said from now on may stay on the disk.
        """
        llm = self.conversation.llm
        if self.autosave.enabled or llm.archive is None or not llm.archive.is_of_session:
            return
        llm.load_kv_state(llm.kv_state(), llm.input_ids[: llm.n_tokens].tolist())  # makes the copy
        llm.archive.remove_unsaved()

    def say_last_exchange(self) -> None:
        """Show what a conversation that is continued was about."""
        self._say_trouble()
        turns = self.conversation.turns
        tokens = turns[-1].end if turns else 0
        said = f"{count(len(turns), 'turn')}, {count(tokens, 'token')}"
        terminal.say(f"continuing a conversation of {said}", style="dim")
        if turns and self.source.interactive:
            last = turns[-1]
            exchange = harmless(f"{PROMPT}{excerpt(last.user)}\n{excerpt(last.answer.rstrip())}")
            terminal.say(exchange, style="dim")

    def adapt(self, sampling: dict[str, Any], system: str | None) -> None:
        """Let options that were typed replace what a saved conversation brought along."""
        self.conversation.sampling = replace(self.conversation.sampling, **sampling)
        if system is not None and system != self.conversation.system:
            self.set_system(system)
