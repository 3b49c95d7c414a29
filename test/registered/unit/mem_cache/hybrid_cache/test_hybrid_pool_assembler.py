"""Host pools by spec: sizes, the errors that name them, and nothing left after one."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from rigs.caches.marks_pool import MarksPool, MarksPoolHost, page_marks, prefix_marks
from rigs.caches.memory_ranks import run_on_ranks
from rigs.caches.mla_pools import make_indexer_pool, make_mla_pool
from rigs.stores.host_pools import (
    PAGE,
    copy_to_device,
    copy_to_host,
    make_device_pool,
    page_slots,
)
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.environ import envs
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.device.nsa_pool import NSATokenToKVPool
from sglang.srt.mem_cache.device.pool_registry import ModelPools
from sglang.srt.mem_cache.device.state_pool import MambaPool, MambaSpec
from sglang.srt.mem_cache.device.state_spec import StateBuffer, StateSpec
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.host import host_memory
from sglang.srt.mem_cache.host.host_layout import HostLayout, resolve_layout_and_io
from sglang.srt.mem_cache.host.host_memory import HostTensorAllocator
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
    build_kv_host_stack,
    build_mamba_hybrid_stack,
    build_nsa_hybrid_stack,
)
from sglang.srt.mem_cache.memory_pool_host import (
    HostPoolGroup,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    NSAIndexerPoolHost,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

INDEXER, MAMBA = PoolName.INDEXER, PoolName.MAMBA
KV_PAGE = PAGE * 3 * 2 * 2 * 4 * 2  # layers, K and V, heads, dim, bf16
MARK_PAGE, STATE = 16, 16
LATENT_PAGE = PAGE * 3 * 12 * 2  # layers, elements of a row, bf16
KEYS_PAGE = PAGE * 2 * 6 * 2  # layers, elements of a key, bf16

STATE_SPEC = MambaSpec.of_shapes(
    (1, 3), (1, 2, 2), (3, 2), ssm_dtype=torch.float32, conv_dtype=torch.bfloat16
)
STATE_BYTES = 2 * (4 * 4 + 6 * 2)


def three_pools() -> ModelPools:
    """16 pages of KV with a mark each, and 8 states."""
    kv = make_device_pool()
    marks = MarksPool(page_marks(0, 2), kv.size, PAGE)
    return ModelPools.of([kv, marks, MarksPool(prefix_marks(3, 4), 8, 1)], 6)


def sparse_model() -> ModelPools:
    """16 pages of latent rows in three layers, and of indexer keys in two of them."""
    return ModelPools.of([make_mla_pool(), make_indexer_pool()])


def with_states(size: int = 8) -> ModelPools:
    """16 pages of KV, and `size` states."""
    return ModelPools.of([make_device_pool(), MambaPool(STATE_SPEC, size, "cpu")], 4)


def build(pools: ModelPools, **arguments: Any) -> HostPoolGroup:
    asked: dict[str, Any] = {
        "ratio": 2.0, "size_gb": 0.0, "io_backend": "auto", "layout": "auto", "has_storage": True
    }  # fmt: skip
    io_backend, group = build_kv_host_stack(pools, **(asked | arguments))
    assert io_backend == "direct"
    return group


def refuse_allocation(
    monkeypatch: pytest.MonkeyPatch, number: int, error: Exception
) -> list[weakref.ref[torch.Tensor]]:
    """Raise `error` from allocation `number` (from 1) on. Returns the earlier allocations."""
    made: list[weakref.ref[torch.Tensor]] = []
    allocate = HostTensorAllocator.allocate

    def refuses(self: HostTensorAllocator, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(made) == number - 1:
            raise error
        tensor = allocate(self, *args, **kwargs)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(HostTensorAllocator, "allocate", refuses)
    return made


def page_nums(group: HostPoolGroup) -> dict[str, int]:
    return {name: entry.host_pool.page_num for name, entry in group.entries.items()}


# -- what is built -------------------------------------------------------------------------------


def test_every_pool_has_the_ratio_of_its_device_pool() -> None:
    group = build(three_pools())
    assert page_nums(group) == {"kv": 32, "indexer": 32, "mamba": 16}
    assert group.num_layers == 6
    assert {name: type(pool) for name, pool in group.extra_pools.items()} == {
        "indexer": MarksPoolHost,
        "mamba": MarksPoolHost,
    }
    layers = {
        name: [entry.layer_mapper(layer) for layer in range(6)]
        for name, entry in group.entries.items()
    }
    assert layers == {
        "kv": [0, 1, 2, None, None, None],
        "indexer": [0, None, 1, None, None, None],
        "mamba": [None, None, None, 0, 1, None],
    }
    assert group.get_pool("indexer").layout == group.primary.layout == "page_first_direct"


def test_a_share_is_of_what_the_host_has_left_beside_the_reserve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page, reserve = KV_PAGE, 1 << 20
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 40 * page + reserve)
    turns: list[bool] = []

    @contextmanager
    def turn(*, alone: bool) -> Iterator[None]:
        turns.append(alone)
        yield
        turns.append(not alone)

    monkeypatch.setattr(hybrid_pool_assembler, "host_memory_turn", turn)
    pools = ModelPools.of([make_device_pool()])
    with envs.HICACHE_HOST_MEMORY_RESERVE_BYTES.override(reserve):
        assert page_nums(build(pools, host_memory_fraction=0.8)) == {"kv": 32}
        assert page_nums(build(pools, host_memory_fraction=1.0)) == {"kv": 40}
        assert turns == [True, False] * 2
        sized = build(pools, host_memory_fraction=0.8, size_gb=10.5 * page / 1e9)
        assert page_nums(sized) == {"kv": 10}
        assert page_nums(build(pools)) == {"kv": 32}
        assert turns[4:] == [False, True] * 2
        with pytest.raises(ValueError, match=r"--hicache-host-memory-fraction 0\.01"):
            build(pools, host_memory_fraction=0.01)


def test_ranks_share_the_share_and_the_first_has_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 40 * KV_PAGE)
    turns: list[bool] = []

    @contextmanager
    def turn(*, alone: bool) -> Iterator[None]:
        turns.append(alone)
        yield

    monkeypatch.setattr(hybrid_pool_assembler, "host_memory_turn", turn)

    def work(group: RankGroup) -> dict[str, int]:
        pools = ModelPools.of([make_device_pool()])
        return page_nums(build(pools, host_memory_fraction=0.5, ranks=group))

    with envs.HICACHE_HOST_MEMORY_RESERVE_BYTES.override(0):
        assert run_on_ranks(2, work) == [{"kv": 10}, {"kv": 10}]
    assert turns == [True]


def test_a_size_is_divided_as_device_memory_is() -> None:
    size = 10 * (KV_PAGE + MARK_PAGE) + 5 * STATE
    assert page_nums(build(three_pools(), size_gb=size / 1e9)) == {
        "kv": 10,
        "indexer": 10,
        "mamba": 5,
    }


def test_a_dense_model_has_one_pool_of_the_whole_size() -> None:
    kv = make_device_pool()
    group = build(ModelPools.of([kv]), size_gb=(41 * KV_PAGE + 1) / 1e9)
    assert page_nums(group) == {"kv": 41}
    assert (group.num_layers, group.auxiliary_pools, group.extra_queries) == (3, (), [])
    assert isinstance(group.primary, MHATokenToKVPoolHost)


def test_a_subclass_is_mirrored_as_its_base() -> None:
    class Special(MHATokenToKVPool):
        pass

    kv = Special(64, PAGE, torch.bfloat16, 2, 4, 3, "cpu")
    assert type(build(ModelPools.of([kv])).primary) is MHATokenToKVPoolHost


def test_a_sparse_model_has_latent_rows_and_indexer_keys_in_the_same_pages() -> None:
    group = build(sparse_model(), size_gb=(9 * (LATENT_PAGE + KEYS_PAGE) + 1) / 1e9)
    assert page_nums(group) == {"kv": 9, "indexer": 9}
    assert isinstance(group.primary, MLATokenToKVPoolHost)
    assert isinstance(group.get_pool("indexer"), NSAIndexerPoolHost)
    assert (group.page_bytes, group.num_layers) == (LATENT_PAGE + KEYS_PAGE, 3)
    assert [one.pool_name for one in group.auxiliary_pools] == [INDEXER]
    assert [group.entries["indexer"].layer_mapper(layer) for layer in range(3)] == [0, None, 1]


def test_a_latent_model_without_an_indexer_has_one_pool() -> None:
    assert page_nums(build(ModelPools.of([make_mla_pool()]))) == {"kv": 32}


class Scores(PagedDevicePool):
    """A kind of state of which nothing below the device knows: two buffers that differ."""

    @classmethod
    def make(cls) -> Scores:
        buffers = StateBuffer("score", (3,), torch.float32), StateBuffer("count", (1,), torch.int16)
        spec = StateSpec(
            name=INDEXER, layers=(0, 2), buffers=buffers, indices_from_pool=PoolName.KV
        )
        pool = cls(spec, make_device_pool().size, PAGE, "cpu")
        for layer in (layer for part in pool.parts for layer in part):
            layer.copy_(torch.randint(0, 100, layer.shape))
        return pool


@pytest.mark.parametrize("layout", list(HostLayout))
def test_a_new_kind_of_token_slots_needs_no_host_pool_of_its_own(layout: str) -> None:
    pool = Scores.make()
    host = build(ModelPools.of([make_device_pool(), pool]), layout=layout).get_pool("indexer")
    assert type(host) is HostKVCache
    slots = copy_to_host(pool, host, [1, 2, 5])
    flat = torch.empty(3, host.page_bytes, dtype=torch.uint8)
    host.gather_pages(slots, flat)
    elsewhere = host.alloc(len(slots))
    assert elsewhere is not None
    host.scatter_pages(elsewhere, flat)
    copy_to_device(host, pool, elsewhere, [7, 3, 4])
    for layer in (layer for part in pool.parts for layer in part):
        assert torch.equal(layer[page_slots([7, 3, 4])], layer[page_slots([1, 2, 5])])
        assert layer[page_slots([1, 2, 5])].any()


# -- what is refused -----------------------------------------------------------------------------


class Unknown(BaseDevicePool):
    """A pool that names no host pool."""

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        return ([], [], [])


def test_a_kind_without_a_host_pool_is_named() -> None:
    strange = Unknown(prefix_marks(0, 1), 8, "cpu")
    with pytest.raises(ValueError, match=r"no host pool for Unknown \(pool mamba\)"):
        build(ModelPools.of([make_device_pool(), strange]))


def test_a_pool_that_gets_less_than_a_page_is_named_with_its_bytes() -> None:
    both = KV_PAGE + MARK_PAGE
    with pytest.raises(
        ValueError, match=rf"--hicache-ratio 0.05: pool kv gets {both * 16 // 20} bytes.*{both}"
    ):
        build(three_pools(), ratio=0.05)
    with pytest.raises(ValueError, match=r"--hicache-ratio 0.1: pool mamba gets 12 .*takes 16"):
        build(three_pools(), ratio=0.1)
    with pytest.raises(ValueError, match=r"--hicache-size 1e-09 GB: pool kv gets 0 bytes"):
        build(three_pools(), size_gb=1e-9)


def test_pools_that_do_not_fit_together_are_named_with_their_bytes() -> None:
    each = f"pool kv {32 * KV_PAGE} bytes, pool indexer 512 bytes, pool mamba 256 bytes"
    reserve = envs.HICACHE_HOST_MEMORY_RESERVE_BYTES.override(1 << 60)
    message = rf"{re.escape(each)}.*needs.*GiB available"
    with reserve, pytest.raises(ValueError, match=message):
        build(three_pools())


def test_a_layout_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown layout"):
        build(three_pools(), layout="diagonal")


def test_a_sparse_model_that_does_not_fit_is_refused_with_the_bytes_of_each_pool() -> None:
    each = f"pool kv {32 * LATENT_PAGE} bytes, pool indexer {32 * KEYS_PAGE} bytes"
    reserve = envs.HICACHE_HOST_MEMORY_RESERVE_BYTES.override(1 << 60)
    with reserve, pytest.raises(ValueError, match=rf"{each}.*needs.*GiB available"):
        build(sparse_model())
    both = LATENT_PAGE + KEYS_PAGE
    with pytest.raises(ValueError, match=rf"pool kv gets {both - 1} bytes .*takes {both}"):
        build(sparse_model(), size_gb=(both - 0.5) / 1e9)


@pytest.mark.parametrize("layout", list(HostLayout))
def test_all_pools_of_a_sparse_model_have_the_same_layout(layout: HostLayout) -> None:
    group = build(sparse_model(), layout=layout)
    assert {entry.host_pool.layout for entry in group.entries.values()} == {layout.value}
    assert group.nbytes == 32 * (LATENT_PAGE + KEYS_PAGE)
    assert len(group.primary.get_hybrid_pool_buffer()) == (2 if "split" in layout else 1)


@pytest.mark.parametrize("error", [MemoryError("the driver refused"), RuntimeError("no memory")])
@pytest.mark.parametrize(
    ("make", "number", "refused"),
    [
        (three_pools, 3, "mamba: no memory for 256 bytes"),
        (with_states, 3, f"mamba: no memory for {16 * STATE_BYTES} bytes"),
        (sparse_model, 2, f"indexer: no memory for {32 * KEYS_PAGE} bytes"),
        (sparse_model, 1, f"kv: no memory for {32 * LATENT_PAGE} bytes"),
    ],
)
def test_memory_that_is_refused_names_the_pool_and_leaves_nothing_allocated(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], ModelPools],
    number: int,
    refused: str,
    error: Exception,
) -> None:
    blocks = refuse_allocation(monkeypatch, number, error)
    with pytest.raises(ValueError, match=rf"host pool {refused}, with \d+.*{error}") as raised:
        build(make())
    del raised
    error.__traceback__ = None
    gc.collect()
    assert [block() for block in blocks] == [None] * (number - 1)


def test_what_a_pool_refuses_is_said_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: MarksPoolHost) -> list[torch.Tensor]:
        raise ValueError("layout page_first_direct: not for marks")

    monkeypatch.setattr(MarksPoolHost, "init_kv_buffer", refuses)
    with pytest.raises(ValueError, match="host pool indexer: layout page_first_direct: not for"):
        build(three_pools())


# -- specs that contradict themselves ------------------------------------------------------------


def test_specs_are_checked() -> None:
    kv = make_device_pool()
    marks = MarksPool(page_marks(0, 1), 64, PAGE)
    of_states = replace(page_marks(0, 1), indices_from_pool=MAMBA)
    for pools, message in (
        ([], "first pool is the primary pool"),
        ([marks, kv], "first pool is the primary pool"),
        ([kv, kv], "kv is there twice"),
        ([kv, MarksPool(page_marks(0, 4), 64, PAGE)], r"indexer has layers \[0, 4\] .* with 4"),
        ([kv, MarksPool(page_marks(-1, 0), 64, PAGE)], r"indexer has layers \[-1, 0\]"),
        ([kv, MarksPool(of_states, 64, PAGE)], "does not come before"),
        ([kv, MarksPool(page_marks(0, 1), 8, 1)], "has 8 in pages of 1, not 64 in pages of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelPools.of(pools, 4)


# -- recurrent states ----------------------------------------------------------------------------


def build_with_states(pools: ModelPools, **arguments: Any) -> HostPoolGroup:
    asked: dict[str, Any] = {
        "ratio": 2.0, "size_gb": 0.0, "io_backend": "auto", "layout": "auto", "has_storage": True
    }  # fmt: skip
    return build_mamba_hybrid_stack(pools, **(asked | arguments))[1]


def test_recurrent_states_count_in_the_choice_of_a_layout() -> None:
    name = f"{build_kv_host_stack.__module__}.resolve_layout_and_io"
    with mock.patch(name, wraps=resolve_layout_and_io) as asked:
        build_with_states(with_states())
        build(three_pools())
    assert [call.kwargs["has_states"] for call in asked.call_args_list] == [True, False]


def test_the_stack_of_a_sparse_model_has_a_pool_of_indexer_keys() -> None:
    sparse = NSATokenToKVPool(8 * PAGE, PAGE, 6, torch.bfloat16, 2, 3, "cpu", 4)
    pools = ModelPools.of([sparse, *sparse.auxiliary_pools])
    _, group = build_nsa_hybrid_stack(
        pools, ratio=1.0, size_gb=0.0, io_backend="auto", layout="page_first", has_storage=False
    )
    assert [type(group.get_pool(name)) for name in group.entries] == [
        MLATokenToKVPoolHost, NSAIndexerPoolHost
    ]  # fmt: skip


def test_host_sizes_of_pages_and_states_are_in_the_ratio_of_the_device() -> None:
    group = build_with_states(with_states())
    assert page_nums(group) == {"kv": 32, "mamba": 16}
    assert isinstance(group.get_pool("mamba"), MambaPoolHost)
    device_bytes = 16 * KV_PAGE + 8 * STATE_BYTES
    in_gb = build_with_states(with_states(), size_gb=3 * device_bytes / 1e9)
    assert page_nums(in_gb) == {"kv": 48, "mamba": 24}, "each pool's part is taken once"


def test_a_stack_with_states_that_cannot_be_built_names_the_pool_and_takes_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_allocation(monkeypatch, 1, AssertionError("memory was taken"))
    with pytest.raises(ValueError, match=f"pool mamba gets 44 .*takes {STATE_BYTES}"):
        build_with_states(with_states(), ratio=0.1)
    with pytest.raises(
        ValueError, match="page_first_kv_split is not for host pool mamba; use one of: layer_first"
    ):
        build_with_states(with_states(), layout="page_first_kv_split")
