"""Properties that Hypothesis tries to break: how often, and with which seed.

`PYH2O_EXAMPLES` is the number of examples of each property; without it each has a few, always the
same ones. The seed is the test's own, as everywhere (`random_cases.py`).
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
    """Of one test.

    Attributes:
        n: examples so far, with those that make a failing one simpler.
    """

    def __init__(self, seed: int) -> None:
        self.n = 0
        self._seed = seed

    def every(
        self, drawn: SearchStrategy[Example], holds: Callable[[Example], None], *, examples: int
    ) -> None:
        """Look for a drawn value of which something does not hold.

        Args:
            drawn: the values.
            holds: raises if it does not hold of a value.
            examples: how many, unless PYH2O_EXAMPLES says another number.
        """

        @hypothesis.seed(self._seed)
        @hypothesis.settings(self._settings(examples))
        @hypothesis.given(drawn)
        def it_holds(example: Example) -> None:
            self.n += 1
            holds(example)

        it_holds()

    def sequences(self, machine: Callable[[], RuleBasedStateMachine], *, examples: int) -> None:
        """Look for a sequence of steps that a machine takes and should not.

        Args:
            machine: makes one, in its first state.
            examples: how many sequences, as above.
        """

        def begun() -> RuleBasedStateMachine:
            self.n += 1
            return machine()

        settings = hypothesis.settings(self._settings(examples), stateful_step_count=STEPS)
        run_state_machine_as_test(hypothesis.seed(self._seed)(begun), settings=settings)

    @staticmethod
    def _settings(examples: int) -> hypothesis.settings:
        # deadlines would be timings, and a file of examples is none of the checkout's
        return hypothesis.settings(
            max_examples=int(os.environ.get("PYH2O_EXAMPLES", examples)),
            database=None,
            deadline=None,
            print_blob=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )


def refused(error: PyH2OError) -> None:
    """What a user sees of it is one line."""
    assert len(str(error).splitlines()) == 1, repr(str(error))


def or_refusal(work: Callable[[], Any]) -> Any:
    """What work returns, or None if it is refused, as everything is that makes no sense."""
    try:
        return work()
    except PyH2OError as error:
        refused(error)
        return None
