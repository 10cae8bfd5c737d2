"""`pyh2o sessions`: manage the sessions that `pyh2o chat` and the server have saved."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from pyh2o.cache.statistics import mib_text
from pyh2o.sessions.chats import chats_folder, locked, open_chats
from pyh2o.sessions.database import Database
from pyh2o.sessions.listing import text_of
from pyh2o.sessions.messages import STORY, TextInfo
from pyh2o.system.home import expanded

from .errors import InputError, reported_errors
from .help import Group
from .shell_completion import complete_session
from .terminal.terminal import harmless, terminal
from .terminal.wording import count, shortened
from .text_files import write_file

STDOUT = Path("-")
FORMS = {".txt": "text", ".md": "markdown", ".json": "json"}
"""Export formats by file name extension; other files get the session."""

app = typer.Typer(cls=Group, invoke_without_command=True)
SessionName = Annotated[
    str, typer.Argument(help="Name of the session.", autocompletion=complete_session)
]


# -------------------------------------------------------------------------------------------------
# Listing and searching
# -------------------------------------------------------------------------------------------------


@app.callback()
def sessions(context: typer.Context) -> None:
    """Manage saved conversations and stories; without a command, list them."""
    if context.invoked_subcommand is None:
        with reported_errors():
            list_command()


@app.command("list")
def list_command() -> None:
    """List saved sessions, the most recent first: kind, time, size of the text and of its cache."""
    with open_chats() as database:
        texts = database.texts()
        for line in lines_of(database, texts):
            terminal.write(f"{line}\n")
    if texts:
        terminal.say(f"{len(texts)} in {database.path}")
    else:
        terminal.say(f"no saved sessions in {chats_folder()} yet: `pyh2o chat` saves each turn")


def lines_of(database: Database, texts: Sequence[TextInfo]) -> list[str]:
    """Return a line per session: title, kind, time of the last change, sizes."""
    titles = [shortened(text.title) for text in texts]
    width = max(map(len, titles), default=0)
    lines: list[str] = []
    for title, text in zip(titles, texts, strict=True):
        kind = "story" if text.kind == STORY else "chat "
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(text.changed))
        size, cache = count(text.n_tokens, "token") if text.n_tokens else "", ""
        with suppress(OSError):  # not saved
            cache = f"{mib_text(database.kv_file(text.id).stat().st_size)} MiB cache"
        lines.append(f"{title:<{width}}  {kind}  {changed}  {size:>14}  {cache}".rstrip())
    return lines


@app.command("search")
def search(
    words: Annotated[
        list[str], typer.Argument(help="Words that a message or a title must contain.")
    ],
) -> None:
    """Search messages, passages and titles for all of these words."""
    with open_chats() as database:
        found = database.search(" ".join(words))
    for each in found:
        terminal.write(f"{shortened(each.text.title)}  {harmless(each.snippet)}\n")
    terminal.say(f"{len(found)} found")


# -------------------------------------------------------------------------------------------------
# Removing, renaming, copying
# -------------------------------------------------------------------------------------------------


@app.command("remove")
def remove(
    names: Annotated[
        list[str],
        typer.Argument(help="Names of the sessions.", autocompletion=complete_session),
    ],
) -> None:
    """Delete saved sessions permanently."""
    with open_chats() as database:
        for name, text in [(name, _saved(database, name)) for name in names]:
            with locked(database, text):
                database.remove(text)
            terminal.say(f"removed {name}")


@app.command("rename")
def rename(name: SessionName, new: Annotated[str, typer.Argument(help="New name.")]) -> None:
    """Rename a saved session."""
    with _unlocked(name) as (database, text):
        database.rename(text, new)
    terminal.say(f"renamed {name} to {new}")


@app.command("copy")
def copy(name: SessionName, new: Annotated[str, typer.Argument(help="Name of the copy.")]) -> None:
    """Copy a saved conversation or story; both can be resumed."""
    with _unlocked(name) as (database, text):
        if database.find(new) is not None:
            raise InputError(f"session {new} exists: give another name")
        database.copy(text, database, new)
    terminal.say(f"copied {name} to {new}")


# -------------------------------------------------------------------------------------------------
# Exporting, importing
# -------------------------------------------------------------------------------------------------


@app.command("export")
def export(
    name: SessionName,
    file: Annotated[
        Path,
        typer.Argument(
            help="New file: .txt, .md and .json get the text, others the whole session; - is "
            "standard output, as text."
        ),
    ],
    cache: Annotated[
        bool,
        typer.Option(
            "--cache",
            help="Export the KV cache of a session, too, to FILE.kv. Without it, the text is read "
            "again.",
        ),
    ] = False,
) -> None:
    """Export a saved conversation or story to a file.

    `pyh2o sessions import` imports a session or JSON; `/load FILE` in a chat resumes a session.
    """
    form = "text" if file == STDOUT else FORMS.get(file.suffix.lower())
    if file.exists():
        raise InputError(f"{file} exists: give another name")
    if cache and form is not None:
        raise InputError(f"{file} has no cache, as it is exported as {form}: remove --cache")
    with _unlocked(name) as (database, text):
        if form is None:
            with Database(file, single=True) as single:
                database.copy(text, single, cache=cache)
            terminal.say(f"exported {name} to {file}")
            return
        content = text_of(database.read(text), form)
    if file == STDOUT:
        terminal.write(content)
    else:
        write_file(file, content.encode())
        terminal.say(f"exported {name} to {file} as {form}")


@app.command("import")
def import_command(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Exported sessions and JSON files, sessions of older versions, SillyTavern chats "
            "(.jsonl), and conversations.json of ChatGPT."
        ),
    ],
) -> None:
    """Import conversations and stories from files; any model can resume them."""
    # imported here because it loads llama.cpp, which would delay `--help`
    from pyh2o.sessions.import_files import import_file

    with open_chats() as database:
        for file in files:
            for text, unanswered in import_file(database, expanded(file)):
                terminal.say(f"imported {shortened(database.info(text).title)} from {file}")
                if unanswered:
                    terminal.say(f"without its last message, as that has no answer: {unanswered}")


def _saved(database: Database, name: str) -> int:
    """Return the text with this title, or raise an InputError."""
    text = database.find(name)
    if text is None:
        raise InputError(f"unknown session {name}: see `pyh2o sessions list`")
    return text


@contextmanager
def _unlocked(name: str) -> Iterator[tuple[Database, int]]:
    """Yield a text that is not open in a chat."""
    with open_chats() as database:
        text = _saved(database, name)
        with locked(database, text):
            yield database, text
