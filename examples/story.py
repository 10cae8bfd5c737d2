"""Write a long story, which can be stopped and resumed at any token.

    python examples/story.py [MODEL.gguf [TOKENS [FILE]]]

The default model is the demo model (`pyh2o models fetch`). Ctrl-C stops the story; the same command
resumes it.
"""

import sys
from pathlib import Path

from pyh2o import Llama, Sampling, Story
from pyh2o.models import demo_model_path

PROMPT = "Once upon a time, at the sea,"

path = Path(sys.argv[1]) if len(sys.argv) > 1 else demo_model_path()
n_tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
file = Path(sys.argv[3] if len(sys.argv) > 3 else "tale.story")
if not path.is_file():
    sys.exit(f"no such model {path}: run `pyh2o models fetch`, or give a GGUF file")

with Llama(str(path), n_ctx=2048, hh=0.1, recent=0.1, verbose=False) as llm:
    if file.exists():
        story = Story.load(file, llm)
        print(f"resuming {file} after {len(story.tokens):,} tokens:")
    else:
        story = Story(llm, PROMPT, sampling=Sampling(seed=1))
        print(PROMPT, end="")
    try:
        for piece in story.write(n_tokens):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    story.save(file)
    print(f"\n[{story.written:,} tokens in {file} · {llm.kv.summary()}]")
