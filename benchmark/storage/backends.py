"""GB/s of puts and gets through each L3 backend, compared with a bare loop over the same API.

For each backend, host layout and page size, each round moves the same pages in four ways, in
changing order: through the backend with checksums, through the backend without them (the trailer
then only identifies the object), through a bare loop (`peers.py`), and by memory copy. Medians in
GB/s, and the medians of each round's ratios to the bare loop. `hash` is the speed of the checksum
alone. The mooncake backend gets its own mooncake_master and store node (TCP, loopback), the file
backend a folder in `--folder`, which should not be a network disk. About 2 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from benchmark.command import Command
from benchmark.report import Report
from benchmark.storage.peers import BareFiles, BareMooncake, MemoryCopy, Peer
from benchmark.timing import gb_per_second, median_ratio
from rigs.stores.host_pools import storage_config
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorage,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

MIB = 1 << 20
_WAYS = ("checksum_on", "checksum_off", "bare")


class Through(Peer):
    """Moves the pages of a pool through a backend, as the storage threads of the engine do."""

    def __init__(self, store: HiCacheStorage, host: MHATokenToKVPoolHost, pages: int) -> None:
        self._store = store
        config = store.storage_config
        assert config is not None
        keys = [f"{config.namespace}/{index:064x}" for index in range(pages)]
        self._transfer = PoolTransfer(PoolName.KV, torch.arange(pages * host.page_size), keys=keys)

    def put(self) -> None:
        done = self._store.batch_set_v2([self._transfer])[PoolName.KV]
        assert all(done), f"put: {done[-1]}; the store may be too small"

    def get(self) -> None:
        done = self._store.batch_get_v2([self._transfer])[PoolName.KV]
        assert all(done), f"get: {done[-1]}"

    def clear(self) -> None:
        self._store.clear()

    def close(self) -> None:
        self._store.close()


def make_host(args: argparse.Namespace, layout: str, page_size: int) -> MHATokenToKVPoolHost:
    """A host pool of `--mib`, filled with noise. Its device pool has one page."""
    device = MHATokenToKVPool(
        page_size, page_size, torch.bfloat16, args.kv_heads, args.head_dim, args.layers, "cpu"
    )
    token_bytes = 2 * args.layers * args.kv_heads * args.head_dim * 2
    pages = max(1, args.mib * MIB // (token_bytes * page_size))
    host = MHATokenToKVPoolHost(device, float(pages), 0, page_size, layout)
    for tensor in host.get_hybrid_pool_buffer():
        tensor.normal_()
    return host


@contextmanager
def peers(
    backend: str, host: MHATokenToKVPoolHost, folder: Path, master: str | None
) -> Iterator[dict[str, Peer]]:
    """The three ways to use the API of one backend, by name."""
    pages = host.page_num
    with ExitStack() as stack:
        made: dict[str, Peer] = {}

        def add(name: str, peer: Peer) -> None:
            stack.callback(peer.close)
            made[name] = peer

        for name in ("checksum_on", "checksum_off"):
            extra: dict[str, Any] = {"verify_checksum": name == "checksum_on"}
            store: HiCacheStorage
            if backend == "file":
                store = HiCacheFile(storage_config(name, **extra), str(folder / name))
                store.register_mem_pool_host(host)
            else:
                extra |= {
                    "master_server_address": master,
                    "protocol": "tcp",
                    "global_segment_size": 0,
                }
                store = MooncakeStore(storage_config(name, **extra), host)
            add(name, Through(store, host, pages))
        if backend == "file":
            add("bare", BareFiles(folder / "bare", host, pages))
        else:
            assert isinstance(store, MooncakeStore)
            add("bare", BareMooncake(store, host, pages))
        yield made


def measure(
    args: argparse.Namespace, host: MHATokenToKVPoolHost, ways: dict[str, Peer]
) -> dict[str, dict[str, list[float]]]:
    """GB/s of each round, by direction and way. The first round is a warm-up and not recorded."""
    total = host.page_num * host.page_bytes
    copy = MemoryCopy(host.page_bytes, host.page_num)
    raw: dict[str, dict[str, list[float]]] = {
        "put": {name: [] for name in _WAYS},
        "get": {name: [] for name in _WAYS},
        "memory": {"copy": [], "hash": []},
    }
    for turn in range(args.repeats + 1):
        names = _WAYS[turn % 3 :] + _WAYS[: turn % 3]
        for name in names:
            way = ways[name]
            put, get = (gb_per_second(total, work) for work in (way.put, way.get))
            way.clear()
            if turn:
                raw["put"][name].append(put)
                raw["get"][name].append(get)
        for name, work in (("copy", copy.run), ("hash", copy.hash)):
            speed = gb_per_second(total, work)
            if turn:
                raw["memory"][name].append(speed)
    return raw


def add_figures(report: Report, raw: dict[str, dict[str, list[float]]], case: Any) -> None:
    """Medians, and medians of each round's ratios."""
    memory = raw["memory"]
    for name, values in memory.items():
        report.add(f"memory_{name}", statistics.median(values), "GB/s", case, raw=values)
    for direction in ("put", "get"):
        speeds = raw[direction]
        for name, values in speeds.items():
            speed = statistics.median(values)
            report.add(f"{direction}_{name}", speed, "GB/s", case, raw=values)
        ratios = {
            f"{direction}_{name}_to_bare": median_ratio(speeds[name], speeds["bare"])
            for name in ("checksum_on", "checksum_off")
        }
        to_copy = median_ratio(speeds["checksum_on"], memory["copy"])
        ratios[f"{direction}_checksum_on_to_copy"] = to_copy
        report.add_all("ratio", ratios, case)


def measure_backend(
    args: argparse.Namespace, backend: str, master: str | None, report: Report
) -> None:
    for layout in args.layouts:
        for page_size in args.page_sizes:
            host = make_host(args, layout, page_size)
            with (
                tempfile.TemporaryDirectory(dir=args.folder, prefix="bench-storage-") as folder,
                peers(backend, host, Path(folder), master) as ways,
            ):
                raw = measure(args, host, ways)
            case = {"backend": backend, "layout": layout, "page_size": page_size}
            report.add_all("bytes", {"page": host.page_bytes}, case)
            report.add_all("count", {"pages": host.page_num}, case)
            add_figures(report, raw, case)


def add_options(parser: argparse.ArgumentParser) -> None:
    layouts = ["layer_first", "page_first", "page_first_direct", "page_first_kv_split"]
    backends = ["file", "mooncake"]
    parser.add_argument("--backends", nargs="+", default=backends, choices=backends)
    parser.add_argument("--layouts", nargs="+", default=layouts[:3], choices=layouts)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--mib", type=int, default=256, help="data of each transfer")
    parser.add_argument("--folder", help="for the file backend [the system's temporary folder]")


def run(args: argparse.Namespace, report: Report) -> None:
    for backend in args.backends:
        if backend == "file":
            measure_backend(args, backend, None, report)
            continue
        # Room for the objects of one way at a time, and for fragmentation.
        with MooncakeCluster(segment_size=f"{args.mib * 3}mb") as cluster:
            measure_backend(args, backend, cluster.master.address, report)


_QUICK: Final = {
    "backends": ["file"],
    "layouts": ["page_first"],
    "page_sizes": [64],
    "mib": 8,
    "repeats": 1,
}
COMMAND: Final = Command(run=run, add_options=add_options, repeats=5, quick=_QUICK)
