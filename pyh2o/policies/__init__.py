"""Eviction policies: rules that score rows, one small class each.

A compaction keeps the pinned and recent rows of every (layer, KV head). The other rows compete for
the rest of the budget: a policy scores them, and those with the highest scores are kept. Of equal
scores the newer row is kept. A policy is a frozen dataclass of its parameters:

    from pyh2o.policies import Snap

    llm = Llama(model_path="model.gguf", policy=Snap(queries=64))
    llm = Llama(model_path="model.gguf", policy="snap:queries=64")  # the same

A custom policy is a class with a `score` method, in any file:

    @dataclass(frozen=True)
    class Often(Policy):
        needs = ("attention",)

        power: float = 1.0

        def score(self, rows: HeadRows) -> FloatArray:
            return rows.attention / rows.ages**self.power

    llm = Llama(model_path="model.gguf", policy=Often(power=0.5))
    llm = Llama(model_path="model.gguf", policy="often.py:Often:power=0.5")  # from its file

On the command line it is `--policy often.py:Often`. A compaction calls it in the thread that
evaluates tokens, and `Llama.eval` raises its errors. native/src/policies implements
`NATIVE_POLICIES` in C++ too, for speed; research/policies has more examples.
"""

from .base import FloatArray, HeadRows, Need, Policy, checked_scores, parameter
from .h2o import H2O, H2ODecay, H2OFar, H2OMean, RoCo
from .parsing import NATIVE_POLICIES, POLICIES, parse_policy
from .snap import Snap
from .streaming import Streaming

__all__ = [
    "H2O",
    "NATIVE_POLICIES",
    "POLICIES",
    "FloatArray",
    "H2ODecay",
    "H2OFar",
    "H2OMean",
    "HeadRows",
    "Need",
    "Policy",
    "RoCo",
    "Snap",
    "Streaming",
    "checked_scores",
    "parameter",
    "parse_policy",
]
