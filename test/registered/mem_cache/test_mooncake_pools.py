"""Two kinds of state in a real Mooncake Store: both parts of a page, and states behind pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rigs.caches.cache_rig import RIG_LAYOUTS, CacheRig, Reused
from rigs.caches.mamba_pools import STATE_DTYPES, mamba_spec, recurrent_states
from rigs.caches.marks_rig import MarksRig
from rigs.caches.mla_pools import indexer_keys, latent_rows
from rigs.caches.mla_rig import MLARig
from rigs.caches.state_rig import StateRig
from rigs.caches.storage_rigs import PAGE, StorageRigs, attached_store_of
from rigs.stores.host_pools import PoolKind, page_keys, round_trip
from rigs.stores.mooncake_bench import sizes_moved
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.memory_pool_host import MambaPoolHost
from sglang.srt.mem_cache.storage.mooncake_store import page_batches
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=14, suite="base-b-test-cpu")

PROMPT = [*range(160), 7]


@pytest.mark.half
@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("kind", [MarksRig, MLARig])
@pytest.mark.parametrize("layout", RIG_LAYOUTS)
def test_both_parts_come_back_or_both_stay_away(
    cluster: MooncakeCluster, layout: str, kind: type[CacheRig]
) -> None:
    with StorageRigs.on(cluster) as rigs:
        writer, reader, third = (rigs.make(kind=kind, hicache_mem_layout=layout) for _ in range(3))
        writer.run(PROMPT)
        writer.settle()
        assert reader.run(PROMPT) == Reused(storage=160)
        reader.settle()
        io = attached_store_of(reader)
        assert isinstance(io.client, MooncakeStore)
        (key,) = io.pools.keys(RadixKey(PROMPT[:160]).page_hashes(PAGE)[30:31])
        with io.client._client.using() as client:
            assert client.remove(f"{key}/indexer", True) == 0
        reader.flush()
        assert reader.run(PROMPT) == Reused(storage=120), "30 pages of 40"
        reader.settle()
        assert third.run(PROMPT) == Reused(storage=160), "the write brought back what was missing"
        third.settle()


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("kind", [latent_rows, indexer_keys])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_latent_rows_and_indexer_keys_come_back_bit_for_bit(
    shared: MooncakeStore,
    kind: Callable[[torch.dtype], PoolKind],
    dtype: torch.dtype,
    layout: str,
) -> None:
    shared.clear()
    round_trip(shared, layout, page_keys(3), [5, 2, 9], kind=kind(dtype))


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("layout", MambaPoolHost.LAYOUTS)
@pytest.mark.parametrize("dtypes", STATE_DTYPES)
def test_recurrent_states_come_back_bit_for_bit(
    shared: MooncakeStore, dtypes: tuple[torch.dtype, torch.dtype], layout: str
) -> None:
    shared.clear()
    round_trip(shared, layout, page_keys(3), [5, 2, 9], kind=recurrent_states(mamba_spec(dtypes)))


@pytest.mark.parametrize("layout", MambaPoolHost.LAYOUTS)
@pytest.mark.parametrize("dtypes", STATE_DTYPES)
def test_a_long_state_moves_in_place_in_its_parts(
    shared: MooncakeStore,
    monkeypatch: pytest.MonkeyPatch,
    dtypes: tuple[torch.dtype, torch.dtype],
    layout: str,
) -> None:
    spec = mamba_spec(dtypes, heads=8, dim=112)
    assert spec.num_bytes >= page_batches.SHORT_PAGE_BYTES
    parts = [buffer.num_bytes * len(spec.layers) for buffer in spec.buffers]
    in_one = [[spec.num_bytes + TRAILER_BYTES]]
    shared.clear()
    moved = sizes_moved(shared, monkeypatch)
    round_trip(shared, layout, page_keys(3), [5, 2, 9], kind=recurrent_states(spec))
    wanted = in_one if layout == HostLayout.LAYER_FIRST else [[*parts, TRAILER_BYTES]]
    assert moved == [wanted * 3] * 2, "a put and a get of three states"


@pytest.mark.parametrize("writer", ["layer_first", "page_first"])
def test_long_states_of_all_layouts_are_the_same_objects(
    shared: MooncakeStore, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    states = recurrent_states(mamba_spec(heads=8, dim=112))
    shared.clear()
    moved = sizes_moved(shared, monkeypatch)
    for layout in (writer, *MambaPoolHost.LAYOUTS):
        round_trip(shared, layout, page_keys(3), [5, 2, 9], kind=states)
    assert len(moved) == 1 + 4, "one put, and a get by each"


@pytest.mark.half
@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("layout", MambaPoolHost.LAYOUTS)
def test_a_state_comes_back_with_the_pages_that_it_stands_behind(
    cluster: MooncakeCluster, layout: str
) -> None:
    with StorageRigs.on(cluster) as rigs:
        writer, reader, third = (
            rigs.make(kind=StateRig, hicache_mem_layout=layout) for _ in range(3)
        )
        writer.run(PROMPT[:121])
        writer.run(PROMPT)
        writer.settle()
        assert reader.run(PROMPT) == Reused(storage=160)
        reader.settle()
        io = attached_store_of(reader)
        assert isinstance(io.client, MooncakeStore)
        (key,) = io.pools.keys(RadixKey(PROMPT[:160]).page_hashes(PAGE)[-1:])
        with io.client._client.using() as client:
            assert client.remove(f"{key}/mamba", True) == 0
        reader.flush()
        assert reader.run(PROMPT) == Reused(storage=120), "up to the state before"
        reader.settle()
        assert third.run(PROMPT) == Reused(storage=160), "the write brought back what was missing"
        third.settle()
