"""A client of a real Mooncake Store with a few pages, whose objects tests can read and change."""

from __future__ import annotations

from typing import Any, Protocol

import pytest
import torch

from rigs.stores.host_pools import (
    copy_to_host,
    device_bytes,
    make_device_pool,
    make_host_pool,
    page_keys,
    page_slots,
    storage_config,
)
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.hicache_storage import CacheOutcome, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.mooncake_store.client import MooncakeClient
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.mem_cache.storage.mooncake_store.page_batches import PageBatch


def connect(
    cluster: MooncakeCluster, namespace: str = "ns", *, segment: str = "0mb", **extra: Any
) -> MooncakeStore:
    """A client of `cluster` that lends it a `segment`."""
    return MooncakeStore(
        storage_config(
            namespace,
            master_server_address=cluster.master.address,
            master_metrics_port=cluster.master.metrics_port,
            protocol="tcp",
            global_segment_size=segment,
            **extra,
        )
    )


class Clients(Protocol):
    """Makes clients of one cluster, which the maker closes."""

    def __call__(self, namespace: str = "ns", *, verify_checksum: bool = True) -> MooncakeStore: ...


def sizes_moved(store: MooncakeStore, patch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """A list that gets an entry for each batch that `store` moves: the sizes of each page's pieces,
    in bytes. Each piece moves from or to its own memory."""
    moved: list[list[list[int]]] = []
    transfer = store._transfer

    def recorded(client: MooncakeClient, batch: PageBatch, **how: Any) -> list[int]:
        moved.append(batch.sizes)
        return transfer(client, batch, **how)

    patch.setattr(store, "_transfer", recorded)
    return moved


class Bench:
    """A store, and `count` pages of a pool that are to be written to it under `keys`."""

    def __init__(
        self, store: MooncakeStore, layout: str = "page_first_direct", count: int = 3
    ) -> None:
        self.store = store
        self.device = make_device_pool(num_pages=max(16, count))
        self.host = make_host_pool(self.device, layout)
        store.register_mem_host_pool_v2(self.host, PoolName.KV)
        self.keys = page_keys(count)
        self.pages = list(range(count))
        self.slots = copy_to_host(self.device, self.host, self.pages)
        self.wanted = device_bytes(self.device, page_slots(self.pages))

    @property
    def move(self) -> PoolTransfer:
        """The transfer of all pages."""
        return PoolTransfer(PoolName.KV, host_indices=self.slots, keys=self.keys)

    def put(self) -> list[CacheOutcome]:
        """Write all pages."""
        return self.store.batch_set_v2([self.move])["kv"]

    def get(self) -> list[CacheOutcome]:
        """Zero the pool, and read all pages."""
        for buffer in self.host.get_hybrid_pool_buffer():
            buffer.zero_()
        return self.store.batch_get_v2([self.move])["kv"]

    def host_is_intact(self) -> bool:
        """True if the pool has the original bytes of the pages."""
        return host_bytes(self.host, self.device, self.slots, self.pages) == self.wanted

    def object_key(self, index: int, pool: str = "kv") -> str:
        """Mooncake's key of a page."""
        return f"{self.keys[index]}/{pool}"

    def raw(self, index: int) -> bytes:
        """The bytes of a page's object, trailer included."""
        return bytes(self.store._client.store.get(self.object_key(index)))

    def overwrite(self, index: int, raw: bytes) -> None:
        """Put another object in the place of a page's."""
        client = self.store._client.store
        assert client.remove(self.object_key(index), True) == 0
        assert client.put(self.object_key(index), raw) == 0


def host_bytes(
    host: MHATokenToKVPoolHost,
    like: MHATokenToKVPool,
    slots: torch.Tensor,
    pages: list[int],
) -> bytes:
    """The bytes that a device gets when it loads `slots`."""
    other = make_device_pool(num_pages=like.size // like.page_size, seed=1)
    for layer in range(other.layer_num):
        host.load_to_device_per_layer(other, slots, page_slots(pages), layer, "direct")
    return device_bytes(other, page_slots(pages))
