"""The terminal's view of a cache: amounts of tiers."""

from __future__ import annotations

import pytest

from sglang.hicache_top import _tier
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("unit", "total", "used", "shown"),
    [
        ("bytes", 2e9, 0, ["disk, 2.0 GB", "used 0 B (0%)"]),
        ("bytes", 9999, 9999, ["disk, 9,999 B", "used 9,999 B (100%)"]),
        ("tokens", 4096, 1024, ["disk, 4,096 tokens", "used 1,024 ("]),
        ("bytes", None, 1500000, ["disk, size unknown", "used 1.5 MB ("]),
    ],
)
def test_amounts_have_a_unit(unit: str, total: float | None, used: int, shown: list[str]) -> None:
    free = 0 if total is None else int(total) - used
    parts = {"used": used, "free": free}
    tier = {
        "name": "L3", "where": "disk", "unit": unit, "total": total, "in_flight": 0, "parts": parts,
    }  # fmt: skip
    text = _tier(tier, 40).plain
    assert all(one in text for one in shown), text
