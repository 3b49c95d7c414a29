"""Changes of L3 while a scheduler serves: whatever a backend does, requests are answered."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.constants import LONGEST_STORAGE_CHANGE_S
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.messages.io_struct import (
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    ControlReqOutput,
    DetachHiCacheStorageReqInput,
    FlushCacheReqInput,
    GetHiCacheStorageReqInput,
    SettleHiCacheStorageReqInput,
    ShutdownReq,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

PAGE = 16


class Slow(HiCacheFile):
    """A backend that is made, and cleared, when a test says so."""

    gate: ClassVar[threading.Event]
    closed: ClassVar[list[HiCacheFile]]

    def __init__(self, storage_config: HiCacheStorageConfig) -> None:
        assert self.gate.wait(30)
        super().__init__(storage_config, envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get())

    def clear(self) -> None:
        assert self.gate.wait(30)
        super().clear()

    def close(self) -> None:
        self.closed.append(self)


CONFIG = {
    "prefetch_threshold": PAGE,
    "backend_name": "slow",
    "module_path": __name__,
    "class_name": "Slow",
}
ATTACH = AttachHiCacheStorageReqInput(
    req_id="attach",
    hicache_storage_backend="dynamic",
    hicache_storage_backend_extra_config_json=json.dumps(CONFIG),
    hicache_storage_prefetch_policy="wait_complete",
)
CLEAR = ClearHiCacheReqInput(req_id="clear")
DETACH = DetachHiCacheStorageReqInput(req_id="detach")
GET = GetHiCacheStorageReqInput(req_id="get")


@pytest.fixture
def rig(model: Path, tmp_path: Path) -> Iterator[SchedulerRig]:
    """Two tiers and no L3 yet."""
    Slow.gate, Slow.closed = threading.Event(), []
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)):
        made = SchedulerRig(model, enable_hierarchical_cache=True, page_size=PAGE)
        yield made
        Slow.gate.set()
        made.close()


def step_until(rig: SchedulerRig, condition: Callable[[], object]) -> None:
    """Step, without letting the scheduler's time pass."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, rig.tree.is_busy()
        rig.now -= 1.0
        rig.step()
        time.sleep(0.001)


def ended(rig: SchedulerRig, rid: str) -> bool:
    return rid in rig.results and rig.results[rid].finish_reason is not None


def answer(rig: SchedulerRig, req_id: str) -> ControlReqOutput:
    """The answer to `req_id`, when it is there."""
    step_until(rig, lambda: any(one.req_id == req_id for one in rig.answers))
    (found,) = [one for one in rig.answers if one.req_id == req_id]
    rig.answers.remove(found)
    return found


def attached(rig: SchedulerRig) -> str | None:
    rig.step(GET)
    backend: str | None = answer(rig, "get").data["hicache_storage_backend"]
    return backend


def test_requests_run_while_a_backend_connects_and_until_it_is_given_up(
    rig: SchedulerRig, model: Path
) -> None:
    ids = prompt(1, 100)
    cold = SchedulerRig(model, disable_radix_cache=True).generate([ids])[0]
    began = rig.now
    rig.step(ATTACH)
    for rid in ("first", "again"):
        rig.step(rig.request(rid, ids))
        step_until(rig, partial(ended, rig, rid))
        assert rig.results[rid].output_ids == cold
    # One change at a time, no wait for idleness is in vain, and looking is free.
    rig.step(ATTACH, CLEAR, DETACH, FlushCacheReqInput(req_id="flush"))
    for req_id in ("attach", "clear", "detach", "flush"):
        refused = answer(rig, req_id)
        assert not refused.success
        assert "administration 1" in refused.message
    assert attached(rig) is None
    assert rig.scheduler.poll_timeout_ms() < 1000
    while rig.now + 1 < began + LONGEST_STORAGE_CHANGE_S:
        rig.step()
        assert not rig.answers
    rig.step()
    rig.step()
    given_up = answer(rig, "attach")
    assert not given_up.success
    assert "given up: it has taken 100 s" in given_up.message
    step_until(rig, rig.scheduler.is_idle)
    # The store comes up after all, and the scheduler closes it.
    Slow.gate.set()
    step_until(rig, lambda: Slow.closed)
    assert attached(rig) is None
    rig.step(ATTACH)
    assert answer(rig, "attach").message == "attached dynamic"


def test_a_backend_is_taken_up_in_the_middle_of_requests(rig: SchedulerRig, model: Path) -> None:
    ids, other = prompt(1, 100), prompt(2, 60)
    reference = SchedulerRig(model, disable_radix_cache=True)
    (cold,), (cold_other,) = reference.generate([ids], 60), reference.generate([other])
    rig.step(ATTACH)
    rig.step(rig.request("runs", ids, greedy(60)), rig.request("too", other))
    Slow.gate.set()
    step_until(rig, lambda: rig.answers)
    assert answer(rig, "attach").data["hicache_storage_prefetch_policy"] == "wait_complete"
    assert not ended(rig, "runs")
    step_until(rig, rig.scheduler.is_idle)
    assert rig.results["runs"].output_ids == cold
    assert rig.results["too"].output_ids == cold_other
    rig.assert_clean()
    # Pages that were computed before the attach go to L3 at their next use.
    rig.run(rig.request("again", ids))
    rig.step(FlushCacheReqInput(req_id="flush"))
    assert answer(rig, "flush").success
    rig.run(rig.request("stored", ids))
    last = rig.results["stored"].last
    assert last is not None
    assert last.cached_tokens_details.storage == 96


PREPARE = msgspec.structs.replace(ATTACH, only_prepares=True)
KEEP = SettleHiCacheStorageReqInput(req_id="settle", keeps=True)
UNDO = SettleHiCacheStorageReqInput(req_id="settle", keeps=False)


def test_a_prepared_attachment_waits_for_the_other_groups(rig: SchedulerRig) -> None:
    Slow.gate.set()
    rig.step(PREPARE)
    assert answer(rig, "attach").message == "the attaching of L3 is prepared"
    assert attached(rig) is None
    rig.step(rig.request("runs", prompt(1, 40)))
    step_until(rig, partial(ended, rig, "runs"))
    rig.step(DETACH)
    assert "administration 1" in answer(rig, "detach").message
    rig.step(KEEP)
    settled = answer(rig, "settle")
    assert settled.message == "attached dynamic"
    assert settled.data["hicache_storage_prefetch_policy"] == "wait_complete"
    assert rig.scheduler.is_idle()


@pytest.mark.parametrize("is_connected", [True, False])
def test_an_attachment_is_undone_for_another_group(rig: SchedulerRig, is_connected: bool) -> None:
    before = rig.tree.storage_state()
    rig.step(PREPARE)
    if is_connected:
        Slow.gate.set()
        assert answer(rig, "attach").success
    rig.step(UNDO)
    assert "not possible in all DP groups" in answer(rig, "settle").message
    if not is_connected:
        assert "not possible in all DP groups" in answer(rig, "attach").message
    assert rig.scheduler.is_idle()
    Slow.gate.set()
    step_until(rig, lambda: Slow.closed)
    assert rig.tree.storage_state() == before
    rig.step(KEEP)
    assert not answer(rig, "settle").success
    rig.step(ATTACH)
    assert answer(rig, "attach").success


def test_a_clear_that_hangs_stops_no_request_and_is_answered(rig: SchedulerRig) -> None:
    Slow.gate.set()
    rig.step(ATTACH)
    assert answer(rig, "attach").success
    Slow.gate = threading.Event()
    rig.step(CLEAR)
    rig.step(rig.request("runs", prompt(1, 40)))
    step_until(rig, partial(ended, rig, "runs"))
    for _ in range(int(LONGEST_STORAGE_CHANGE_S)):
        rig.step()
    cleared = answer(rig, "clear")
    assert not cleared.success
    assert "given up" in cleared.message
    step_until(rig, rig.scheduler.is_idle)
    rig.step(DETACH)
    assert "left behind" in answer(rig, "detach").message
    assert attached(rig) is None


def test_a_shutdown_does_not_wait_for_a_backend(rig: SchedulerRig) -> None:
    rig.step(ATTACH)
    rig.step(ShutdownReq(timeout=1000.0))
    rig.step()
    assert answer(rig, "attach").message.endswith("the server is shutting down")
    rig.step()
    assert rig.scheduler.is_stopped


def test_without_the_lower_tiers_there_is_nothing_to_administer(model: Path) -> None:
    rig = SchedulerRig(model)
    assert not isinstance(rig.tree, HiRadixCache)
    rig.step(ATTACH, UNDO, CLEAR, DETACH, GET)
    assert [one.success for one in rig.answers] == [False] * 5
    assert all("--enable-hierarchical-cache" in one.message for one in rig.answers)
