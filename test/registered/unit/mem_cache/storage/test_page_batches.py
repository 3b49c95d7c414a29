"""Side memory of pools in a Mooncake store."""

from __future__ import annotations

from rigs.stores.host_pools import make_device_pool, make_host_pool, page_slots
from sglang.srt.mem_cache.host.head_group_pool import HeadGroupPool
from sglang.srt.mem_cache.storage.mooncake_store.page_batches import PoolRows
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def test_groups_of_heads_of_a_pool_share_side_memory() -> None:
    whole = make_host_pool(make_device_pool(), "page_first_direct")
    first, second = (HeadGroupPool(whole, index, 2) for index in range(2))
    rows = PoolRows(first)
    beside = PoolRows(second, others=[rows])
    assert beside.memory is rows.memory
    (memory,) = beside.buffers()
    assert memory is rows.memory, "the pool itself is not registered"
    one, other = (
        each.lay_out(index, ["key"], page_slots([0]), is_get=True).rows
        for index, each in enumerate((rows, beside))
    )
    assert one.data_ptr() != other.data_ptr()
    assert PoolRows(whole, others=[rows]).memory is not rows.memory
