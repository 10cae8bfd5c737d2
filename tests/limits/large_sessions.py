"""A session of a hundred thousand turns, and a folder of a thousand sessions: times and memory.

    python tests/limits/large_sessions.py --turns 100000 --sessions 1000

The model is a tiny random one. Times are those of the processor, so that others may be at work.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyh2o import Conversation, Llama
from pyh2o.sessions.listing import read_saved_text
from pyh2o.sessions.saved import SavedChat, saved_chats
from pyh2o.system.memory import resident_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

TURNS_OF_EACH = 50


def timed(what: str, work: Callable[[], Any]) -> Any:
    """What `work` returns, with its time told."""
    began = time.process_time()
    result = work()
    seconds = time.process_time() - began
    print(f"  {what}: {seconds:.2f} s, {resident_bytes() / 2**20:.0f} MiB resident", flush=True)
    return result


def saved_conversation(llm: Llama, name: str, n_turns: int) -> Path:
    """The file of a conversation with so many turns, none of which has been read yet."""
    conversation = Conversation(llm)
    said = [(f"what about {i}, tell me all", f"nothing of note in {i}") for i in range(n_turns)]
    timed("take over", lambda: conversation.take_over(said))
    path = SavedChat(name).path
    timed("save", lambda: conversation.save(path))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument("--sessions", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYH2O_CHATS"] = folder
        model = write_tiny_gguf(Path(folder) / "tiny.gguf", seed=5, chat_template=CHAT_TEMPLATE)
        with Llama(str(model), n_ctx=256, n_threads=1, n_threads_batch=1) as llm:
            print(f"a session of {arguments.turns:,} turns")
            path = saved_conversation(llm, "long", arguments.turns)
            timed("load", lambda: Conversation.load(path, llm))
            text = timed("read what it says", lambda: read_saved_text(SavedChat("long")))
            timed("search it", lambda: text.has("nowhere"))
            print(f"  {path.stat().st_size / 2**20:.1f} MiB")
            path.unlink()

            print(f"{arguments.sessions:,} sessions of {TURNS_OF_EACH} turns")
            path = saved_conversation(llm, "first", TURNS_OF_EACH)
            for i in range(1, arguments.sessions):
                shutil.copy(path, SavedChat(f"session {i}").path)
            texts = timed("list them", lambda: [read_saved_text(chat) for chat in saved_chats()])
            found = timed("search them", lambda: [each for each in texts if each.has("nothing")])
            assert len(found) == arguments.sessions
            timed("open one", lambda: Conversation.load(path, llm))


if __name__ == "__main__":
    main()
