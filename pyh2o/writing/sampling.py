"""Sampler settings."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

from ..core.utf8 import utf8
from ..errors import SettingsError
from ..system.integers import convert_integers

LARGEST_SEED = 2**32 - 2
# Both mean a random seed in llama.cpp and its clients.
RANDOM_SEEDS = (-1, LARGEST_SEED + 1)


def new_if_random(seed: int) -> int:
    """Return the seed, or a new one if it is in `RANDOM_SEEDS`."""
    return secrets.randbelow(LARGEST_SEED + 1) if seed in RANDOM_SEEDS else seed


@dataclass(frozen=True)
class Sampling:
    """Settings of llama.cpp's samplers, in the order in which they are applied.

    The same settings after the same text sample the same tokens, even in another process.
    `dataclasses.asdict` converts them for JSON.

    Attributes:
        repeat_penalty: divides the logits of the last 64 sampled tokens (multiplies negative
            ones); 1 is off.
        frequency_penalty: subtracted from such a token's logit for each occurrence.
        presence_penalty: subtracted from such a token's logit once.
        dry_multiplier: penalty of tokens that extend a repetition (DRY), also at temperature 0; 0
            is off.
        dry_base: growth factor of the penalty per repeated token.
        dry_allowed_length: repetitions up to this length are not penalized.
        dry_penalty_last_n: number of last tokens, prompt included, to search for repetitions; -1
            for the window, which is also the maximum.
        dry_sequence_breakers: strings that end a repetition; empty ones are ignored.
        top_k: sample from the k most probable tokens; 0 is off.
        typical_p: sample from the tokens closest to the expected surprise with this total
            probability; 1 is off.
        top_p: sample from the most probable tokens with this total probability; 1 is off.
        min_p: drop tokens below this share of the highest probability; 0 is off.
        xtc_probability: probability of dropping all tokens of at least `xtc_threshold` except the
            least probable of them (XTC); 0 is off, and so is a threshold above 0.5.
        xtc_threshold: minimum probability of tokens to drop.
        temperature: 0 takes the most probable token.
        seed: random seed, 0 to 2**32 - 2; -1 and 2**32 - 1 choose a new one, which replaces them
            here.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    # Small models such as the demo model fall into loops in long texts; 1.1 over the last 64 tokens
    # breaks most loops and hardly changes the text of a larger model.
    repeat_penalty: float = 1.1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            SettingsError: a value is not a number, or out of range.
        """
        convert_integers(self)
        object.__setattr__(self, "seed", new_if_random(self.seed))
        for name in ("frequency_penalty", "presence_penalty"):
            self._check(name, -math.inf, math.inf, "a number such as 0.5; 0 is off")
        for name in ("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"):
            self._check(name, 0, 1, "a share from 0 to 1")
        self._check(
            "temperature",
            0,
            math.inf,
            "0 for the most probable token, or a higher number, such as 0.8",
        )
        self._check("top_k", 0, math.inf, "a number of tokens; 0 is off")
        self._check("seed", 0, LARGEST_SEED, f"a number from 0 to {LARGEST_SEED}")
        self._check("repeat_penalty", 0, math.inf, "a number above 0, such as 1.1; 1 is off")
        if self.repeat_penalty == 0:
            raise SettingsError(
                "repeat_penalty is 0, by which logits would be divided: 1 turns it off"
            )
        self._check("dry_multiplier", 0, math.inf, "a number such as 0.8; 0 is off")
        self._check("dry_base", 1, math.inf, "a number from 1, such as 1.75")
        self._check("dry_allowed_length", 0, math.inf, "a number of tokens, such as 2")
        self._check("dry_penalty_last_n", -1, math.inf, "a number of tokens; -1 is the window")
        breakers = self.dry_sequence_breakers
        if not isinstance(breakers, (list, tuple)) or not all(isinstance(b, str) for b in breakers):
            raise SettingsError(f"dry_sequence_breakers is {breakers!r}: give a list of strings")
        utf8("".join(breakers))
        object.__setattr__(self, "dry_sequence_breakers", tuple(filter(None, breakers)))

    def _check(self, name: str, low: float, high: float, hint: str) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise SettingsError(f"{name} is {value!r}: give {hint}")
