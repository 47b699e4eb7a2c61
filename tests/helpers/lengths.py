"""Engines whose verify lengths are not fixed, and a policy that chooses them at random."""

import random
from dataclasses import replace
from typing import Any

from specdec.plan import LengthChoice
from tests.helpers.engines import Models


def with_lengths(models: Models, rule: str, **changes: Any) -> Models:
    changes = {'verify_length': rule, 'confidence_threshold': 0.3 if rule == 'threshold' else None, **changes}
    return replace(models, sources=replace(models.sources, **changes))


class Jumping:
    """Any budget from none to all, drafting or not, at random; keeps what it chose and what it was told."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.choices: list[LengthChoice] = []
        self.observed: list[tuple[int, int]] = []

    def choose(self, decodes, *_):
        available = sum(c.available for c in decodes)
        budget = self.dice.choice([0, available, self.dice.randint(0, available + 2)])
        self.choices.append(LengthChoice(min(budget, available), self.dice.random() < 0.7))
        return self.choices[-1]

    def observe(self, survival, verified, accepted):
        assert 0 <= accepted <= verified <= len(survival)
        self.observed.append((verified, accepted))

    def report(self, survival):
        assert list(survival) == sorted(survival, reverse=True)
