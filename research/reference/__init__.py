"""NumPy reference: what the native code must compute, written to be read.

A decoder-only language model stores, for every token it has seen, one key and one value vector in
every layer and KV head: the KV cache. It grows with the text. H2O ("Heavy-Hitter Oracle", Zhang et
al., NeurIPS 2023, https://arxiv.org/abs/2306.14048) rests on an observation: a small set of tokens,
the heavy hitters, collects most of the attention. So each (layer, KV head) may keep only

* the *recent* rows, because language is local and a new row had no time to collect attention;
* the *heavy* rows, those that have collected most attention since they were written;
* here also the *pinned* rows, the start of the text (attention sinks, system prompt),

and evict the rest. No later query attends to an evicted row, unless an archive has it and the query
retrieves it. A policy decides which rows are heavy; H2O is one of those in :mod:`pyh2o.policies`.

Read in this order:

* :mod:`~research.reference.eviction`: parameters and selection of the rows to keep;
* :mod:`~research.reference.attention`: attention over the kept rows, and the score it adds;
* :mod:`~research.reference.queries`: the last queries, for policies that need attention later;
* :mod:`~research.reference.codes`: sign codes of keys, which estimate a query's attention to them;
* :mod:`~research.reference.archive`: rows that have left the recent window, for retrieval;
* :mod:`~research.reference.cache`: the rows of one layer: append, keep some, remove the tail;
* :mod:`~research.reference.compaction`: scores of all layers and heads, and selection by them;
* :mod:`~research.reference.search`: evicted rows that tokens retrieve, and attention to them;
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
from .search import Retrieved, search_groups
from .weights import Hyperparameters, LayerWeights, LlamaWeights, read_gguf

__all__ = [
    "N_PAGE",
    "EvictionParameters",
    "Hyperparameters",
    "LayerCache",
    "LayerWeights",
    "LlamaWeights",
    "PageCodes",
    "ReferenceLlama",
    "Retrieved",
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
