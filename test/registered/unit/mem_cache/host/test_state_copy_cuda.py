"""Copies of recurrent states between a GPU and the host: bit-exact, as on a CPU."""

from __future__ import annotations

import pytest
import torch

from rigs.caches.mamba_pools import STATE_DTYPES, mamba_spec
from rigs.stores.host_pools import device_bytes, fill_with_random_bits
from sglang.srt.hardware_backend.device_runtime import detect_device, device_runtime
from sglang.srt.mem_cache.device.state_pool import MambaPool
from sglang.srt.mem_cache.memory_pool_host import MambaPoolHost
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a CUDA device")

NUM_STATES = 12


@pytest.mark.parametrize("dtypes", STATE_DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(2, 3), (8, 112)], ids=["odd", "long"])
@pytest.mark.parametrize(
    ("layout", "io_backend"),
    [
        ("layer_first", "kernel"),
        ("page_first", "kernel"),
        ("layer_first", "direct"),
        ("page_first_direct", "direct"),
    ],
)
@pytest.mark.parametrize("slots_on", ["cuda", "cpu"])
def test_round_trips_are_bit_exact(
    layout: str,
    io_backend: str,
    heads: int,
    dim: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    slots_on: str,
) -> None:
    spec = mamba_spec(dtypes, heads=heads, dim=dim)
    source, target = (MambaPool(spec, NUM_STATES, "cuda") for _ in range(2))
    fill_with_random_bits(source, 0)
    fill_with_random_bits(target, 1)
    host = MambaPoolHost.make(source, page_num=NUM_STATES, layout=layout)
    host.alloc(1)
    slots = host.alloc(3)
    assert slots is not None
    of, to = torch.tensor([5, 2, 9]), torch.tensor([4, 10, 11])
    others = torch.tensor([slot for slot in range(NUM_STATES + 1) if slot not in to])
    untouched = device_bytes(target, others)
    stream = device_runtime("cuda").make_copy_stream("test")
    done = device_runtime("cuda").make_event()
    on_device = of.to(slots_on), to.to(slots_on)

    def work() -> None:
        host.backup_from_device_all_layer(source, slots, on_device[0], io_backend)
        load = host.begin_load(target, slots, on_device[1], io_backend)
        for layer in range(source.layer_num):
            load.issue(layer)
        done.record()

    stream.submit(work)
    done.synchronize()
    stream.close()
    assert device_bytes(target, to) == device_bytes(source, of)
    assert device_bytes(target, others) == untouched
    page = torch.zeros(1, host.page_bytes, dtype=torch.uint8)
    host.gather_pages(slots[:1], page)
    on_host = page.numpy().tobytes()
    assert on_host == device_bytes(source, of[:1]), "temporal of all layers, then conv"
