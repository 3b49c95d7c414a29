"""Rows of the table of CPU targets, and their results as records."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

VOCABULARY = (64, 2048)
"""Token ids that random prompts draw from: no special ones, all in the built-in model."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its target."""

    name: str
    value: float
    target: float
    better: Literal["at most", "at least"]

    @property
    def is_met(self) -> bool:
        return self.value <= self.target if self.better == "at most" else self.value >= self.target

    def as_record(self) -> dict[str, Any]:
        return {
            "figure": self.name,
            "value": round(self.value, 4),
            "target": f"{self.better} {self.target:g}",
            "met": self.is_met,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a row."""

    figures: list[Figure]
    details: dict[str, Any] = field(default_factory=dict)
    """Medians and raw numbers behind the figures."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, announced before it is made."""

    name: str
    what: str
    target: str
    expected: str
    """Figure expected before the first run, so that a surprise shows."""
    measure: Callable[[bool], Outcome]
    """Measures the row; its argument is whether to be quick, with too few rounds for evidence."""


def random_prompts(seed: int, count: int, tokens: int) -> list[list[int]]:
    """`count` prompts that share no prefix to speak of."""
    drawn = np.random.default_rng(seed).integers(*VOCABULARY, size=(count, tokens))
    prompts: list[list[int]] = drawn.tolist()
    return prompts


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the rounds' ratios, so that a slowdown of a whole round cancels."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def rounded(values: Sequence[float], digits: int = 4) -> list[float]:
    """For raw numbers in a record."""
    return [round(value, digits) for value in values]
