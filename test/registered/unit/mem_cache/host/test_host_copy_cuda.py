"""Copies between a CUDA pool and page-locked host memory: bit-exact, ordered, never waiting."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rigs.stores.host_pools import page_slots
from sglang.srt.hardware_backend.device_runtime import (
    CopyStream,
    Event,
    detect_device,
    device_runtime,
)
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.host.host_copy_cuda import CudaPageCopier
from sglang.srt.mem_cache.host.host_memory import allocate_pinned
from sglang.srt.mem_cache.host.staged_copy import StagedBackup
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a CUDA device")

RUNTIME = device_runtime("cuda")
PAIRS = [
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
]
NUM_PAGES = 48
LAYERS = 6


def make_pool(
    page_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 8,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    seed: int = 0,
) -> MHATokenToKVPool:
    """A pool of random bits (NaNs included)."""
    tokens = NUM_PAGES * page_size
    pool = MHATokenToKVPool(
        tokens, page_size, dtype, heads, head_dim, LAYERS, "cuda", v_head_dim=v_head_dim
    )
    torch.manual_seed(seed)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        raw = buffer.view(-1).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, device="cuda"))
    return pool


def bits(pool: MHATokenToKVPool, pages: list[int]) -> torch.Tensor:
    """All bytes of `pages`, on the CPU."""
    slots = page_slots(pages, pool.page_size).to("cuda")
    parts = [
        buffer[slots].contiguous().view(-1).view(torch.uint8)
        for buffer in (*pool.k_buffer, *pool.v_buffer)
    ]
    return torch.cat(parts).cpu()


def backup(
    stream: CopyStream,
    host: MHATokenToKVPoolHost,
    pool: MHATokenToKVPool,
    slots: torch.Tensor,
    pages: list[int],
    io_backend: str,
) -> Event:
    """Issue a backup; the index tensors are gone when this returns."""
    device_slots = page_slots(pages, pool.page_size).to("cuda")
    done = RUNTIME.make_event()

    def work() -> None:
        host.backup_from_device_all_layer(pool, slots, device_slots, io_backend)
        done.record()

    stream.submit(work)
    return done


def load(
    stream: CopyStream,
    host: MHATokenToKVPoolHost,
    pool: MHATokenToKVPool,
    slots: torch.Tensor,
    pages: list[int],
    io_backend: str,
) -> list[Event]:
    """Issue a load; an event a layer. The index tensors are gone when this returns."""
    device_slots = page_slots(pages, pool.page_size).to("cuda")
    events = [RUNTIME.make_event() for _ in range(LAYERS)]

    def work() -> None:
        copy = host.begin_load(pool, slots, device_slots, io_backend)
        for layer, event in enumerate(events):
            copy.issue(layer)
            event.record()

    stream.submit(work)
    return events


@pytest.mark.parametrize(("layout", "io_backend"), PAIRS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "v_head_dim"),
    [
        (torch.bfloat16, 8, 128, None),
        (torch.float8_e4m3fn, 8, 128, None),
        (torch.bfloat16, 1, 192, 128),
        (torch.float8_e5m2, 3, 5, None),
    ],
)
def test_round_trips_are_bit_exact(
    layout: str,
    io_backend: str,
    page_size: int,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    v_head_dim: int | None,
) -> None:
    def pool(seed: int) -> MHATokenToKVPool:
        return make_pool(
            page_size, dtype=dtype, heads=heads, head_dim=head_dim, v_head_dim=v_head_dim, seed=seed
        )

    source, target = pool(0), pool(1)
    host = MHATokenToKVPoolHost(source, 2.0, 0, page_size, layout)
    host.alloc(page_size)
    stream = RUNTIME.make_copy_stream("test")
    untouched = bits(target, [0, 2, 48])
    for pages, into in (([3, 1, 47, 8], [14, 4, 10, 11]), ([5, 6, 7], [20, 21, 22]), ([9], [40])):
        slots = host.alloc(len(pages) * page_size)
        assert slots is not None
        backup(stream, host, source, slots, pages, io_backend)
        load(stream, host, target, slots, into, io_backend)[-1].synchronize()
        assert torch.equal(bits(target, into), bits(source, pages))
    assert torch.equal(bits(target, [0, 2, 48]), untouched)
    stream.close()


@pytest.mark.parametrize("layout", ["page_first_direct", "page_first_kv_split"])
@pytest.mark.parametrize(("page_size", "straight"), [(64, True), (16, False)])
def test_long_pages_whose_slots_the_cpu_knows_go_straight_from_the_pool(
    layout: str, page_size: int, straight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make_pool(page_size), make_pool(page_size, seed=1)
    host = MHATokenToKVPoolHost(source, 2.0, 0, page_size, layout)
    assert host.prefers_cpu_slots(source, "direct") is straight
    staged: list[int] = []
    kernels = StagedBackup.backup

    def count(stage: StagedBackup, to: npt.NDArray[np.int64], of: torch.Tensor) -> None:
        staged.append(len(of))
        kernels(stage, to, of)

    monkeypatch.setattr(StagedBackup, "backup", count)
    pages, into = [3, 1, 47, 8], [14, 4, 10, 11]
    slots = host.alloc(len(pages) * page_size)
    assert slots is not None
    stream, done = RUNTIME.make_copy_stream("test"), RUNTIME.make_event()

    def work() -> None:
        host.backup_from_device_all_layer(source, slots, page_slots(pages, page_size), "direct")
        done.record()

    stream.submit(work, follows_caller=False)
    done.synchronize()
    load(stream, host, target, slots, into, "direct")[-1].synchronize()
    assert torch.equal(bits(target, into), bits(source, pages))
    assert bool(staged) is not straight
    stream.close()


@pytest.mark.parametrize(("layout", "io_backend"), PAIRS)
def test_the_host_holds_what_the_layout_says(layout: str, io_backend: str) -> None:
    """The page's bytes are those that a CPU pool of the same layout would give to L3."""
    source = make_pool(16)
    host = MHATokenToKVPoolHost(source, 2.0, 0, 16, layout)
    stream = RUNTIME.make_copy_stream("test")
    slots = host.alloc(16)
    assert slots is not None
    backup(stream, host, source, slots, [7], io_backend).synchronize()
    on_cpu = MHATokenToKVPool(NUM_PAGES * 16, 16, torch.bfloat16, 8, 128, LAYERS, "cpu")
    for to, of in zip(
        (*on_cpu.k_buffer, *on_cpu.v_buffer), (*source.k_buffer, *source.v_buffer), strict=True
    ):
        to.copy_(of)
    reference = MHATokenToKVPoolHost(on_cpu, 2.0, 0, 16, layout)
    reference.backup_from_device_all_layer(on_cpu, slots, page_slots([7], 16), "direct")
    page, wanted = host.get_data_page(0), reference.get_data_page(0)
    assert torch.equal(page.view(torch.uint8), wanted.view(torch.uint8))
    stream.close()


@pytest.mark.parametrize(("layout", "io_backend"), PAIRS)
def test_copies_follow_what_the_caller_queued(layout: str, io_backend: str) -> None:
    """A backup sees what was computed before it was issued, and a reader sees its layer's load,
    though index tensors die and their memory is taken again while the copies wait."""
    source, target = make_pool(16), make_pool(16, seed=1)
    host = MHATokenToKVPoolHost(source, 2.0, 0, 16, layout)
    stream = RUNTIME.make_copy_stream("test")
    pages = list(range(1, 41))
    slots = host.alloc(len(pages) * 16)
    assert slots is not None
    for turn in range(3):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            busy = busy @ busy
        for buffer in (*source.k_buffer, *source.v_buffer):
            buffer.view(torch.int16).add_(turn + 1)
        backup(stream, host, source, slots, pages, io_backend)
        events = load(stream, host, target, slots, pages[::-1], io_backend)
        # Reuse of a freed index tensor's memory would send a pending copy elsewhere.
        for _ in range(8):
            torch.zeros(len(pages) * 16, dtype=torch.int64, device="cuda")
        device_slots = page_slots(pages[::-1], 16).to("cuda")
        for layer, event in enumerate(events):
            event.wait()
            seen = target.k_buffer[layer][device_slots].view(torch.int16)
            wanted = source.k_buffer[layer][page_slots(pages, 16).to("cuda")].view(torch.int16)
            assert torch.equal(seen, wanted), (turn, layer)
    stream.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_driver_that_takes_no_lists_is_called_for_each_run(layout: str) -> None:
    source, target = make_pool(64), make_pool(64, seed=1)
    host = MHATokenToKVPoolHost(source, 2.0, 0, 64, layout)
    copier = host._copier_of(source)
    assert isinstance(copier, CudaPageCopier)
    copier.engine._batch = None
    stream = RUNTIME.make_copy_stream("test")
    pages, into = [3, 4, 1, 40, 41, 42], [7, 9, 8, 20, 30, 31]
    slots = host.alloc(len(pages) * 64)
    assert slots is not None
    backup(stream, host, source, slots, pages, "direct").synchronize()
    copier = host._copier_of(target)
    assert isinstance(copier, CudaPageCopier)
    copier.engine._batch = None
    load(stream, host, target, slots, into, "direct")[-1].synchronize()
    assert torch.equal(bits(target, into), bits(source, pages))
    stream.close()


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("layout", "io_backend"), PAIRS)
def test_copies_are_issued_without_waiting_for_the_device(
    layout: str, io_backend: str, page_size: int
) -> None:
    source = make_pool(page_size)
    host = MHATokenToKVPoolHost(source, 2.0, 0, page_size, layout)
    stream = RUNTIME.make_copy_stream("test")
    pages = list(range(1, 33))
    slots = host.alloc(len(pages) * page_size)
    assert slots is not None
    backup(stream, host, source, slots, pages, io_backend)
    load(stream, host, source, slots, pages, io_backend)[-1].synchronize()
    device_slots = page_slots(pages, page_size).to("cuda")
    events = [RUNTIME.make_event() for _ in range(LAYERS)]
    busy = torch.randn(8192, 8192, device="cuda") / 90
    float((busy @ busy)[0, 0])
    for _ in range(40):  # most of a second; the copies are ordered behind it
        busy = busy @ busy

    def work() -> None:
        host.backup_from_device_all_layer(source, slots, device_slots, io_backend)
        copy = host.begin_load(source, slots, device_slots, io_backend)
        for layer, event in enumerate(events):
            copy.issue(layer)
            event.record()

    started = time.monotonic()
    stream.submit(work)
    issued = time.monotonic() - started
    assert not events[-1].query()
    assert issued < 0.2
    events[-1].synchronize()
    stream.close()


def test_pinned_memory_is_zeroed_aligned_and_locked() -> None:
    for size in (1, 4096, (2 << 20) + 5, 200 << 20):
        raw = allocate_pinned(size, RUNTIME)
        assert raw.numel() == size
        assert raw.data_ptr() % (2 << 20) == 0
        assert raw.is_pinned()
        assert not raw.any()
        view = raw[size // 2 :]
        del raw
        view.fill_(7)  # a view keeps the mapping
        assert int(view[-1]) == 7


def test_wrong_indices_are_refused_before_anything_is_issued() -> None:
    source = make_pool(16)
    host = MHATokenToKVPoolHost(source, 2.0, 0, 16, "page_first")
    good = page_slots([1], 16)
    with pytest.raises(ValueError, match="leave the pool"):
        host.backup_from_device_all_layer(source, good + 1600, good, "kernel")
    with pytest.raises(ValueError, match="16 host_indices for 32"):
        host.load_to_device_per_layer(source, good, page_slots([1, 2], 16), 0, "kernel")
    with pytest.raises(ValueError, match="kernel or direct"):
        host.backup_from_device_all_layer(source, good, good, "kernel_ascend")
