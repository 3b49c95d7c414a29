"""Rows of the table of CPU targets, and their results as records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

VOCABULARY = (64, 2048)
"""Token ids that random prompts draw from, the last excluded: no special ones, all in the built-in
model."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its target."""

    name: str
    value: float
    target: float
    better: Literal["at most", "at least"]
    unit: str = "ratio"

    @property
    def is_met(self) -> bool:
        return self.value <= self.target if self.better == "at most" else self.value >= self.target


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
    expected: str
    """Figure expected before the first run, so that a surprise shows."""
    measure: Callable[[bool], Outcome]
    """Measures the row; its argument is whether to be quick, with too few rounds for evidence."""
