"""Hit rates of agents' conversations on several servers, with and without a store that all share.

The workload is the one that vLLM and Mooncake published in May 2026: all sessions share a long
prefix; each adds a first prompt, then tool results and answers in turns. Sessions take turns in a
random order. Requests go to the servers in turn (`round_robin`), or all of a session to one
(`session`). Trees are the engine's. L3 has every page that any server computed.

`list` is a list of pages of L1's size, the last used first: what exact LRU eviction would find.
About 80 s.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import numpy as np

from benchmark.command import Command, Refused
from benchmark.report import Report
from rigs.bench.cache_simulation import Arrangement, CacheSizes, SimulatedCache
from sglang.srt.mem_cache.tree.radix_key import TokenArray

_BALANCES: Final = ("round_robin", "session")
_VOCABULARY: Final = 1 << 17


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=75)
    parser.add_argument("--servers", type=int, default=12)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--shared", type=int, default=20_000, help="tokens that sessions share")
    parser.add_argument("--first", type=int, default=10_000, help="tokens of the first prompt")
    parser.add_argument("--new", type=int, default=2_048, help="new tokens of a turn")
    parser.add_argument("--answer", type=int, default=900, help="tokens of an answer")
    parser.add_argument("--l1", type=int, default=200_000, help="tokens of each server")
    parser.add_argument("--l2-ratios", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)


class Sessions:
    """The requests in order, each a session's next turn."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        rng = np.random.default_rng(args.seed)
        own = args.first + args.turns * (args.new + args.answer)
        shared = rng.integers(1, _VOCABULARY, args.shared, dtype=np.uint32)
        self._texts = [
            np.concatenate([shared, rng.integers(1, _VOCABULARY, own, dtype=np.uint32)])
            for _ in range(args.sessions)
        ]
        left = np.repeat(np.arange(args.sessions), args.turns)
        self._order = rng.permutation(left).tolist()

    def __iter__(self) -> Iterator[tuple[int, TokenArray, TokenArray]]:
        """Session, prompt, and the answer without its last token, which is not cached."""
        turns = dict.fromkeys(range(self._args.sessions), 0)
        for session in self._order:
            asked = turns[session] * (self._args.new + self._args.answer)
            begin = self._args.shared + self._args.first + asked
            turns[session] += 1
            text = self._texts[session]
            yield session, text[:begin], text[begin : begin + self._args.answer - 1]


class _PageList:
    """Pages by their last use. Numbers of pages stand for their contents and all before them."""

    def __init__(self, pages: int | None) -> None:
        self._most = pages
        self._pages: OrderedDict[tuple[int, int], None] = OrderedDict()

    def serve(self, session: int, shared: int, prompt: int, known: int) -> int:
        """Pages of a prompt of `prompt` pages that are found, the first `shared` for any session;
        `known` pages are kept, with the answer's."""
        keys = [(-1 if page < shared else session, page) for page in range(known)]
        found = 0
        while found < prompt and keys[found] in self._pages:
            found += 1
        for key in reversed(keys):
            self._pages[key] = None
            self._pages.move_to_end(key)
        while self._most is not None and len(self._pages) > self._most:
            self._pages.popitem(last=False)
        return found


def replay(args: argparse.Namespace, balance: str, l2_ratio: int) -> dict[str, float]:
    """Shares of the prompts' tokens that are found: by tier, in all local tiers and L3, and in a
    list of L1's size."""
    page, pages = args.page_size, args.l1 // args.page_size
    sizes = CacheSizes(l1_pages=pages, l2_pages=pages * l2_ratio)
    arrangement = Arrangement.WRITE_THROUGH if l2_ratio else Arrangement.ONE_TIER
    caches = [
        SimulatedCache(sizes, page_size=page, policy="lru", arrangement=arrangement)
        for _ in range(args.servers)
    ]
    lists = [_PageList(pages) for _ in caches]
    store = _PageList(None)
    tokens = device = host = stored = listed = 0
    for number, (session, prompt, answer) in enumerate(Sessions(args)):
        at = (session if balance == "session" else number) % args.servers
        from_device, from_host = caches[at].serve_with_answer(prompt, answer)
        usable, known = (len(prompt) - 1) // page, (len(prompt) + len(answer)) // page
        counts = session, args.shared // page, usable, known
        tokens += len(prompt)
        device, host = device + from_device, host + from_host
        stored += max(from_device + from_host, store.serve(*counts) * page)
        listed += lists[at].serve(*counts) * page
    for cache in caches:
        cache.close()
    found = {"device": device, "host": host, "with_l3": stored, "list": listed}
    return {f"{name}_hit_rate": number / tokens for name, number in found.items()}


def run(args: argparse.Namespace, report: Report) -> None:
    longest = args.shared + args.first + args.turns * (args.new + args.answer)
    if longest > args.l1:
        raise Refused(f"--l1 {args.l1} must hold a whole session, which has {longest} tokens")
    for balance in _BALANCES:
        for l2_ratio in args.l2_ratios:
            case = {"balance": balance, "l2_ratio": l2_ratio}
            report.add_all("share", replay(args, balance, l2_ratio), case)


_QUICK: Final = {
    "sessions": 6, "servers": 2, "turns": 3, "shared": 2_000, "first": 1_000, "new": 256,
    "answer": 90, "l1": 5_000, "l2_ratios": [0, 2],
}  # fmt: skip
COMMAND: Final = Command(run=run, add_options=add_options, quick=_QUICK)
