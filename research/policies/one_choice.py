"""H2O for heads that keep the same rows, to measure the gain of a selection per head.

pyh2o generate --policy research/policies/one_choice.py:H2OLayer
"""

from __future__ import annotations

from typing import ClassVar

from pyh2o.policies import H2O
from pyh2o.policies.base import Scope


class H2OLayer(H2O):
    """Keeps the rows with most attention on average over a layer's KV heads, the same in all.

    Source: `h2o`; to measure the gain of a selection per head.

    Deviation: from the paper, whose heads select separately.
    """

    scope: ClassVar[Scope] = "layer"


class H2OCells(H2O):
    """Keeps the rows with most attention on average over all layers and KV heads, the same in all.

    Source: `h2o`; to measure the effect of freeing whole llama.cpp cells, which all layers and
    heads share.

    Deviation: from the paper, whose heads select separately.
    """

    scope: ClassVar[Scope] = "cache"
