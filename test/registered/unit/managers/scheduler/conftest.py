"""Tests over a whole scheduler run twice: each step settled at once, and one step behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang.test.scheduler_rig import PROMPTS, SchedulerRig


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if hasattr(metafunc.module, "SchedulerRig"):
        metafunc.fixturenames.append("overlap")
        metafunc.parametrize("overlap", [False, True], ids=["settled", "overlap"], indirect=True)


@pytest.fixture
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerRig, "overlap", request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory, which the first rig fills with a tiny model."""
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    """What each of `PROMPTS` gives by itself, in one piece, with nothing cached."""
    rig = SchedulerRig(model, disable_radix_cache=True, chunked_prefill_size=-1)
    return [rig.generate([ids])[0] for ids in PROMPTS]
