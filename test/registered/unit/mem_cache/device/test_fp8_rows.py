"""Rows in fp8: their bytes against a definition in fp64, sizes, and the pools that keep them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.device.fp8_rows import FP8, pack, read_rows
from sglang.srt.mem_cache.device.mla_pool import MLASpec, MLATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import IndexerSpec, NSATokenToKVPool
from sglang.srt.mem_cache.device.pool_registry import make_pools
from sglang.srt.mem_cache.device.row_buffers import gather_rows, store_rows
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

SIZES = [(512, 64), (128, 0), (256, 8), (32, 8), (24, 0)]
"""Elements, and values behind them: rows and keys of DeepSeek, then of tests."""
# All magnitudes of e4m3, ascending: below 2^-6 they are multiples of 2^-9.
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)


def values(n: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of different magnitudes, with outliers, and one of zeros."""
    numbers = torch.Generator().manual_seed(width)
    found = torch.randn(n, width, generator=numbers) * torch.logspace(-6, 4, n).unsqueeze(1)
    found[:, ::17] *= 50
    found[3 : min(n, 4)] = 0
    return found.to(dtype)


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    """`x` fp64, rounded to the nearest e4m3, the one with an even code if two are equally near."""
    above = np.searchsorted(E4M3, np.abs(x)).clip(1, len(E4M3) - 1)
    low, high = E4M3[above - 1], E4M3[above]
    middle = (low + high) / 2
    is_up = (np.abs(x) > middle) | ((np.abs(x) == middle) & (above % 2 == 0))
    rounded: np.ndarray = np.copysign(np.where(is_up, high, low), x)
    return rounded


@pytest.mark.parametrize(("elements", "rest"), SIZES)
def test_bytes_are_those_of_the_definition(elements: int, rest: int) -> None:
    rows = values(9, elements + rest)
    stored = pack(rows, elements)
    raw = stored.numpy()
    groups = max(1, elements // 128)
    assert raw.shape == (9, elements + 4 * groups + 2 * rest)
    exact = rows.double().numpy()[:, :elements].reshape(9, groups, -1)
    largest = np.abs(exact).max(axis=-1, keepdims=True)
    # fp32, as scales are stored and elements are divided.
    scales = np.where(largest == 0, 1.0, largest / 448).astype(np.float32)
    quotients = (exact.astype(np.float32) / scales).astype(np.float64)
    codes = torch.from_numpy(raw[:, :elements].copy()).view(FP8).double().numpy()
    assert np.array_equal(codes, nearest_e4m3(quotients).reshape(9, elements))
    kept_scales = raw[:, elements : elements + 4 * groups].copy().view(np.float32)
    assert np.array_equal(kept_scales, scales[..., 0])
    kept = stored[:, elements + 4 * groups :].contiguous().view(torch.bfloat16)
    assert torch.equal(kept, rows[:, elements:])


@pytest.mark.parametrize(("elements", "rest"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_near_what_was_stored(elements: int, rest: int, dtype: torch.dtype) -> None:
    rows = values(9, elements + rest, dtype)
    buffer = torch.zeros(20, 1, pack(rows, elements).shape[1], dtype=torch.uint8)
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:9]
    store_rows(buffer, slots, rows.unsqueeze(1), elements)
    found = gather_rows(buffer, slots, elements, torch.float32)
    assert found.shape == (9, 1, elements + rest)
    # Half a unit of three bits of mantissa, or of the smallest e4m3 times the scale.
    want = rows.double().view(9, 1, -1)
    groups = want[..., :elements].view(9, 1, max(1, elements // 128), -1)
    least = (groups.abs().amax(-1, keepdim=True) / 448 * 2.0**-10).expand_as(groups).flatten(-2)
    error = (found.double() - want).abs()
    bound = torch.maximum(want[..., :elements].abs() * 2.0**-4, least)
    assert (error[..., :elements] <= bound * (1 + 1e-6)).all()
    assert torch.equal(found[..., elements:], rows[:, None, elements:].bfloat16().float())
    # Rounding again changes nothing that is read.
    again = pack(found.squeeze(1), elements)
    assert torch.equal(read_rows(again, elements, torch.float32), found.squeeze(1))


def test_rows_of_any_magnitude_stay_finite() -> None:
    smallest = torch.full((1, 128), 2.0**-133, dtype=torch.bfloat16)
    largest = torch.full((1, 128), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    for rows in (smallest, largest, torch.zeros(1, 128)):
        assert read_rows(pack(rows, 128), 128, torch.float32).isfinite().all()
    assert read_rows(torch.zeros(1, 132, dtype=torch.uint8), 128, torch.float32).sum() == 0


def test_a_token_of_deepseek_takes_656_and_132_bytes() -> None:
    rows, keys = MLASpec.of(range(61), 512, 64, FP8), IndexerSpec.of(range(61), 128, FP8)
    assert (rows.layer_bytes, keys.layer_bytes) == (656, 132)
    assert (rows.row_dim, keys.index_head_dim) == (576, 128)
    pools = make_pools([rows, keys], 8, 4, "cpu")
    assert [pool.parts[0][0].shape for pool in pools.values()] == [(12, 1, 656), (12, 132)]
    assert all(pool.store_dtype is torch.uint8 for pool in pools.values())


def test_pools_read_what_both_ways_of_storing_have_rounded() -> None:
    pool = NSATokenToKVPool(8, 4, 32, FP8, 8, 2, "cpu", 24, kv_cache_dim=52)
    slots, row, key = torch.tensor([5, 9]), values(2, 40), values(2, 24)
    pool.set_kv_buffer(0, slots, row.unsqueeze(1), row[:, None, :32])
    pool.set_mla_kv_buffer(1, slots, row[:, :32], row[:, 32:])
    pool.set_index_k_buffer(0, slots, key)
    assert pool.kv_cache_dim == 52 and pool.index_k_with_scale_buffer[0].shape == (12, 28)
    assert torch.equal(pool.kv_buffer[0], pool.kv_buffer[1])
    latent, rope = pool.get_mla_kv_buffer(1, slots)
    assert latent.dtype is torch.bfloat16 and torch.equal(rope[:, 0], row[:, 32:])
    assert torch.equal(latent[:, 0], read_rows(pack(row, 32), 32, torch.bfloat16)[:, :32])
    keys = read_rows(pool.get_index_k_buffer(0)[slots], 24, torch.bfloat16)
    assert torch.equal(keys, read_rows(pack(key, 24), 24, torch.bfloat16))
    stored, split = pool.get_key_buffer(0), pool.split_rows(pool.get_key_buffer(0))
    assert torch.equal(torch.cat(split, dim=-1), stored)
    assert [part.shape[-1] for part in split] == [36, 16]
    pool.move_kv_cache(torch.tensor([4, 6]), slots)
    assert torch.equal(pool.kv_buffer[0][[4, 6]], pool.kv_buffer[0][slots])


def test_sizes_without_a_form_in_fp8_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_lora_rank=192, qk_rope_head_dim=64: .* use --kv"):
        MLASpec.of((0,), 192, 64, FP8)
    with pytest.raises(ValueError, match=r"qk_rope_head_dim=7: .* even number"):
        MLATokenToKVPool(8, 4, FP8, 32, 7, 1, "cpu")
    with pytest.raises(ValueError, match=r"index_head_dim=30: .* \(of 4, if fewer than 128"):
        IndexerSpec.of((0,), 30, FP8)
    with pytest.raises(ValueError, match="index_head_dim=256: a key in fp8 has one scale"):
        IndexerSpec.of((0,), 256, FP8)
    with pytest.raises(ValueError, match="override_kv_cache_dim=576: rows of 656 bytes are kept"):
        MLATokenToKVPool(8, 4, FP8, 512, 64, 1, "cpu", override_kv_cache_dim=576)
