"""Tests over a whole scheduler run twice: each step settled at once, and one step behind.
In CI each case of a test runs in one of these modes, and in the second if it is the only case."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from rigs.mixed.poisoned_pools import fill_with_nan
from rigs.schedulers.scheduler_rig import PROMPTS, SchedulerRig
from sglang.srt.environ import envs
from sglang.srt.mem_cache.device.state_pool import StatePool
from sglang.srt.mem_cache.l3 import prefetch_cost, store_calls


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not hasattr(metafunc.module, "SchedulerRig"):
        return
    modes: list[Any] = [pytest.param(False, id="settled")]
    if next(metafunc.definition.iter_markers("settled"), None) is None:
        modes = [
            pytest.param(False, id="settled", marks=pytest.mark.half(needs="another parameter")),
            pytest.param(True, id="overlap", marks=pytest.mark.half),
        ]
    metafunc.parametrize("overlap", modes, indirect=True)


@pytest.fixture(autouse=True)
def overlap(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests do not name it: were it not automatic, it would not run. It has a patch of its own,
    since what a test patches ends before the fixtures that the test names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SchedulerRig, "overlap", getattr(request, "param", False))
        yield


@pytest.fixture(autouse=True)
def no_call_looks_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds does not make L3 unavailable."""
    monkeypatch.setattr(store_calls, "_STUCK_AFTER_S", 60.0)


@pytest.fixture(autouse=True)
def new_states_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent states of slots that are handed out are undefined. Not on a GPU, which may still
    use them."""
    take = StatePool.take

    def taking(pool: StatePool, n: int) -> list[int] | None:
        taken = take(pool, n)
        if taken and pool.device.type == "cpu":
            with _disable_current_modes():
                for one in (pool, *pool._sharers):
                    fill_with_nan(one, torch.tensor(taken), 1)
        return taken

    monkeypatch.setattr(StatePool, "take", taking)


@pytest.fixture
def reads_are_never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages in L3 are read, however soon a tiny model would have computed them."""
    monkeypatch.setattr(prefetch_cost, "_CANCEL_SLACK_S", 60.0)


@pytest.fixture(autouse=True)
def storage_dir(tmp_path: Path) -> Iterator[Path]:
    """The directory of L3's files, which is there once a rig has L3."""
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path / "l3")):
        yield tmp_path / "l3"


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    """Output of each of `PROMPTS` by itself, in one piece, with nothing cached."""
    rig = SchedulerRig(model, disable_radix_cache=True, chunked_prefill_size=-1)
    return [rig.generate([ids])[0] for ids in PROMPTS]
