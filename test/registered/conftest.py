"""Properties are tested without clocks, which run unevenly on a busy machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "without clocks", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("without clocks")
