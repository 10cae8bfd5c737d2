"""The archive of a saved text, before that goes on: what it has lost, and whose file it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyh2o.errors import PyH2OError

from .errors import say_error
from .terminal.interrupts import Interrupts
from .terminal.progress import Bars
from .terminal.terminal import terminal
from .terminal.wording import count

if TYPE_CHECKING:
    from pyh2o.llama import Llama


def restore_archive(llm: Llama, bars: Bars, interrupts: Interrupts) -> bool:
    """Have them computed again, and say so. Ctrl-C skips that until the text is opened again.

    Args:
        llm: whose `prompt_progress` shows the bars and checks the interrupts.
        bars: of the reading.
        interrupts: what Ctrl-C is to it.

    Returns:
        Whether anything had been lost and is there again.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed twice.
    """
    if llm.archive_lost == 0:
        return False
    terminal.say(
        f"the archive's file lacks {count(llm.archive_lost, 'token')}, or they are damaged: "
        "reading the text up to there again (Ctrl-C skips that)",
        style="yellow",
    )
    try:
        with interrupts:
            llm.restore_archive()
    except KeyboardInterrupt:
        if interrupts.presses != 1:
            raise
    except PyH2OError as error:
        say_error(error)
    finally:
        bars.clear()
    is_whole = llm.archive_lost == 0
    if is_whole:
        terminal.say("the archive is whole again", style="dim")
    return is_whole


def leave_file_alone(llm: Llama) -> None:
    """Go on in a copy of the archive's file that has no name and ends with the program.

    For a text that is not saved: nothing that is said from now on may stay on the disk.

    Args:
        llm: with a saved text, right after it was loaded.
    """
    if llm.archive is None or not llm.archive.is_of_session:
        return
    llm.load_kv_state(llm.kv_state(), llm.input_ids[: llm.n_tokens].tolist())  # makes the copy
    llm.archive.remove_unsaved()
