"""StateSpec: what bytes, layers and pools follow from a model's kinds of state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang.srt.mem_cache.device import pool_registry
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.device.pool_registry import make_pools, register_pool
from sglang.srt.mem_cache.device.state_pool import StatePool, state_pool
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    KVSpec,
    PoolHitPolicy,
    PoolName,
    RankShare,
    RankSplit,
    StateBuffer,
    StateSpec,
    bytes_per_token,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

LATENT = StateSpec(
    name=PoolName.KV,
    layers=(0, 1, 2),
    buffers=(StateBuffer("latent", (1, 576), torch.bfloat16),),
    share=RankShare(RankSplit.SAME),
)
INDEXER = StateSpec(
    name=PoolName.INDEXER,
    layers=(1, 2),
    buffers=(
        StateBuffer("key", (128,), torch.float8_e4m3fn),
        StateBuffer("scale", (1,), torch.float32),
    ),
    share=RankShare(RankSplit.SAME),
    indices_from_pool=PoolName.KV,
)
RECURRENT = StateSpec(
    name=PoolName.MAMBA,
    layers=(0, 2),
    buffers=(
        StateBuffer("temporal", (4, 8, 16), torch.float32),
        StateBuffer("conv", (96, 3), torch.bfloat16),
    ),
    item=ItemKind.STATE,
    hit_policy=PoolHitPolicy.TRAILING_PAGES,
)


class SharedSlots(BaseDevicePool):
    """Holds what an indexer spec describes."""

    def __init__(
        self, spec: StateSpec, size: int, page_size: int, device: torch.device | str
    ) -> None:
        super().__init__(spec, size, device)
        self.buffers = [torch.zeros(size + page_size, *b.shape) for b in spec.buffers]

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        return ([], [], [])


class IndexerSpec(StateSpec):
    """A kind of state that the registry knows by its class."""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_registry, "_POOLS", dict(pool_registry._POOLS))
    register_pool(IndexerSpec, SharedSlots)


def indexer(**fields: object) -> IndexerSpec:
    known = {"name": PoolName.INDEXER, "layers": (1,), "buffers": INDEXER.buffers}
    return IndexerSpec(**{**known, "indices_from_pool": PoolName.KV, **fields})  # type: ignore[arg-type]


def test_a_spec_counts_bytes_of_keys_and_values() -> None:
    kv = KVSpec.of_heads((3, 7), 2, 16, torch.bfloat16, v_head_dim=8)
    assert (kv.head_num, kv.head_dim, kv.v_head_dim) == (2, 16, 8)
    assert kv.layer_bytes == 2 * (16 + 8) * 2
    assert kv.num_bytes == 2 * kv.layer_bytes
    assert kv.share == RankShare(RankSplit.HEADS, 0, 2, 2)


def test_a_spec_counts_bytes_of_rows_keys_and_states() -> None:
    assert LATENT.layer_bytes == 576 * 2
    assert INDEXER.layer_bytes == 128 + 4
    assert RECURRENT.layer_bytes == 4 * 8 * 16 * 4 + 96 * 3 * 2
    assert [spec.dtype.itemsize for spec in (LATENT, INDEXER, RECURRENT)] == [2, 1, 4]


def test_a_token_costs_what_the_paged_states_take() -> None:
    assert bytes_per_token((LATENT, INDEXER, RECURRENT)) == 3 * 576 * 2 + 2 * 132


@pytest.mark.parametrize("layers", [(), (2, 1), (1, 1)])
def test_layers_are_ascending(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"'kv' needs .* ascending order"):
        KVSpec.of_heads(layers, 1, 2, torch.float32)


def test_a_pool_has_the_spec_that_it_was_made_from() -> None:
    share = RankShare(RankSplit.REPLICATED, 1, 2, 2)
    kv = KVSpec.of_heads((3, 7), 1, 16, torch.float8_e4m3fn, v_head_dim=8, share=share)
    pool = make_pools([kv], 8, 4, "cpu")[PoolName.KV]
    assert isinstance(pool, MHATokenToKVPool)
    assert pool.spec == kv
    assert pool.k_buffer[1].shape == (12, 1, 16)
    assert pool.store_dtype is torch.uint8


@pytest.mark.usefixtures("registry")
def test_a_registered_class_makes_its_kind_of_pool() -> None:
    kv = KVSpec.of_heads((0, 1), 1, 2, torch.float32)
    pools = make_pools([kv, indexer()], 8, 4, "cpu")
    assert list(pools) == [PoolName.KV, PoolName.INDEXER]
    side = pools[PoolName.INDEXER]
    assert isinstance(side, SharedSlots)
    assert side.wait_for_layer(1) == 0
    with pytest.raises(ValueError, match="IndexerSpec has a pool already"):
        register_pool(IndexerSpec, SharedSlots)


def test_a_kind_without_a_class_of_its_own_has_a_pool_of_its_items() -> None:
    kv = KVSpec.of_heads((0, 1), 1, 2, torch.float32)
    tokens = replace(RECURRENT, name=PoolName.INDEXER, item=ItemKind.TOKEN)
    pools = make_pools([kv, tokens, RECURRENT], 8, 4, "cpu", num_states=3)
    paged, states = pools[PoolName.INDEXER], pools[PoolName.MAMBA]
    assert type(paged) is PagedDevicePool and (paged.size, paged.page_size) == (8, 4)
    assert type(states) is StatePool and (states.size, states.page_size) == (3, 1)
    assert state_pool(pools.values()) is states


def test_a_state_of_a_whole_prefix_is_needed_at_its_end_alone() -> None:
    with pytest.raises(ValueError, match="'mamba' stands for a whole prefix: its hit_policy is tr"):
        replace(RECURRENT, hit_policy=PoolHitPolicy.ALL_PAGES)


class Unheard(StateSpec):
    """No pool holds it."""


@pytest.mark.usefixtures("registry")
def test_what_cannot_be_held_is_refused_by_name() -> None:
    kv = KVSpec.of_heads((0, 1), 1, 2, torch.float32)
    unheard = Unheard(name=PoolName.MAMBA, layers=(0,), buffers=RECURRENT.buffers)
    second = replace(RECURRENT, name=PoolName.INDEXER)
    for specs, message in (
        ([kv, unheard], "no device pool for state 'mamba' \\(Unheard\\)"),
        ([kv, kv], "two kinds of state called 'kv'"),
        ([indexer()], "'indexer' shares the slots of 'kv', which the model does not have"),
        ([kv, RECURRENT, second], "let 'indexer' share those of 'mamba' \\(indices_from_pool\\)"),
        (
            [kv, replace(RECURRENT, indices_from_pool=PoolName.KV)],
            "'mamba', one for each state, cannot share the slots of 'kv', one for each token",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make_pools(specs, 8, 4, "cpu", num_states=3)
