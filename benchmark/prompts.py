"""Random prompts, which share no prefix to speak of."""

from __future__ import annotations

import numpy as np


def random_prompt(seed: int, length: int, low: int, high: int) -> list[int]:
    """`length` token ids of at least `low` and below `high`; equal for equal arguments."""
    ids: list[int] = np.random.default_rng(seed).integers(low, high, length).tolist()
    return ids


def random_prompts(seed: int, count: int, length: int, low: int, high: int) -> list[list[int]]:
    """`count` prompts of one seed."""
    drawn = np.random.default_rng(seed).integers(low, high, size=(count, length))
    prompts: list[list[int]] = drawn.tolist()
    return prompts
