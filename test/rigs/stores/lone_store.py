"""A process that uses `MooncakeStore` by itself, with a pool of its own: no engine, no device set.

    python -m rigs.stores.lone_store MASTER

Prints in JSON what the calls of both interfaces answered, and whether all bytes came back.
"""

from __future__ import annotations

import json
import sys

import torch

from rigs.stores.third_party_pool import PAGE, ThirdPartyPool
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

_LONG_PAGE_KIB = 512


def main() -> None:
    (master,) = sys.argv[1:]
    envs.MOONCAKE_MASTER.set(master)
    envs.MOONCAKE_PROTOCOL.set("tcp")
    envs.MOONCAKE_GLOBAL_SEGMENT_SIZE.set(0)
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="test",
    )
    said = {
        "staged": move_pages(MooncakeStore(config), "staged", ThirdPartyPool(8)),
        "in place": move_pages(
            MooncakeStore(None), "in-place", ThirdPartyPool(8, page_kib=_LONG_PAGE_KIB)
        ),
    }
    print(json.dumps(said))


def move_pages(store: MooncakeStore, prefix: str, pool: ThirdPartyPool) -> dict[str, object]:
    """Write pages 1 and 2 by both interfaces, and read them into pages 5 and 6."""
    store.register_mem_pool_host(pool)
    slots = torch.arange(PAGE, 3 * PAGE)
    into = slots + 4 * PAGE
    v1, v2 = ([f"{prefix}-{version}-{page}" for page in "ab"] for version in ("v1", "v2"))
    said: dict[str, object] = {"before": store.batch_exists(v1)}
    said["set"] = store.batch_set_v1(v1, slots)
    said["exists"] = [store.batch_exists([*v1, "missing"]), store.exists("missing")]
    said["get"] = store.batch_get_v1(v1, into)
    said["equal"] = are_equal(pool)
    pool.kv_buffer[:, 5 * PAGE :] = 0
    moves = [PoolTransfer(PoolName.KV, host_indices=slots, keys=v2)]
    said["set v2"] = store.batch_set_v2(moves)
    said["exists v2"] = store.batch_exists_v2([*v2, "missing"]).kv_hit_pages
    said["get v2"] = store.batch_get_v2([PoolTransfer(PoolName.KV, host_indices=into, keys=v2)])
    said["equal v2"] = are_equal(pool)
    # One object by its address, as for memory that is registered anyway.
    address, size = pool.kv_buffer.data_ptr(), 100
    said["set by address"] = store.set(f"{prefix}-one", target_location=address, target_sizes=size)
    got = store.get(f"{prefix}-one", target_location=address + size, target_sizes=size)
    flat = pool.kv_buffer.view(-1)
    said["equal by address"] = got is not None and torch.equal(flat[:size], flat[size : 2 * size])
    store.close()
    return said


def are_equal(pool: ThirdPartyPool) -> bool:
    """True if pages 5 and 6 have the bytes of pages 1 and 2."""
    return all(torch.equal(pool.page(page), pool.page(page + 4)) for page in (1, 2))


if __name__ == "__main__":
    main()
