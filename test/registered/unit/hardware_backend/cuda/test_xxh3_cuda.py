"""Digests that a GPU computes are those of the xxhash library."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.constants import KIB, MIB
from sglang.srt.hardware_backend.device_runtime import detect_device, device_runtime
from sglang.srt.hardware_backend.leaf_hash import DIGEST_BYTES, LEAF_BYTES
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=20, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")


@pytest.fixture(scope="module")
def data() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (300 * MIB,), dtype=torch.uint8, generator=generator)


def matrices(data: torch.Tensor) -> list[torch.Tensor]:
    """Matrices of every kind: whole blocks and not, one leaf and many, columns, odd sizes."""
    table = data[: 512 * 4096].view(512, 4096)
    return [
        data[:1].view(1, 1),
        data[:KIB].view(4, 256),
        data[: KIB + 8].view(1, -1),
        data[8 : LEAF_BYTES + 16].view(1, -1),
        data[3 : 3 * LEAF_BYTES].view(1, -1),
        table[:, 1024:2048],
        table[:, 8:4088],
        table[:, 1:1038],
        table[:, 5:6],
        data.view(300, MIB),
    ]


def test_digests_are_the_librarys(data: torch.Tensor) -> None:
    want = device_runtime("cpu").leaf_digests(matrices(data))
    found = device_runtime("cuda").leaf_digests(matrices(data.cuda()))
    assert [len(one) // DIGEST_BYTES for one in found] == [1, 1, 1, 2, 3, 1, 2, 1, 1, 300]
    assert found == want


def test_each_word_counts(data: torch.Tensor) -> None:
    runtime = device_runtime("cuda")
    block = data[: 2 * KIB].cuda().view(1, -1)
    seen = set(runtime.leaf_digests([block]))
    for at in range(0, 2 * KIB, 8):
        block[0, at + at % 7] ^= 1 << (at // 8 % 8)
        seen.update(runtime.leaf_digests([block]))
    assert len(seen) == 1 + 2 * KIB // 8
