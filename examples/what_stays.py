"""Show which rows stay in the cache of a text that is longer than the cache.

    python examples/what_stays.py [MODEL.gguf [TEXT]]

The default model is the demo model (`pyh2o models fetch`). The default text is this docstring,
repeated.
"""

import sys
from pathlib import Path

from pyh2o import Llama
from pyh2o.models import demo_model_path

path = Path(sys.argv[1]) if len(sys.argv) > 1 else demo_model_path()
text = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else str(__doc__) * 20
if not path.is_file():
    sys.exit(f"no such model {path}: run `pyh2o models fetch`, or give a GGUF file")

with Llama(str(path), n_ctx=1024, hh=0.1, recent=0.1, verbose=False) as llm:
    llm.eval(llm.tokenize(text.encode()))
    print(llm.kv.summary())
    print("\nthe heaviest tokens, over all layers and KV heads:")
    for hitter in llm.heavy_hitters(10):
        print(f"{hitter.score:9.3f}  at {hitter.position:5}  {hitter.text!r}")
    print("\nrows before the recent window, by KV head of layer 0:")
    positions, _scores = llm.kv_rows(0)
    for head, kept in enumerate(positions):
        old = kept[kept < llm.n_tokens - llm.kv.recent]
        print(f"head {head}: {len(old)} of {len(kept)} rows, from {old[:8].tolist()} ...")
