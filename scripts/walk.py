#!/usr/bin/env python3
"""Walks values through a running engine, and counts what a reader would have to follow.

    .venv/bin/python scripts/walk.py [--ways match page-out ...] [--list]

For each way two lines: functions, the files that they are in, and returns to a file that was left
before. `--list` prints the functions of the shortest walk too. Only the first entry into each
function of `sglang.srt` counts, on all threads, in the order in which they happen; module bodies,
comprehensions and lambdas do not. Threads interleave: each way is walked nine times, after one walk
that warms up. The lines are the least and the median of these nine, by returns.

`in all` is everything that the engine enters meanwhile, with the ticks, the model and the answers
of the request. The main count leaves out what an engine alone, without L2 and L3, enters for the
same prompt: computed, found in L1, and in idle ticks. The rest is the work that the lower tiers or
the other server add. It includes the ticks of the tiers, and their work for a prompt that is not
moved. `disaggregation` is the part of `in all` in that folder.

The model is small and random, the device is the CPU, L3 is a real Mooncake Store. The ways:

    match      A prompt reaches its match in the tree. Begins in the tick that has the message.
    page-out   Pages reach L3. Begins with their insertion into the tree, ends when the write to L3
               is acknowledged.
    page-in    Pages reach the device from L3. Begins with the prefetch, ends when the load to the
               device is acknowledged.
    state-out  As page-out, of a hybrid model: a recurrent state goes with the pages.
    state-in   As page-in, likewise.
    room       A request reaches its first token on a decode server. Begins in its first tick, ends
               when the token is among the tick's outputs. The prefill server's ticks and threads do
               not count.
    pair       As room, with the prefill server: begins in its first tick, and all threads of both
               servers count.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import sglang.srt
from rigs.disaggregation.pd_rig import PdRig
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.environ import envs
from sglang.srt.managers.scheduler.results import OutputCollector
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.l2.host_load import HostLoad
from sglang.srt.mem_cache.l3.storage_backup import StorageBackup
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
from sglang.srt.messages.io_struct import FlushCacheReqInput, TokenizedGenerateReqInput

_ROOT: Final = f"{Path(sglang.srt.__file__).parent}{os.sep}"
_PD: Final = f"{_ROOT}disaggregation{os.sep}"
_OF_PREFILL: Final = ("disagg-rooms", "disagg-pack")
"""Threads of the prefill server, which is in the same process."""
_WALKS: Final = 9
_PAGE: Final = 16
_LENGTH: Final = 4 * _PAGE + 1


@dataclass(frozen=True, slots=True)
class Counts:
    """Cost of a way for its reader."""

    functions: int
    files: int
    returns: int

    def __str__(self) -> str:
        return f"{self.functions:4} functions {self.files:3} files {self.returns:4} returns"


class Trail:
    """First entries into functions of the engine, while it records."""

    def __init__(self) -> None:
        self.entries: list[CodeType] = []
        self._seen: set[CodeType] = set()
        self._begin: CodeType | None = None
        self._end: CodeType | None = None
        self._muted: int | None = None
        """The thread that is not recorded."""
        self._omits: tuple[str, ...] = ()
        self.records = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Watch this thread, and all that are started meanwhile."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            self.stop()
            sys.setprofile(None)
            threading.setprofile(None)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Record other threads alone."""
        self._muted = threading.get_ident()
        yield
        self._muted = None

    def start(
        self,
        begin: Callable[..., Any] | None = None,
        end: Any = None,
        omits: tuple[str, ...] = (),
    ) -> None:
        """Forget all, and record from the next call of `begin` (None: from now on) until `end`
        returns (None: until `stop`), except in threads whose names begin with one of `omits`."""
        self.entries, self._seen, self._omits = [], set(), omits
        self._begin = None if begin is None else begin.__code__
        self._end = None if end is None else end.__code__
        self.records = begin is None

    def stop(self) -> None:
        self.records = False
        self._begin = None

    def _see(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if threading.get_ident() == self._muted:
            return
        if event == "return" and self.records and code is self._end:
            self.stop()
        if event != "call":
            return
        if code is self._begin:
            self.records = True
        if not self.records or code in self._seen or code.co_name.startswith("<"):
            return
        if not code.co_filename.startswith(_ROOT):
            return
        if self._omits and threading.current_thread().name.startswith(self._omits):
            return
        self._seen.add(code)
        self.entries.append(code)


def count(entries: Sequence[CodeType]) -> Counts:
    """Count first entries, in the order in which they happened."""
    visited: set[str] = set()
    last, returns = "", 0
    for code in entries:
        if code.co_filename != last:
            returns += code.co_filename in visited
            last = code.co_filename
            visited.add(last)
    return Counts(len(entries), len(visited), returns)


@dataclass(frozen=True, slots=True)
class Walk:
    """One walk of a way."""

    counts: Counts
    in_all: Counts
    """Counts of all functions, also those that a plain engine (without L2 and L3) enters."""
    in_pd: Counts
    """In `disaggregation/` alone."""
    lines: list[str]

    def __str__(self) -> str:
        return f"{self.counts}; in all {self.in_all}; disaggregation {self.in_pd}"


class Walker:
    """Walks ways several times."""

    def __init__(self, trail: Trail, stack: contextlib.ExitStack) -> None:
        self._trail = trail
        self._stack = stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="walk-")))
        self._rigs: dict[str, SchedulerRig] = {}
        self._pd_rig: PdRig | None = None
        self._seeds = itertools.count(1)
        self._known: dict[str, set[CodeType]] = {}
        """The functions that a plain engine (without L2 and L3) enters, by family; see `_learn`."""

    def walk(self, way: str) -> list[Walk]:
        """Nine walks, the one with the fewest returns first. One before them warms up."""
        walks = []
        known = self._learn(_FAMILIES[way]) if way in _FAMILIES else set[CodeType]()
        for _ in range(_WALKS + 1):
            getattr(self, f"_{way.replace('-', '_')}")()
            self._trail.stop()
            entries = self._trail.entries
            own = [code for code in entries if code not in known]
            in_pd = [code for code in entries if code.co_filename.startswith(_PD)]
            lines = [f"{one.co_filename.removeprefix(_ROOT)}  {one.co_qualname}" for one in own]
            walks.append(Walk(count(own), count(entries), count(in_pd), lines))
        return sorted(walks[1:], key=lambda walk: (walk.in_all.returns, walk.in_all.functions))

    def _learn(self, family: str) -> set[CodeType]:
        """The functions that an engine alone, without L2 and L3, enters for a prompt that is
        computed, for the same one from L1, and while it is idle."""
        if family not in self._known:
            rig = SchedulerRig(self._model(family), pool_tokens=2048, page_size=_PAGE)
            ids = prompt(next(self._seeds), _LENGTH)
            self._trail.start()
            for _ in range(2):
                rig.run(self._request(rig, ids, words=2))
            rig.wait_a_tick()
            self._trail.stop()
            self._known[family] = set(self._trail.entries)
        return self._known[family]

    def _match(self) -> None:
        rig = self._rig("qwen3")
        message = self._request(rig, prompt(next(self._seeds), _LENGTH))
        self._trail.start(end=RadixCache.match_prefix)
        rig.step(message)
        self._trail.stop()
        rig.run()

    def _page_out(self, family: str = "qwen3") -> list[int]:
        rig = self._rig(family)
        ids = prompt(next(self._seeds), _LENGTH)
        self._trail.start(begin=PrefixTree.insert, end=StorageBackup._settle)
        rig.step(self._request(rig, ids))
        while not rig.scheduler.is_idle() or rig.tree.is_busy():
            rig.wait_a_tick()
        return ids

    def _page_in(self, family: str = "qwen3") -> None:
        ids = self._page_out(family)
        rig = self._rig(family)
        rig.step(FlushCacheReqInput(req_id="flush"))
        self._trail.start(begin=HiRadixCache.prefetch_from_storage, end=HostLoad._settle)
        message = self._request(rig, ids)
        rig.step(message)
        while message.rid not in rig.results or rig.tree.is_busy():
            rig.wait_a_tick()
        self._trail.stop()
        last = rig.results[message.rid].last
        assert last is not None and last.cached_tokens_details is not None
        assert last.cached_tokens_details.storage == _LENGTH - 1, "L3 had the pages"

    def _state_out(self) -> None:
        self._page_out("qwen3_next")

    def _state_in(self) -> None:
        self._page_in("qwen3_next")

    def _room(self) -> None:
        pair, trail = self._pd(), self._trail
        message = self._message_to_both(pair)
        pair.prefill.step(message)
        trail.start(end=OutputCollector.on_tokens, omits=_OF_PREFILL)
        pair.decode.step(message)
        while message.rid not in pair.decode.results:
            with trail.muted():
                pair.prefill.step()
            pair.decode.step()
        trail.stop()
        pair.run()

    def _pair(self) -> None:
        pair, trail = self._pd(), self._trail
        message = self._message_to_both(pair)
        trail.start()
        pair.step([message], [message])
        while message.rid not in pair.decode.results:
            pair.step()
        trail.stop()
        pair.run()

    def _message_to_both(self, pair: PdRig) -> TokenizedGenerateReqInput:
        seed = next(self._seeds)
        return pair.request(f"room {seed}", prompt(seed, _LENGTH), greedy(2))

    def _request(
        self, rig: SchedulerRig, ids: list[int], words: int = 1
    ) -> TokenizedGenerateReqInput:
        return rig.request(f"request {next(self._seeds)}", ids, greedy(words))

    def _model(self, family: str) -> Path:
        folder = self._folder / family
        if not folder.exists():
            save_tiny_checkpoint(folder, family, eos_token_id=None)
        return folder

    def _rig(self, family: str) -> SchedulerRig:
        """A scheduler with three tiers."""
        if family not in self._rigs:
            if not self._rigs:
                cluster = self._stack.enter_context(MooncakeCluster())
                for name, value in cluster.engine_env().items():
                    os.environ[name] = value  # noqa: TID251 - what the store's client reads
            rig = SchedulerRig(
                self._model(family),
                pool_tokens=2048,
                page_size=_PAGE,
                hicache_ratio=2.0,
                hicache_storage_backend="mooncake",
                hicache_storage_prefetch_policy="wait_complete",
                hicache_storage_backend_extra_config='{"prefetch_threshold": 1}',
            )
            self._stack.callback(rig.tree.shutdown)
            self._rigs[family] = rig
        return self._rigs[family]

    def _pd(self) -> PdRig:
        """A prefill and a decode scheduler that Mooncake's Transfer Engine joins over TCP."""
        if self._pd_rig is None:
            with envs.MOONCAKE_PROTOCOL.override("tcp"):
                engine = MooncakeTransferEngine(LOOPBACK)
            self._stack.callback(engine.close)
            pair = PdRig(self._model("qwen3"), engine, page_size=_PAGE, pool_tokens=2048)
            self._pd_rig = self._stack.enter_context(pair)
        return self._pd_rig


_FAMILIES: Final = {
    "page-out": "qwen3",
    "page-in": "qwen3",
    "state-out": "qwen3_next",
    "state-in": "qwen3_next",
    "room": "qwen3",
    "pair": "qwen3",
}
"""The ways that are counted twice, with the family of the model."""
WAYS: Final = ("match", "page-out", "page-in", "state-out", "state-in", "room", "pair")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--list", action="store_true", help="print the functions too")
    args = parser.parse_args()
    trail = Trail()
    with trail.installed(), contextlib.ExitStack() as stack:
        walker = Walker(trail, stack)
        for way in args.ways:
            walks = walker.walk(way)
            least, median = walks[0], walks[len(walks) // 2]
            print(f"{way:<10} least  {least}\n{'':<10} median {median}", flush=True)
            if args.list:
                print(*(f"    {line}" for line in least.lines), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
