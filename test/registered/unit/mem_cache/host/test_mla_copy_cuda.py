"""Copies of latent rows and indexer keys between a GPU and the host: bit-exact, as on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rigs.stores.host_pools import device_bytes, fill_with_random_bits, page_slots
from sglang.srt.hardware_backend.device_runtime import detect_device, device_runtime
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.device.fp8_rows import FP8
from sglang.srt.mem_cache.device.mla_pool import MLATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import IndexerSpec, NSAIndexerPool
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.memory_pool_host import MLATokenToKVPoolHost, NSAIndexerPoolHost
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=30, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a CUDA device")

PAIRS = [
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("layer_first", "direct"),
    ("page_first_direct", "direct"),
    ("page_first_kv_split", "direct"),
    ("page_first_kv_split", "kernel"),
]
"""The last two are not offered on CUDA; the copies know them all the same."""
NUM_PAGES = 48
LAYERS = 6

MakePool = Callable[[int, str], PagedDevicePool]
"""Tokens of a page, device."""


def latent(rank: int, rope: int, dtype: torch.dtype = torch.bfloat16) -> MakePool:
    return lambda page, device: MLATokenToKVPool(
        NUM_PAGES * page, page, dtype, rank, rope, LAYERS, device
    )


def indexer(dim: int, dtype: torch.dtype = torch.bfloat16) -> MakePool:
    spec = IndexerSpec.of(range(LAYERS), dim, dtype)
    return lambda page, device: NSAIndexerPool(spec, NUM_PAGES * page, page, device)


MAKERS = pytest.mark.parametrize(
    "make",
    [
        latent(512, 64),
        latent(512, 64, torch.float32),
        latent(512, 64, FP8),
        latent(9, 2),
        indexer(128),
        indexer(128, FP8),
        indexer(3),
    ],
    ids=[
        "latent",
        "latent-fp32",
        "latent-fp8",
        "latent-odd",
        "indexer",
        "indexer-fp8",
        "indexer-odd",
    ],
)


def host_of(pool: PagedDevicePool, layout: str) -> HostKVCache:
    kind = NSAIndexerPoolHost if isinstance(pool, NSAIndexerPool) else MLATokenToKVPoolHost
    return kind.make(pool, page_num=2 * NUM_PAGES, layout=layout)


@MAKERS
@pytest.mark.parametrize(("layout", "io_backend"), PAIRS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("slots_on", ["cuda", "cpu"])
def test_round_trips_are_bit_exact(
    layout: str, io_backend: str, page_size: int, make: MakePool, slots_on: str
) -> None:
    source, target = make(page_size, "cuda"), make(page_size, "cuda")
    fill_with_random_bits(source, 0)
    fill_with_random_bits(target, 1)
    host = host_of(source, layout)
    host.alloc(page_size)
    stream = device_runtime("cuda").make_copy_stream("test")
    done = device_runtime("cuda").make_event()
    elsewhere = page_slots([0, 2, 48], page_size)
    untouched = device_bytes(target, elsewhere)
    for pages, into in (([3, 1, 47, 8], [14, 4, 10, 11]), ([5, 6, 7], [20, 21, 22]), ([9], [40])):
        slots = host.alloc(len(pages) * page_size)
        assert slots is not None
        of, to = (page_slots(some, page_size).to(slots_on) for some in (pages, into))

        def work(slots: torch.Tensor = slots, of: torch.Tensor = of, to: torch.Tensor = to) -> None:
            host.backup_from_device_all_layer(source, slots, of, io_backend)
            load = host.begin_load(target, slots, to, io_backend)
            for layer in range(LAYERS):
                load.issue(layer)
            done.record()

        stream.submit(work)
        done.synchronize()
        wanted = device_bytes(source, page_slots(pages, page_size))
        assert device_bytes(target, page_slots(into, page_size)) == wanted
    assert device_bytes(target, elsewhere) == untouched
    stream.close()


def page_on_host(make: MakePool, device: str, layout: str, io_backend: str) -> torch.Tensor:
    """Page 7 of a pool of known bits, as its host pool gives it to L3."""
    pool = make(16, device)
    fill_with_random_bits(pool, 0)
    host = host_of(pool, layout)
    slots = host.alloc(16)
    assert slots is not None
    runtime = device_runtime(device)
    stream, done = runtime.make_copy_stream("test"), runtime.make_event()

    def work() -> None:
        of = page_slots([7], 16).to(pool.device)
        host.backup_from_device_all_layer(pool, slots, of, io_backend)
        done.record()

    stream.submit(work)
    done.synchronize()
    stream.close()
    return host.get_data_page(0).view(torch.uint8)


@MAKERS
@pytest.mark.parametrize(("layout", "io_backend"), PAIRS)
def test_the_host_holds_what_the_layout_says(layout: str, io_backend: str, make: MakePool) -> None:
    on_gpu = page_on_host(make, "cuda", layout, io_backend)
    assert torch.equal(on_gpu, page_on_host(make, "cpu", layout, "direct"))
