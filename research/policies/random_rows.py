"""A random choice, to see what a policy is worth.

pyh2o generate --policy research/policies/random_rows.py:RandomRows
"""

from __future__ import annotations

from dataclasses import dataclass

from pyh2o.policies import FloatArray, HeadRows, Policy, parameter, uniform_numbers
from pyh2o.policies.last_queries import LARGEST_SEED


@dataclass(frozen=True)
class RandomRows(Policy):
    """Keeps a random sample of the text, another one in every (layer, KV head).

    Source: none needed; other collections of policies have it as the check that scores matter
    (NVIDIA/kvpress, `kvpress/presses/random_press.py`).

    Needs nothing but positions.

    Deviations: kvpress draws anew each time. Here a row's number is a hash of where it is, the same
    at every compaction, so that what stays is a uniform sample of all that came before the recent
    rows, and a run can be repeated.

    Attributes:
        seed: of the draw.
    """

    seed: int = parameter(0, least=0, most=LARGEST_SEED)

    def score(self, rows: HeadRows) -> FloatArray:
        return uniform_numbers(self.seed, rows.layer, rows.head, rows.positions)
