"""Kernels that hash pages where they are in a pool: digests are the xxhash library's."""

from __future__ import annotations

import pytest
import torch

from rigs.models.triton_device import triton_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=10, suite="base-b-test-1-gpu-large")

DEVICE = triton_device()

from sglang.srt.mem_cache.device.page_digests import CpuPageHasher, UnfitPages  # noqa: E402
from sglang.srt.mem_cache.device.page_digests_cuda import CudaPageHasher  # noqa: E402

PAGES = 7


def layers_of(
    rows: int, width: int, count: int, columns: slice = slice(None)
) -> list[torch.Tensor]:
    """Layers `[rows, width bytes]`, or some columns of them."""
    generator = torch.Generator().manual_seed(width)
    whole = torch.randint(0, 256, (count, rows, width), dtype=torch.uint8, generator=generator)
    return [layer[:, columns] for layer in whole.to(DEVICE)]


CASES = {
    "keys and values": (16, [(64, slice(None)), (64, slice(None))]),
    "one long row": (1, [(2048, slice(None))]),
    "whole blocks": (4, [(512, slice(None)), (256, slice(None))]),
    "indexer keys": (64, [(132, slice(None))]),
    "columns": (4, [(192, slice(0, 128)), (192, slice(128, 192))]),
}


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_digests_are_those_of_the_cpu(case: str, by_token: bool) -> None:
    page_size, parts = CASES[case]
    if by_token and any(width % 64 for width, _ in parts):
        pytest.skip("rows of such pages are refused")
    made = [layers_of(PAGES * page_size, width, 3, columns) for width, columns in parts]
    pages = torch.tensor([5, 0, 6])
    slots = (pages[:, None] * page_size + torch.arange(page_size)).reshape(-1)
    (found,) = CudaPageHasher(made, page_size, by_token=by_token).digests(slots.to(DEVICE)).wait()
    on_cpu = [[layer.cpu() for layer in layers] for layers in made]
    (want,) = CpuPageHasher(on_cpu, page_size, by_token=by_token).digests(slots).wait()
    assert found is not None and want is not None
    assert found.tolist() == want.tolist()


def test_many_pages_go_in_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.hardware_backend.cuda import xxh3

    monkeypatch.setattr(xxh3, "_SUM_BYTES", 1)
    layers = layers_of(PAGES * 4, 128, 2)
    slots = torch.arange(PAGES * 4)
    (found,) = CudaPageHasher([layers], 4, by_token=False).digests(slots).wait()
    cpu = CpuPageHasher([[layer.cpu() for layer in layers]], 4, by_token=False)
    (want,) = cpu.digests(slots).wait()
    assert found is not None and want is not None
    assert found.tolist() == want.tolist()


def test_short_rows_are_refused_with_the_remedy() -> None:
    with pytest.raises(UnfitPages, match="use a larger --page-size"):
        CudaPageHasher([layers_of(PAGES, 132, 2)], 1, by_token=False)
