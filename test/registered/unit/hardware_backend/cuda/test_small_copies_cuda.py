"""Small copies by a kernel: right bytes, in order, and not behind a long copy."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.hardware_backend.device_runtime import detect_device, device_runtime, on_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")

RUNTIME = device_runtime("cuda")
SHAPES = [(1,), (3, 5), (1023,), (4097,), (70000,), (0,), ()]
DTYPES = [torch.int64, torch.float32, torch.float64, torch.int32, torch.bfloat16, torch.bool]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1000, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_arrives_is_what_was_sent(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    sent = values(shape, dtype)
    there = RUNTIME.stage_to_device(sent)
    assert there.is_cuda
    assert torch.equal(there.cpu(), sent)
    (back,) = RUNTIME.copy_to_host([there]).wait()
    assert back is not None
    assert not back.is_cuda
    assert torch.equal(back, sent)


def test_views_are_copied_as_they_look() -> None:
    wide = values((8, 6), torch.int64)
    assert torch.equal(RUNTIME.stage_to_device(wide[:, 1:4]).cpu(), wide[:, 1:4])
    (back,) = RUNTIME.copy_to_host([wide.cuda().t()]).wait()
    assert back is not None
    assert torch.equal(back, wide.t())


def test_the_source_may_change_at_once_and_the_ring_comes_round() -> None:
    """Twenty times what the ring holds, with the device far behind, on two streams."""
    streams = [RUNTIME.make_copy_stream(name) for name in "ab"]
    got: list[torch.Tensor] = []
    source = torch.empty(30000, dtype=torch.int64)
    for index in range(360):
        source.fill_(index)
        streams[index % 2].submit(lambda: got.append(RUNTIME.stage_to_device(source)))
    source.fill_(-1)
    RUNTIME.synchronize()
    assert all(bool((one == index).all()) for index, one in enumerate(got))


def test_a_later_write_does_not_reach_the_copy() -> None:
    tensor = on_device([1, 2, 3], "cuda")
    copies = RUNTIME.copy_to_host([tensor, None])
    tensor.fill_(7)
    first, second = copies.wait()
    assert first is not None
    assert first.tolist() == [1, 2, 3]
    assert second is None


@pytest.mark.parametrize("to_host", [True, False])
def test_neither_way_waits_for_a_long_copy(to_host: bool) -> None:
    size = 2 << 30
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(size, dtype=torch.uint8, device="cuda")
    stream, end = RUNTIME.make_copy_stream("long"), RUNTIME.make_event()
    # Compiles, and leaves page-locked memory to torch's cache: taking more waits for the device.
    RUNTIME.copy_to_host([on_device([1], "cuda") + 1]).wait()
    RUNTIME.synchronize()

    def work() -> None:
        target, source = (host, device) if to_host else (device, host)
        target.copy_(source, non_blocking=True)
        end.record()

    stream.submit(work)
    (back,) = RUNTIME.copy_to_host([on_device([5], "cuda") + 1]).wait()
    assert not end.query(), "40 ms of copying ended before a few microseconds"
    assert back is not None
    assert back.tolist() == [6]
    end.synchronize()


def test_copies_work_in_inference_mode_and_out_of_it() -> None:
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            assert on_device([1, 2], "cuda").tolist() == [1, 2]
