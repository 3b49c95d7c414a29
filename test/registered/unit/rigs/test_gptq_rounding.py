"""GPTQ's rounding loses less of a layer's output than rounding to the nearest value."""

from __future__ import annotations

import numpy as np
import pytest

from rigs.models import gptq_rounding
from rigs.models.gptq_rounding import Floats, compensated
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

INPUTS, OUTPUTS, ROWS = 64, 48, 4096
STEP = 0.5


def nearest(values: Floats, column: int = 0) -> Floats:
    return (np.round(values / STEP) * STEP).astype(np.float32)


@pytest.mark.parametrize("columns", [8, INPUTS])
def test_the_error_of_the_output_is_smaller(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """For inputs that depend on one another, whether one block of columns is rounded or several."""
    monkeypatch.setattr(gptq_rounding, "_COLUMNS", columns)
    rng = np.random.default_rng(1)
    mixed = rng.standard_normal((ROWS, INPUTS // 4)) @ rng.standard_normal((INPUTS // 4, INPUTS))
    x = (mixed + 0.3 * rng.standard_normal((ROWS, INPUTS))).astype(np.float32)
    weight = rng.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
    kept = weight.copy()

    def lost(values: Floats) -> float:
        return float(np.square(x @ (values - weight).T).mean())

    rounded = compensated(weight, (x.T @ x / ROWS).astype(np.float32), nearest)
    assert np.array_equal(rounded, nearest(rounded))
    assert np.array_equal(weight, kept)
    assert lost(rounded) < 0.15 * lost(nearest(weight))
