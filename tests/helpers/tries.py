"""Properties tested with Hypothesis: number of examples and seed.

`PYH2O_EXAMPLES` is the number of examples of each property; the default is a few fixed ones. The
seed is the test's own, as everywhere (`random_cases.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from hypothesis.strategies import SearchStrategy

from pyh2o.errors import PyH2OError

Example = TypeVar("Example")

STEPS = 25
"""Most steps of a sequence."""


class Tries:
    """Counts the examples of one test, including those that simplify a failing one."""

    def __init__(self, seed: int) -> None:
        self.n = 0
        self._seed = seed

    def every(
        self, drawn: SearchStrategy[Example], holds: Callable[[Example], None], *, examples: int
    ) -> None:
        """Check that `holds` raises for no value; `examples` unless PYH2O_EXAMPLES is set."""

        @hypothesis.seed(self._seed)
        @hypothesis.settings(self._settings(examples))
        @hypothesis.given(drawn)
        def it_holds(example: Example) -> None:
            self.n += 1
            holds(example)

        it_holds()

    def sequences(self, machine: Callable[[], RuleBasedStateMachine], *, examples: int) -> None:
        """Check random sequences of a machine's steps; `examples` as in `every`."""

        def begun() -> RuleBasedStateMachine:
            self.n += 1
            return machine()

        settings = hypothesis.settings(self._settings(examples), stateful_step_count=STEPS)
        run_state_machine_as_test(hypothesis.seed(self._seed)(begun), settings=settings)

    @staticmethod
    def _settings(examples: int) -> hypothesis.settings:
        # deadlines depend on timing, and an example database would be written to the checkout
        return hypothesis.settings(
            max_examples=int(os.environ.get("PYH2O_EXAMPLES", examples)),
            database=None,
            deadline=None,
            print_blob=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )


def refused(error: PyH2OError) -> None:
    """Check that the error is a single line."""
    assert len(str(error).splitlines()) == 1, repr(str(error))


def or_refusal(work: Callable[[], Any]) -> Any:
    """Return the result of work, or None if it is refused."""
    try:
        return work()
    except PyH2OError as error:
        refused(error)
        return None
