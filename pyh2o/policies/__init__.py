"""Policies: what makes a row worth keeping. One small file for each.

At a compaction the pinned and the recent rows of every (layer, KV head) stay, and the others
compete for the places that are left. A policy gives each row a score, and the highest scores stay;
of equal ones the newer row. It is a frozen record of its parameters:

    from pyh2o.policies import Snap

    llm = Llama(model_path="model.gguf", policy=Snap(queries=64))
    llm = Llama(model_path="model.gguf", policy="snap:queries=64")  # the same

The scores of this package explain and check; :mod:`research.reference` uses them. A running model
computes the same ones in native/src/policies.

A new policy here is one file: a frozen dataclass with a `name`, its parameters and `score`, and its
class in the list below.
"""

from .base import HeadRows, Policy
from .expected import Expected
from .h2o import H2O, H2OCells, H2OLayer
from .h2o_decay import H2ODecay
from .h2o_far import H2OFar
from .h2o_mean import H2OMean
from .hashing import uniform_numbers
from .keydiff import KeyDiff
from .nacl import NACL
from .parsing import POLICIES, parse_policy
from .random_rows import RandomRows
from .roco import RoCo
from .snap import Snap
from .streaming import Streaming
from .tova import TOVA

__all__ = [
    "H2O",
    "NACL",
    "POLICIES",
    "TOVA",
    "Expected",
    "H2OCells",
    "H2ODecay",
    "H2OFar",
    "H2OLayer",
    "H2OMean",
    "HeadRows",
    "KeyDiff",
    "Policy",
    "RandomRows",
    "RoCo",
    "Snap",
    "Streaming",
    "parse_policy",
    "uniform_numbers",
]
