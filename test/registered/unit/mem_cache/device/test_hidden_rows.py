"""Rows of hidden states: their bytes go from one table to another."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.mem_cache.device.hidden_rows import HiddenRows
from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_goes_to_another_server(dtype: torch.dtype) -> None:
    here, there = (HiddenRows(4, 6, dtype, "cpu") for _ in range(2))
    assert here.table.shape == (5, 6), "a row of garbage behind those of requests"
    here.table[2] = torch.tensor([1.5, -2.0, 0.0, 3.25, float("inf"), 1e-3])
    raw = here.read(2)
    assert len(raw) == here.row_bytes == 6 * dtype.itemsize
    there.write(1, raw)
    assert torch.equal(there.table[1], here.table[2])
    assert not there.table[[0, 2, 3]].any()
    here.table[2] = 0
    assert raw == there.read(1), "bytes are a copy"


def test_a_pool_counts_the_bytes_of_its_hidden_rows() -> None:
    pool = ReqToTokenPool(4, 8, "cpu")
    assert pool.hidden_bytes == 0
    pool.last_hidden = HiddenRows(4, 6, torch.bfloat16, "cpu")
    assert pool.hidden_bytes == 12
