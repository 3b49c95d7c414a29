"""Counts of what writes and loads of states cost the scheduler's thread on CUDA.

An operation of torch costs that thread some 5 us, a kernel 20, an upload or a download 30.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from rigs.call_counts import CallCounts
from rigs.issued_copies import IssuedWork, on_device, use_counted_cuda
from rigs.stores.host_pools import (
    device_bytes,
    fill_with_random_bits,
    page_slots,
)
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.device.page_digests import EvenShare
from sglang.srt.mem_cache.device.pool_registry import ModelPools
from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec
from sglang.srt.mem_cache.device.state_spec import KVSpec, PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
    build_kv_host_stack,
)
from sglang.srt.mem_cache.l2.cache_controller import HiCacheController
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

PAGE = 16
PAGES = page_slots(list(range(1, 33)), PAGE)
"""Slots of the 32 pages of a prompt."""
NO_PAGES = PAGES[:0]
SHAPES = {
    # Six layers with 32 KB of keys a page; 23 with states.
    "Nemotron-3-Nano": (52, (5, 12, 19, 26, 33, 42), tuple(range(0, 46, 2)), 2),
    # Twelve layers with 64 KB of keys a page; 36 with states.
    "Qwen3-Next": (48, tuple(range(3, 48, 4)), tuple(n for n in range(48) if n % 4 != 3), 4),
}
"""Layers of the model, those with keys and values, those with states; KV heads."""


class Tiers:
    """Pools with the layers of a model and tiny widths, and the controller of their copies."""

    def __init__(self, model: str) -> None:
        num_layers, attention, recurrent, heads = SHAPES[model]
        self.kv = MHATokenToKVPool.from_spec(
            KVSpec.of_heads(attention, heads, 16, torch.bfloat16), 100 * PAGE, PAGE, "cpu"
        )
        spec = MambaSpec.of_shapes(
            recurrent, (4, 32, 16), (32, 8), ssm_dtype=torch.float32, conv_dtype=torch.bfloat16
        )
        self.states = MambaPool(spec, 8, "cpu")
        io_backend, self.group = build_kv_host_stack(
            ModelPools.of([self.kv, self.states], num_layers),
            ratio=2.0,
            size_gb=0,
            io_backend="direct",
            layout="page_first_direct",
            has_storage=True,
        )
        allocator = PagedTokenToKVPoolAllocator(self.kv.size, PAGE, self.kv.dtype, "cpu", self.kv)
        self.controller = HiCacheController(allocator, self.group, PAGE, io_backend=io_backend)
        self.fill(0)

    def fill(self, seed: int) -> None:
        for pool in (self.kv, self.states):
            fill_with_random_bits(pool, seed)

    def bytes(self) -> list[bytes]:
        return [device_bytes(self.kv, PAGES), device_bytes(self.states, torch.tensor([3]))]

    def queue_write(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue a write of pages and a state; returns its host slots."""
        state = PoolTransfer(PoolName.MAMBA, device_indices=torch.tensor([3]))
        operation = self.controller.write(on_device(slots), [state])
        assert operation is not None and state.host_indices is not None
        return operation.host_indices, state.host_indices

    def queue_load(self, host: tuple[torch.Tensor, torch.Tensor]) -> None:
        state = PoolTransfer(PoolName.MAMBA, host[1], torch.tensor([3]))
        self.controller.load(host[0], on_device(PAGES), [state])

    def settle_writes(self) -> None:
        while self.controller.ack_write_queue:
            self.controller.keep_checksums(self.controller.ack_write_queue.popleft())


@pytest.fixture(name="work")
def count_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[IssuedWork]:
    yield use_counted_cuda(monkeypatch)
    monkeypatch.undo()
    device_runtime.cache_clear()


def test_several_tensors_are_staged_by_one_upload(work: IssuedWork) -> None:
    first, last = torch.arange(3), torch.arange(5, 7)
    there = on_device(torch.tensor([9]))
    staged = device_runtime("cpu").stage_all([first, there, last])
    assert [one.tolist() for one in staged] == [[0, 1, 2], [9], [5, 6]]
    assert staged[1] is there
    assert not any(one.is_cpu for one in staged)
    assert work.counts["upload"] == 1


@pytest.mark.parametrize("count", [0, 1, 2])
def test_tensors_on_the_device_are_staged_by_no_upload(work: IssuedWork, count: int) -> None:
    there = [on_device(torch.tensor([n])) for n in range(count)]
    staged = device_runtime("cpu").stage_all(there)
    assert len(staged) == count
    assert all(one is other for one, other in zip(staged, there, strict=True))
    assert work.counts["upload"] == 0


@pytest.mark.parametrize(
    ("model", "expected", "calls"),
    [
        (
            "Nemotron-3-Nano",
            {
                "torch": 8, "kernel": 5, "upload": 1, "download": 1, "pin": 2, "engine": 3,
                "record": 3, "wait": 1, "stream": 2,
            },
            430,
        ),
        (
            "Qwen3-Next",
            {
                "torch": 8, "kernel": 4, "upload": 1, "download": 1, "pin": 2, "engine": 26,
                "record": 2, "wait": 0, "stream": 2,
            },
            400,
        ),
    ],
)  # fmt: skip
def test_a_write_of_pages_and_a_state(
    work: IssuedWork, model: str, expected: dict[str, int], calls: int
) -> None:
    tiers = Tiers(model)
    for _ in range(3):
        tiers.queue_write(PAGES)
        work.counts.clear()
        with work:
            tiers.controller.start_writing()
    assert len(tiers.controller.ack_write_queue) == 3
    assert {kind: work.counts[kind] for kind in expected} == expected
    tiers.queue_write(PAGES)
    with CallCounts() as counted:
        tiers.controller.start_writing()
    assert counted.total <= calls


@pytest.mark.parametrize(
    ("model", "expected", "calls"),
    [
        (
            "Nemotron-3-Nano",
            {
                "torch": 2, "kernel": 1, "upload": 0, "pin": 0, "engine": 3, "record": 4,
                "wait": 2, "stream": 2,
            },
            340,
        ),
        (
            "Qwen3-Next",
            {
                "torch": 2, "kernel": 2, "upload": 0, "pin": 0, "engine": 8, "record": 7,
                "wait": 3, "stream": 2,
            },
            475,
        ),
    ],
)  # fmt: skip
def test_a_load_of_pages_and_a_state(
    work: IssuedWork, model: str, expected: dict[str, int], calls: int
) -> None:
    tiers = Tiers(model)
    host = tiers.queue_write(PAGES)
    tiers.controller.start_writing()
    for _ in range(3):
        tiers.queue_load(host)
        work.counts.clear()
        with work:
            tiers.controller.start_loading()
    assert {kind: work.counts[kind] for kind in expected} == expected
    tiers.queue_load(host)
    with CallCounts() as counted:
        tiers.controller.start_loading()
    assert counted.total <= calls


def test_the_slots_of_a_state_are_staged_for_a_load_that_is_hashed(work: IssuedWork) -> None:
    tiers = Tiers("Nemotron-3-Nano")
    host = tiers.queue_write(PAGES)
    tiers.controller.start_writing()
    for share, uploads, kernels in ((0.0, 0, 1), (1.0, 1, 5)):
        tiers.group._checked_loads = EvenShare(share)
        tiers.queue_load(host)
        work.counts.clear()
        tiers.controller.start_loading()
        assert (work.counts["upload"], work.counts["kernel"]) == (uploads, kernels)


def test_a_state_alone_is_not_written_before_the_step_that_fills_it(work: IssuedWork) -> None:
    tiers = Tiers("Nemotron-3-Nano")
    tiers.queue_write(NO_PAGES)
    work.is_reached = False
    tiers.controller.start_writing()
    assert not tiers.controller.ack_write_queue
    work.is_reached = True
    tiers.controller.start_writing()
    assert len(tiers.controller.ack_write_queue) == 1


@pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("model", SHAPES)
def test_all_bytes_come_back_and_have_the_checksums_of_the_write(
    work: IssuedWork, model: str
) -> None:
    tiers = Tiers(model)
    tiers.group._checked_loads = EvenShare(1.0)
    host = tiers.queue_write(PAGES)
    tiers.controller.start_writing()
    tiers.settle_writes()
    before = tiers.bytes()
    tiers.fill(1)
    tiers.queue_load(host)
    tiers.controller.start_loading()
    assert tiers.bytes() == before
    for name, slots in zip((PoolName.KV, PoolName.MAMBA), host, strict=True):
        pool = tiers.group.get_pool(name)
        (found,) = (one for one in tiers.controller.ack_load_queue[0].digests if one.pool == name)
        rows = found.rows()
        assert rows is not None and len(rows) == len(slots) // pool.page_size
        assert pool.checksums.of(found.pages) == [row.tobytes() for row in rows]
        assert pool.checksums.have(found.pages).all()
