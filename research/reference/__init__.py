"""NumPy reference: what the native code must compute, written to be read.

A decoder-only language model stores, for every token it has seen, one key and one value vector in
every layer and KV head: the KV cache. It grows with the text. H2O ("Heavy-Hitter Oracle", Zhang
et al., NeurIPS 2023, https://arxiv.org/abs/2306.14048) rests on an observation: a small set of
tokens, the heavy hitters, collects most of the attention. So each (layer, KV head) may keep only

* the *recent* rows, because language is local and a new row had no time to collect attention;
* the *heavy* rows, those that have collected most attention since they were written;
* here also the *pinned* rows, the start of the text (attention sinks, system prompt),

and drop the rest. What is dropped is gone: no later query sees it, unless an archive has it and the
query finds it there. Which rows are heavy is the matter of a policy; H2O is one of those in
:mod:`pyh2o.policies`.

Read in this order:

* :mod:`~research.reference.eviction`: the parameters and the choice of the rows to keep;
* :mod:`~research.reference.attention`: attention over the kept rows, and the score it adds;
* :mod:`~research.reference.queries`: the last queries, for what looks at attention later;
* :mod:`~research.reference.codes`: keys as signs, which tell nearly what a query would pay to them;
* :mod:`~research.reference.archive`: what has left the recent window, to be found there again;
* :mod:`~research.reference.cache`: the rows of one layer: append, keep some, remove the tail;
* :mod:`~research.reference.compaction`: the scores of all layers and heads, and the choice by them;
* :mod:`~research.reference.search`: the evicted rows that tokens find, and what they pay to them;
* :mod:`~research.reference.weights`: the weights of a Llama model from a GGUF file;
* :mod:`~research.reference.layers`: norms, rotary embeddings and the feed-forward block;
* :mod:`~research.reference.model`: the forward pass, and when compactions happen.

Only reading a model file needs more than NumPy (the `gguf` package).
"""

from .archive import N_PAGE, Rounding, as_float16, as_float32
from .attention import attend, collected_attention, collected_squares
from .cache import LayerCache
from .codes import PageCodes, encode, estimates
from .compaction import compact
from .eviction import EvictionParameters, margin, quotas, select
from .model import ReferenceLlama
from .search import Found, search_groups
from .weights import Hyperparameters, LayerWeights, LlamaWeights, read_gguf

__all__ = [
    "N_PAGE",
    "EvictionParameters",
    "Found",
    "Hyperparameters",
    "LayerCache",
    "LayerWeights",
    "LlamaWeights",
    "PageCodes",
    "ReferenceLlama",
    "Rounding",
    "as_float16",
    "as_float32",
    "attend",
    "collected_attention",
    "collected_squares",
    "compact",
    "encode",
    "estimates",
    "margin",
    "quotas",
    "read_gguf",
    "search_groups",
    "select",
]
