"""Microseconds of CPU that the keys of a prompt's objects in L3 take, by page and pool.

    python benchmark/hicache/bench_keys.py [--pages 128] [--rounds 200] [--no-store] \\
        [--output-file keys.jsonl]

A prompt of `--pages` pages is hashed, named in every pool, and looked up, as the scheduler and the
prefetch thread do it; and the trailer of each object digests its key. One JSON line about the run,
then one for each size of page and each set of pools, medians over `--rounds`:

- `hash_us`: the chain of page hashes, per page, and `hash_of_bare`: its ratio to a bare loop of
  sha256, which makes no strings. Made once for all pools, on the scheduler's thread.
- `name_us`: the objects' keys, per page and pool; `combine_us`: from the store's answers to the
  length of the prefix, per page and pool; `digest_us`: the key's part of a trailer, per object.
- `question_us`: one question to a real Mooncake Store (TCP, loopback) about the whole prompt, and
  `keys_of_question`: the share of it that naming and combining take.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rigs.stores.host_pools import storage_config
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.benchmark.report import emit, provenance, writable_file
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


def median_us(work: Callable[[], object], rounds: int) -> float:
    """Microseconds of this thread's CPU for one call."""
    work()
    taken = []
    for _ in range(rounds):
        begun = time.thread_time_ns()
        work()
        taken.append((time.thread_time_ns() - begun) / 1e3)
    return statistics.median(taken)


def elapsed_us(work: Callable[[], object], rounds: int) -> float:
    """Microseconds that pass for one call."""
    work()
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter_ns()
        work()
        taken.append((time.perf_counter_ns() - begun) / 1e3)
    return statistics.median(taken)


def hash_figures(tokens: int, page_size: int, rounds: int) -> tuple[dict[str, float], list[str]]:
    """Costs of hashing a prompt, per page, and its hashes."""
    prompt = RadixKey(np.arange(tokens, dtype=np.uint32))
    raw, step = prompt.ids.tobytes(), page_size * 4
    pages = tokens // page_size

    def bare() -> None:
        digest = b""
        for start in range(0, len(raw), step):
            digest = hashlib.sha256(digest + raw[start : start + step]).digest()

    ours = median_us(lambda: prompt.page_hashes(page_size), rounds)
    figures = {"hash_us": ours / pages, "hash_of_bare": ours / median_us(bare, rounds)}
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

    return {
        "name_us": median_us(name, rounds) / objects,
        "combine_us": median_us(combine, rounds) / objects,
        "digest_us": median_us(lambda: [seal((), key, with_checksum=False) for key in keys], rounds)
        / objects,
    }


def question_figures(
    store: MooncakeStore,
    hashes: list[str],
    extra: list[PoolTransfer],
    rounds: int,
    keys_us: float,
) -> dict[str, float]:
    """Times of one question about the whole prompt, and of the keys in it."""
    pages = [f"{_NAMESPACE}/{page}" for page in hashes]
    ask = elapsed_us(lambda: store.prompts_exist([pages], [None], extra), rounds)
    share = keys_us * len(hashes) * (1 + len(extra)) / ask
    return {"question_us": ask, "keys_of_question": share}


@contextmanager
def mooncake() -> Iterator[MooncakeStore]:
    """A client of a store of its own."""
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


def measure(args: argparse.Namespace, store: MooncakeStore | None) -> Iterator[dict[str, Any]]:
    """The lines of the report."""
    with tempfile.TemporaryDirectory() as folder:
        for page_size in _PAGE_SIZES:
            hashing, hashes = hash_figures(args.pages * page_size, page_size, args.rounds)
            for pools, extra in _POOLS.items():
                for ranks in (1, 2):
                    storage = HiCacheFile(storage_config(_NAMESPACE, tp_size=ranks), folder)
                    figures = key_figures(storage, hashes, extra, args.rounds)
                    if store is not None and ranks == 1:
                        keys_us = figures["name_us"] + figures["combine_us"]
                        figures |= question_figures(store, hashes, extra, args.rounds, keys_us)
                    yield {
                        "page_tokens": page_size,
                        "pages": args.pages,
                        "pools": pools,
                        "ranks": ranks,
                        **{name: round(one, 4) for name, one in {**hashing, **figures}.items()},
                    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--pages", type=int, default=128, help="of the prompt [128]")
    parser.add_argument("--rounds", type=int, default=200, help="of each measurement [200]")
    parser.add_argument("--no-store", action="store_true", help="leave out the real questions")
    parser.add_argument("--output-file", type=writable_file, help="JSON lines are appended to it")
    args = parser.parse_args()
    if min(args.pages, args.rounds) < 1:
        parser.error("--pages and --rounds must be at least 1")
    emit({"benchmark": "bench_keys", **provenance(sys.argv)}, args.output_file)

    def report(store: MooncakeStore | None) -> None:
        for line in measure(args, store):
            emit(line, args.output_file)

    if args.no_store:
        report(None)
        return
    with mooncake() as store:
        report(store)


if __name__ == "__main__":
    main()
