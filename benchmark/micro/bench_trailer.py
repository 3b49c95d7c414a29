"""Cost of the 32-byte trailer of L3 objects: puts and gets with and without hashing the page.

    python benchmark/micro/bench_trailer.py [--pages 512] [--page-kib 1024] [--repeat 6]

Starts a real mooncake_master and a store node on the loopback interface (TCP) and moves the same
registered pages through `MooncakeStore` (trailer written; checksum verified, or only the key) and
through Mooncake's own multi-buffer calls (no trailer at all). Prints one JSON line: medians in
GB/s, the ratio to the calls without a trailer, and the speed of the hash itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.benchmark.report import emit, provenance
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.mem_cache.storage.page_trailer import seal

PAGE_TOKENS = 64
HEADS, HEAD_DIM = 4, 128


Step: TypeAlias = tuple[str, "Bench", Callable[[], None]]


class Bench:
    """One store client and the pages that it moves."""

    def __init__(self, master: str, pages: int, page_kib: int, *, verify: bool) -> None:
        token_bytes = 2 * HEADS * HEAD_DIM * 2
        layers = max(1, page_kib * 1024 // (PAGE_TOKENS * token_bytes))
        device = MHATokenToKVPool(
            pages * PAGE_TOKENS, PAGE_TOKENS, torch.bfloat16, HEADS, HEAD_DIM, layers, "cpu"
        )
        self.host = MHATokenToKVPoolHost(device, 1.0, 0, PAGE_TOKENS, "page_first_direct")
        self.host.k_buffer.normal_()
        self.host.v_buffer.normal_()
        extra = {
            "master_server_address": master,
            "protocol": "tcp",
            "global_segment_size": 0,
            "verify_checksum": verify,
        }
        config = HiCacheStorageConfig(
            0, 1, 0, 1, 0, 1, False, False, True, None, extra_config=extra, namespace="bench"
        )
        mark_device_set("cpu")
        self.store = MooncakeStore(config, self.host)
        self.slots = torch.arange(pages * PAGE_TOKENS)
        self.keys = [f"bench/{index:064x}" for index in range(pages)]
        self.total_bytes = pages * self.host.page_bytes

    def put(self) -> None:
        done = self.store.batch_set_v2([PoolTransfer(PoolName.KV, self.slots, keys=self.keys)])
        assert all(done["kv"]), "the store is too small"

    def get(self) -> None:
        done = self.store.batch_get_v2([PoolTransfer(PoolName.KV, self.slots, keys=self.keys)])
        assert all(done["kv"])

    def raw(self, *, is_get: bool) -> None:
        """The same pages without trailers, in batches as large as the store's."""
        client = self.store._client.store
        call = (
            client.batch_get_into_multi_buffers if is_get else client.batch_put_from_multi_buffers
        )
        ptrs, sizes = self.host.get_page_buffer_meta(self.slots)
        size = max(1, min(128, (32 << 20) // self.host.page_bytes))
        pairs = [ptrs[at : at + 2] for at in range(0, len(ptrs), 2)]
        for start in range(0, len(pairs), size):
            batch = pairs[start : start + size]
            codes = call(self.keys[start : start + size], batch, [sizes[:2]] * len(batch))
            assert all(code >= 0 for code in codes), codes

    def hash_all(self) -> None:
        for views in self.host.get_page_views(self.slots):
            seal(views, "key")

    def gb_per_second(self, work: Callable[[], None]) -> float:
        started = time.perf_counter()
        work()
        return self.total_bytes / (time.perf_counter() - started) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--page-kib", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=6)
    args = parser.parse_args()
    segment = f"{args.pages * args.page_kib * 2 // 1024}mb"
    raw: dict[str, list[float]] = {}
    with MooncakeCluster(num_nodes=1, segment_size=segment) as cluster:
        verifying = Bench(cluster.master.address, args.pages, args.page_kib, verify=True)
        trusting = Bench(cluster.master.address, args.pages, args.page_kib, verify=False)
        # The first round touches the segment's memory for the first time and is not counted.
        for turn in range(args.repeat + 1):
            sealed: list[Step] = [
                ("put_with_trailer", verifying, verifying.put),
                ("get_verified", verifying, verifying.get),
                ("get_key_only", trusting, trusting.get),
                ("hash_one_core", verifying, verifying.hash_all),
            ]
            bare: list[Step] = [
                ("put_raw", verifying, partial(verifying.raw, is_get=False)),
                ("get_raw", verifying, partial(verifying.raw, is_get=True)),
            ]
            # The second one finds warmer memory, so they take turns.
            for steps in (sealed, bare) if turn % 2 else (bare, sealed):
                for name, bench, work in steps:
                    speed = bench.gb_per_second(work)
                    if turn:
                        raw.setdefault(name, []).append(round(speed, 3))
                verifying.store.clear()
        verifying.store.close()
        trusting.store.close()
    report(args, raw)


def report(args: argparse.Namespace, raw: dict[str, list[float]]) -> None:
    median = {name: statistics.median(values) for name, values in raw.items()}
    result = {
        "benchmark": "trailer",
        **provenance(),
        "torch_threads": torch.get_num_threads(),
        "pages": args.pages,
        "page_kib": args.page_kib,
        "gb_per_second": median,
        "put_ratio": round(median["put_with_trailer"] / median["put_raw"], 3),
        "get_ratio": round(median["get_verified"] / median["get_raw"], 3),
        "get_key_only_ratio": round(median["get_key_only"] / median["get_raw"], 3),
        "raw": raw,
    }
    emit(result)


if __name__ == "__main__":
    main()
