"""Costs of the radix tree: match, insert, split, lock, evict, at several page sizes.

Runs on the CPU, with the real tree and the real allocator without buffers. Prompts share their
first half in groups of eight, so paths have several nodes. For each page size: median microseconds
of one operation on a prompt of `--tokens`; of eviction, per evicted prompt.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import numpy as np
import torch

from benchmark.command import Command
from benchmark.report import Report
from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree.radix_key import RadixKey

_GROUP = 8
_T = TypeVar("_T")


class Rig:
    """A tree with an allocator that holds no bytes."""

    def __init__(self, args: argparse.Namespace, page_size: int) -> None:
        self.page_size = page_size
        self.length = args.tokens // page_size * page_size
        size = self.length * (args.prompts + 4)
        make = TokenToKVPoolAllocator if page_size == 1 else None
        self.allocator: BaseTokenToKVPoolAllocator = (
            make(size, torch.bfloat16, "cpu", None)
            if make
            else PagedTokenToKVPoolAllocator(size, page_size, torch.bfloat16, "cpu", None)
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(1, 1, "cpu"),
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
        )
        self.tree = RadixCache(params)
        rng = np.random.default_rng(1)
        shared = [self._tokens(rng, self.length // 2) for _ in range(-(-args.prompts // _GROUP))]
        rest = self.length - self.length // 2
        self.prompts = [
            np.concatenate([shared[index // _GROUP], self._tokens(rng, rest)])
            for index in range(args.prompts)
        ]

    @staticmethod
    def _tokens(rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.integers(1 << 17, size=count, dtype=np.uint32)

    def insert(self, prompt: np.ndarray) -> None:
        slots = self.allocator.alloc(self.length)
        assert slots is not None
        result = self.tree.insert(InsertParams(key=RadixKey(prompt), value=slots))
        if result.prefix_len:
            self.allocator.free(slots[: result.prefix_len])

    def match(self, prompt: np.ndarray) -> None:
        self.tree.match_prefix(MatchPrefixParams(RadixKey(prompt)))

    def match_list(self, prompt: list[int]) -> None:
        """Match a prompt as it arrives: a list of integers."""
        self.tree.match_prefix(MatchPrefixParams(RadixKey(prompt)))

    def lock(self, prompt: np.ndarray) -> None:
        node = self.tree.match_prefix(MatchPrefixParams(RadixKey(prompt))).last_device_node
        self.tree.inc_lock_ref(node)
        self.tree.dec_lock_ref(node)

    def evict(self, prompt: np.ndarray) -> None:
        self.tree.evict(EvictParams(num_tokens=len(prompt) // 2))


def microseconds(work: Callable[[_T], object], items: Iterable[_T]) -> list[float]:
    """Microseconds of each call."""
    taken = []
    for item in items:
        started = time.perf_counter_ns()
        work(item)
        taken.append((time.perf_counter_ns() - started) / 1000)
    return taken


def measure(args: argparse.Namespace, page_size: int) -> dict[str, list[float]]:
    """Microseconds of every call of every operation."""
    rig = Rig(args, page_size)
    raw = {"insert": microseconds(rig.insert, rig.prompts)}
    turns = list(itertools.islice(itertools.cycle(rig.prompts), args.repeats))
    raw["match"] = microseconds(rig.match, turns)
    raw["match_list"] = microseconds(rig.match_list, [one.tolist() for one in turns])
    raw["match_lock_unlock"] = microseconds(rig.lock, turns)
    # Each match ends in the middle of a prompt's second half: a split.
    cut = rig.length * 3 // 4
    raw["match_and_split"] = microseconds(rig.match, [one[:cut] for one in rig.prompts])
    rig.tree.check_integrity()
    raw["evict"] = microseconds(rig.evict, rig.prompts)
    rig.tree.check_integrity()
    return raw


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16, 64])


def run(args: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    for page_size in args.page_sizes:
        for name, raw in measure(args, page_size).items():
            case = {"page_size": page_size}
            report.add(name, statistics.median(raw), "us", case, raw=np.round(raw, 1).tolist())


_QUICK: Final = {"tokens": 1024, "prompts": 8, "repeats": 10}
COMMAND: Final = Command(run=run, add_options=add_options, repeats=200, quick=_QUICK)
