"""Microseconds of CPU that the keys of a prompt's objects in L3 take, by page and pool.

A prompt of `--pages` pages is hashed, named in every pool, and looked up, as the scheduler and the
prefetch thread do it; and the trailer of each object digests its key. For each size of page and
each set of pools, medians over `--repeats`:

- `hash`: the chain of page hashes, per page, and `hash_of_bare`: its ratio to a bare loop of
  sha256, which makes no strings. Made once for all pools, on the scheduler's thread.
- `name`: the objects' keys, per page and pool; `combine`: from the store's answers to the
  length of the prefix, per page and pool; `digest`: the key's part of a trailer, per object.
- `question`: one question to a real Mooncake Store (TCP, loopback) about the whole prompt, and
  `keys_of_question`: the share of it that naming and combining take.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from benchmark.command import Command, Refused
from benchmark.report import Report
from benchmark.timing import median_us
from rigs.stores.host_pools import storage_config
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.base import combine_hits
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.mem_cache.storage.page_trailer import seal
from sglang.srt.mem_cache.tree.radix_key import RadixKey

_NAMESPACE = "0123456789abcdef" * 2
_INDEXER = PoolTransfer(PoolName.INDEXER)
_STATES = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.TRAILING_PAGES)
_POOLS: dict[str, list[PoolTransfer]] = {
    "kv": [],
    "kv, indexer": [_INDEXER],
    "kv, mamba": [_STATES],
}
_PAGE_SIZES = (1, 16, 64, 256)


def cpu_us(work: Callable[[], object], rounds: int) -> float:
    """Microseconds of this thread's CPU for one call."""
    return median_us(work, rounds, time.thread_time_ns)


def hash_figures(tokens: int, page_size: int, rounds: int) -> tuple[dict[str, float], list[str]]:
    """Costs of hashing a prompt, per page, and its hashes."""
    prompt = RadixKey(np.arange(tokens, dtype=np.uint32))
    raw, step = prompt.ids.tobytes(), page_size * 4
    pages = tokens // page_size

    def bare() -> None:
        digest = b""
        for start in range(0, len(raw), step):
            digest = hashlib.sha256(digest + raw[start : start + step]).digest()

    ours = cpu_us(lambda: prompt.page_hashes(page_size), rounds)
    figures = {"hash": ours / pages, "hash_of_bare": ours / cpu_us(bare, rounds)}
    return figures, list(prompt.page_hashes(page_size))


def key_figures(
    storage: HiCacheFile, hashes: list[str], extra: list[PoolTransfer], rounds: int
) -> dict[str, float]:
    """Costs of the keys per page and pool."""
    names = [PoolName.KV, *(one.name for one in extra)]
    objects = len(hashes) * len(names)

    def name() -> list[list[str]]:
        pages = [f"{_NAMESPACE}/{page}" for page in hashes]
        return [storage.object_keys(pages, pool) for pool in names]

    def combine() -> None:
        found = combine_hits(hashes, extra, lambda _, asked: [True] * len(asked), PoolName.KV)
        assert found.kv_hit_pages == len(hashes)

    keys = [key for of_pool in name() for key in of_pool]
    assert len(set(keys)) == objects

    def seal_all() -> None:
        for key in keys:
            seal((), key, with_checksum=False)

    works = {"name": name, "combine": combine, "digest": seal_all}
    return {what: cpu_us(work, rounds) / objects for what, work in works.items()}


def question_figures(
    store: MooncakeStore,
    hashes: list[str],
    extra: list[PoolTransfer],
    rounds: int,
    keys_us: float,
) -> dict[str, float]:
    """Times of one question about the whole prompt, and of the keys in it."""
    pages = [f"{_NAMESPACE}/{page}" for page in hashes]
    ask = median_us(
        lambda: store.prompts_exist([pages], [None], extra), rounds, time.perf_counter_ns
    )
    share = keys_us * len(hashes) * (1 + len(extra)) / ask
    return {"question": ask, "keys_of_question": share}


@contextmanager
def mooncake() -> Iterator[MooncakeStore]:
    """A client of a new store."""
    with MooncakeCluster(segment_size="64mb") as cluster:
        store = MooncakeStore(
            storage_config(
                _NAMESPACE,
                master_server_address=cluster.master.address,
                protocol="tcp",
                global_segment_size="0mb",
            )
        )
        try:
            yield store
        finally:
            store.close()


def measure(args: argparse.Namespace, store: MooncakeStore | None, report: Report) -> None:
    """All sizes of pages and sets of pools; questions only with a `store`."""
    with tempfile.TemporaryDirectory() as folder:
        for page_size in _PAGE_SIZES:
            hashing, hashes = hash_figures(args.pages * page_size, page_size, args.repeats)
            for pools, extra in _POOLS.items():
                for ranks in (1, 2):
                    storage = HiCacheFile(storage_config(_NAMESPACE, tp_size=ranks), folder)
                    figures = hashing | key_figures(storage, hashes, extra, args.repeats)
                    if store is not None and ranks == 1:
                        keys_us = figures["name"] + figures["combine"]
                        figures |= question_figures(store, hashes, extra, args.repeats, keys_us)
                    case = {"page_tokens": page_size, "pools": pools, "ranks": ranks}
                    for name, value in figures.items():
                        report.add(name, value, "ratio" if "_of_" in name else "us", case)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pages", type=int, default=128, help="of the prompt [128]")
    parser.add_argument("--no-store", action="store_true", help="leave out the real questions")


def run(args: argparse.Namespace, report: Report) -> None:
    if min(args.pages, args.repeats) < 1:
        raise Refused("--pages and --repeats must be at least 1")
    if args.no_store:
        measure(args, None, report)
        return
    with mooncake() as store:
        measure(args, store, report)


_QUICK: Final = {"pages": 8, "repeats": 3, "no_store": True}
COMMAND: Final = Command(run=run, add_options=add_options, repeats=200, quick=_QUICK)
