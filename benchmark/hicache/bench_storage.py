"""GB/s of puts and gets through each L3 backend, compared with a bare loop over the same API.

    python benchmark/hicache/bench_storage.py [--backends file mooncake] \\
        [--layouts layer_first page_first page_first_direct] [--page-sizes 16 64 256] \\
        [--mib 256] [--repeat 5] [--output-file storage.jsonl]

For each backend, host layout and page size, each round moves the same pages in four ways, in
changing order: through the backend with checksums, through the backend without them (the trailer
then only identifies the object), through a bare loop (storage_peers.py), and by memory copy. One
JSON line each: medians in GB/s, and the medians of each round's ratios to the bare loop. The
mooncake backend gets its own mooncake_master and store node (TCP, loopback). The file backend gets
a folder in `--folder`, which should not be a network disk. About 2 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from storage_peers import BareFiles, BareMooncake, MemoryCopy, Peer, gb_per_second
from tqdm import tqdm

from rigs.stores.host_pools import storage_config
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.benchmark.report import emit, provenance, writable_file
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
        "memory": {"copy": []},
    }
    for turn in range(args.repeat + 1):
        names = _WAYS[turn % 3 :] + _WAYS[: turn % 3]
        for name in names:
            way = ways[name]
            put, get = (gb_per_second(total, work) for work in (way.put, way.get))
            way.clear()
            if turn:
                raw["put"][name].append(round(put, 4))
                raw["get"][name].append(round(get, 4))
        copied = gb_per_second(total, copy.run)
        if turn:
            raw["memory"]["copy"].append(round(copied, 4))
    return raw


def summarize(raw: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Medians, and medians of each round's ratios."""
    copy = raw["memory"]["copy"]
    figures: dict[str, Any] = {"memory_copy_gb_s": statistics.median(copy)}
    for direction in ("put", "get"):
        speeds = raw[direction]
        for name, values in speeds.items():
            figures[f"{direction}_{name}_gb_s"] = statistics.median(values)
        for name in ("checksum_on", "checksum_off"):
            figures[f"{direction}_{name}_to_bare"] = _ratio(speeds[name], speeds["bare"])
        figures[f"{direction}_checksum_on_to_copy"] = _ratio(speeds["checksum_on"], copy)
    return figures


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


def run(
    args: argparse.Namespace, backend: str, master: str | None, on_done: Callable[[], Any]
) -> None:
    for layout in args.layouts:
        for page_size in args.page_sizes:
            host = make_host(args, layout, page_size)
            with (
                tempfile.TemporaryDirectory(dir=args.folder, prefix="bench-storage-") as folder,
                peers(backend, host, Path(folder), master) as ways,
            ):
                raw = measure(args, host, ways)
            emit(
                {
                    "benchmark": "storage",
                    **provenance(),
                    "backend": backend,
                    "layout": layout,
                    "page_size": page_size,
                    "page_bytes": host.page_bytes,
                    "pages": host.page_num,
                    **summarize(raw),
                    "raw": raw,
                },
                args.output_file,
            )
            on_done()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    layouts = ["layer_first", "page_first", "page_first_direct", "page_first_kv_split"]
    backends = ["file", "mooncake"]
    parser.add_argument("--backends", nargs="+", default=backends, choices=backends)
    parser.add_argument("--layouts", nargs="+", default=layouts[:3], choices=layouts)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--mib", type=int, default=256, help="data of each transfer")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", help="for the file backend [the system's temporary folder]")
    parser.add_argument("--output-file", type=writable_file, help="also append the JSON lines here")
    parser.add_argument("--disable-tqdm", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    count = len(args.backends) * len(args.layouts) * len(args.page_sizes)
    with tqdm(total=count, unit="run", disable=args.disable_tqdm or None) as bar:
        for backend in args.backends:
            if backend == "file":
                run(args, backend, None, bar.update)
                continue
            # Room for the objects of one way at a time, and for fragmentation.
            with MooncakeCluster(segment_size=f"{args.mib * 3}mb") as cluster:
                run(args, backend, cluster.master.address, bar.update)
    return 0


if __name__ == "__main__":
    sys.exit(main())
