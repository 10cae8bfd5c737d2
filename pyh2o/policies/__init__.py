"""Policies: what makes a row worth keeping. One small class for each.

At a compaction the pinned and the recent rows of every (layer, KV head) stay, and the others
compete for the places that are left. A policy gives each row a score, and the highest scores stay;
of equal ones the newer row. It is a frozen record of its parameters:

    from pyh2o.policies import Snap

    llm = Llama(model_path="model.gguf", policy=Snap(queries=64))
    llm = Llama(model_path="model.gguf", policy="snap:queries=64")  # the same

One of your own is a class with a `score`, in any file:

    @dataclass(frozen=True)
    class Often(Policy):
        needs = ("attention",)

        power: float = 1.0

        def score(self, rows: HeadRows) -> FloatArray:
            return rows.attention / rows.ages**self.power

    llm = Llama(model_path="model.gguf", policy=Often(power=0.5))
    llm = Llama(model_path="model.gguf", policy="often.py:Often:power=0.5")  # from its file

`--policy often.py:Often` gives it to every command. A compaction asks it in the thread that
evaluates the tokens; what it raises comes out of `Llama.eval`. native/src/policies computes the
scores of `NATIVE_POLICIES` a second time, for speed; research/policies has more examples.
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
