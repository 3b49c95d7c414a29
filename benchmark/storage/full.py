"""Pages that a full Mooncake Store keeps of a server's conversations, in counts.

Conversations with one system prompt come one after another, a quarter of them at a time; the turns
of those are in random order. One server takes them all, with L1 and L2 that hold the active ones,
so that it seldom reads from the store: a real mooncake_master and node over TCP, which hold less
than half of all pages. Without a model: the pages are made up.

`reused_*` and `computed` are pages of the server's prompts. `found` are the pages that a server
started at the end finds, from the first of each conversation on; `unreachable` are pages in the
store behind one that it lacks. `questions` and `keys_asked` are calls of `batch_is_exist` and their
keys, `puts` the calls that put. Sums over the seeds. About 70 s for each seed.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmark.command import Command
from benchmark.report import Report
from rigs.caches.cache_rig import CacheRig
from rigs.caches.storage_rigs import PAGE, StorageRigs, attached_store_of, counts
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.mem_cache.tree.radix_key import RadixKey

_HEAD_DIM: Final = 512
"""Makes pages of 96 KiB."""
_MASTER: Final = {
    "default_kv_lease_ttl": 100,
    # Objects take up to an eighth more room than the master counts.
    "eviction_high_watermark_ratio": 0.8,
}


class CountedStore:
    """Counts calls into Mooncake. Stands for the store of a client."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.figures: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_is_exist(self, keys: list[str]) -> Any:
        self.figures["questions"] += 1
        self.figures["keys_asked"] += len(keys)
        return self._store.batch_is_exist(keys)

    def batch_put_from_multi_buffers(self, *arguments: Any) -> Any:
        self.figures["puts"] += 1
        return self._store.batch_put_from_multi_buffers(*arguments)


def turns(conversations: int, rounds: int, rng: random.Random) -> Iterator[tuple[int, int]]:
    """The requests as (conversation, turn), in their order."""
    waiting, active = list(range(conversations)), dict[int, int]()
    while waiting or active:
        while waiting and len(active) < max(1, conversations // 4):
            active[waiting.pop(0)] = 0
        chosen = rng.choice(list(active))
        yield chosen, active[chosen]
        active[chosen] += 1
        if active[chosen] == rounds:
            del active[chosen]


def reachable(prompts: Sequence[list[int]], rig: CacheRig, there: set[str]) -> tuple[int, int]:
    """Pages that a new server finds for all prompts together, and how many different ones."""
    found, different = 0, set[str]()
    for prompt in prompts:
        for key in attached_store_of(rig).pools.keys(RadixKey(prompt).page_hashes(PAGE)):
            if f"{key}/kv" not in there:
                break
            found += 1
            different.add(key)
    return found, len(different)


def measure(args: argparse.Namespace, seed: int) -> Counter[str]:
    """The figures of one run."""
    rng = random.Random(seed)
    total = args.system_pages + args.rounds * args.turn_pages
    own = [[rng.randrange(1 << 16) for _ in range(total * PAGE)] for _ in range(args.conversations)]
    texts = [own[0][: args.system_pages * PAGE] + one[args.system_pages * PAGE :] for one in own]
    figures: Counter[str] = Counter()
    with (
        MooncakeCluster(segment_size=args.segment, master_flags=_MASTER) as cluster,
        StorageRigs.on(cluster) as rigs,
    ):
        kind = functools.partial(CacheRig, head_dim=_HEAD_DIM)
        rig = rigs.make(kind=kind, l1_pages=args.l1_pages, hicache_ratio=2.0)
        client = attached_store_of(rig).client
        assert isinstance(client, MooncakeStore)
        counted = CountedStore(client._client.store)
        client._client.store = counted
        for conversation, turn in turns(args.conversations, args.rounds, rng):
            pages = args.system_pages + (turn + 1) * args.turn_pages
            reused = rig.run([*texts[conversation][: pages * PAGE], 7])
            rig.settle()
            figures["requests"] += 1
            for tier in ("device", "host", "storage"):
                figures[f"reused_{tier}"] += getattr(reused, tier) // PAGE
            figures["computed"] += pages - reused.total // PAGE
        there = set(cluster.master.keys())
        figures["found"], different = reachable(texts, rig, there)
        figures["stored"], figures["unreachable"] = len(there), len(there) - different
        figures["asked_for"] = len(texts) * total
        for end, writes in counts(attached_store_of(rig).metrics.backup_outcomes).items():
            figures[f"writes_{end}"] += int(writes)
        figures.update(counted.figures)
    return figures


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each [8]")
    parser.add_argument("--system-pages", type=int, default=24, help="that all share [24]")
    parser.add_argument("--turn-pages", type=int, default=4)
    parser.add_argument("--l1-pages", type=int, default=320, help="L2 has twice as many [320]")
    parser.add_argument("--segment", default="64mb", help="memory of the store")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])


def run(args: argparse.Namespace, report: Report) -> None:
    figures: Counter[str] = Counter()
    for seed in args.seeds:
        figures.update(measure(args, seed))
    report.add_all("count", figures, {"seeds": len(args.seeds)})


_QUICK: Final = {"conversations": 4, "rounds": 2, "seeds": [1]}
COMMAND: Final = Command(run=run, add_options=add_options, quick=_QUICK)
