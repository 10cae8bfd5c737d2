"""H2O for heads that have to agree: what a choice of each head on its own is worth.

pyh2o generate --policy research/policies/one_choice.py:H2OLayer
"""

from __future__ import annotations

from typing import ClassVar

from pyh2o.policies import H2O
from pyh2o.policies.base import Scope


class H2OLayer(H2O):
    """Keeps what collected most attention in the mean of a layer's KV heads, which all keep that.

    Source: `h2o`; to measure what a choice of each head on its own is worth.

    Deviation: from the paper, whose heads choose on their own.
    """

    scope: ClassVar[Scope] = "layer"


class H2OCells(H2O):
    """Keeps what collected most attention in the mean of all layers and KV heads: one set for all.

    Source: `h2o`; to measure what freeing whole cells of llama.cpp, which all layers and heads
    share, could do.

    Deviation: from the paper, whose heads choose on their own.
    """

    scope: ClassVar[Scope] = "cache"
