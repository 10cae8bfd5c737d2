"""Chat without a limit of length, in a KV cache of fixed size.

    python examples/chat.py [MODEL.gguf]

The default model is the demo model (`pyh2o models fetch`). An empty line ends the chat.
"""

import sys
from pathlib import Path

from pyh2o import Conversation, Llama
from pyh2o.models import demo_model_path

path = Path(sys.argv[1]) if len(sys.argv) > 1 else demo_model_path()
if not path.is_file():
    sys.exit(f"no such model {path}: run `pyh2o models fetch`, or give a GGUF file")

# The cache keeps a fifth of the window.
with Llama(str(path), n_ctx=2048, hh=0.1, recent=0.1, verbose=False) as llm:
    conversation = Conversation(llm, system="You are a sailor. Answer in a sentence or two.")
    print(f"{path.stem}: type a message")
    for line in sys.stdin:
        if not line.strip():
            break
        for piece in conversation.say(line.strip(), max_tokens=200):
            print(piece, end="", flush=True)
        print(f"\n[{llm.kv.summary()}]")
