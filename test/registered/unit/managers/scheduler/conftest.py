"""Tests over a whole scheduler run twice: every step taken in at once, and one step behind."""

from __future__ import annotations

import pytest

from sglang.test.scheduler_rig import SchedulerRig


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if hasattr(metafunc.module, "SchedulerRig"):
        metafunc.fixturenames.append("overlap")
        metafunc.parametrize("overlap", [False, True], ids=["settled", "overlap"], indirect=True)


@pytest.fixture
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerRig, "overlap", request.param)
