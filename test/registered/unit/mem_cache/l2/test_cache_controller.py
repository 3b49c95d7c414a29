"""Time at which copies to the host begin, and the loads that a forward waits for."""

from __future__ import annotations

import time
from weakref import WeakSet

import pytest
import torch

from rigs.caches.cache_rig import RIG_DEVICE, CacheRig, HiCacheSettings
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.host.pool_kinds import MHATokenToKVPoolHost
from sglang.srt.mem_cache.l2 import cache_controller
from sglang.srt.mem_cache.l2.cache_controller import HiCacheController
from sglang.srt.mem_cache.l2.layer_done_counter import LayerDoneCounter
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


class SlowSlots:
    """Device slots on their way to the CPU, until the test says that they are there."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.is_done = False

    def wait(self) -> list[torch.Tensor]:
        self.is_done = True
        return self._tensors


@pytest.fixture(name="controller")
def make_controller(monkeypatch: pytest.MonkeyPatch) -> HiCacheController:
    """Controller of a pool that wants device slots on the CPU; one write of a page is queued."""
    monkeypatch.setattr(MHATokenToKVPoolHost, "prefers_cpu_slots", lambda *_: True)
    runtime = type(device_runtime(RIG_DEVICE))
    monkeypatch.setattr(runtime, "copy_to_host", lambda _, tensors: SlowSlots(tensors))
    rig = CacheRig(settings=HiCacheSettings())
    controller = rig.hi.cache_controller
    slots = rig.allocator.alloc(rig.page_size)
    assert slots is not None
    assert controller.write(slots) is not None
    return controller


def arrived(controller: HiCacheController) -> None:
    slots = controller._locating[0].device
    assert isinstance(slots, SlowSlots)
    slots.is_done = True


def test_a_write_begins_when_the_cpu_knows_its_slots(controller: HiCacheController) -> None:
    controller.start_writing()
    controller.start_writing()
    assert not controller.ack_write_queue
    arrived(controller)
    controller.start_writing()
    assert [ack.operation_ids for ack in controller.ack_write_queue] == [[1]]


def test_a_call_that_another_follows_leaves_it_to_that_one(controller: HiCacheController) -> None:
    controller.start_writing(soon=True)
    arrived(controller)
    controller.start_writing(soon=True)
    assert not controller.ack_write_queue
    controller.start_writing(soon=True)
    assert controller.ack_write_queue, "no other came"


def test_a_long_write_goes_in_pieces_and_is_acknowledged_at_its_end(
    controller: HiCacheController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_controller, "_PAGES_AT_ONCE", 2)
    assert controller.write(torch.arange(8, 24)) is not None
    controller.start_writing()
    arrived(controller)
    begun = []
    started = time.monotonic()
    controller.start_writing()
    after_first = time.monotonic()
    while controller._locating:
        assert not controller.ack_write_queue
        begun.append(controller._locating[0].begun)
        controller.start_writing()
    assert begun == [8, 16]
    (ack,) = controller.ack_write_queue
    assert ack.operation_ids == [1, 2]
    assert started <= ack.started <= after_first, "its time counts from the first piece on"


def test_what_others_wait_behind_is_issued_whole(
    controller: HiCacheController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_controller, "_PAGES_AT_ONCE", 1)
    assert controller.write(torch.arange(8, 24)) is not None
    controller.start_writing()
    assert controller.write(torch.arange(24, 32)) is not None
    controller.start_writing()
    arrived(controller)
    controller.start_writing()
    assert [ack.operation_ids for ack in controller.ack_write_queue] == [[1, 2]]


def test_an_urgent_write_waits_for_its_slots_and_those_before_it(
    controller: HiCacheController,
) -> None:
    controller.start_writing()
    assert controller.write(torch.arange(8, 12)) is not None
    controller.start_writing(is_urgent=True)
    assert [ack.operation_ids for ack in controller.ack_write_queue] == [[1], [2]]


def test_writes_begin_in_their_order(controller: HiCacheController) -> None:
    controller.start_writing()
    assert controller.write(torch.arange(8, 12)) is not None
    controller.start_writing()
    second = controller._locating[1].device
    assert isinstance(second, SlowSlots)
    second.is_done = True
    controller.start_writing()
    assert not controller.ack_write_queue
    with pytest.raises(AssertionError):
        controller.reset()


def test_loads_that_no_forward_waited_for_leave_no_events() -> None:
    """Requests that are not admitted after all load pages too."""

    class Passed:
        was_awaited = False

        def wait(self) -> None:
            self.was_awaited = True

    made: WeakSet[Passed] = WeakSet()

    def make() -> Passed:
        made.add(event := Passed())
        return event

    counter = LayerDoneCounter(RIG_DEVICE)
    counter._make_event = make  # type: ignore[assignment]
    for _ in range(50):
        index, (first, second) = counter.update_producer([0, 1])
    assert len(made) == 2, "those of the last load"
    counter.set_consumer(index - 1)
    counter.wait_until(0)
    assert isinstance(first, Passed) and isinstance(second, Passed)
    assert (first.was_awaited, second.was_awaited) == (True, False), "it covers those before"
    del first, second
    counter.set_consumer(-1)
    assert not made
    counter.set_consumer(index)
    counter.wait_until(1)  # The forward before has waited for it.
