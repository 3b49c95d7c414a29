"""Properties are tested without clocks, which run unevenly on a busy machine. A metric that cannot
count a value fails the test, in processes that it starts too."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from sglang.srt.environ import envs

settings.register_profile(
    "without clocks", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("without clocks")

envs.SGLANG_TEST_RAISE_METRIC_ERRORS.set(True)
