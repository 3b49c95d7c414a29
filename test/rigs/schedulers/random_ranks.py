"""Random work on several ranks in one process: whole schedulers that must stay equal.

    python -m rigs.schedulers.random_ranks --seed N --ranks 4 --attn-cp-size 2 --steps 5000
    python -m rigs.schedulers.random_ranks --seconds S   runs seed after seed, sizes in turn
    python -m rigs.schedulers.random_ranks --seeds 0-399 --processes 16   several at once

Each rank is a scheduler on its own thread, with its own pools, tree, copies and storage client. All
ranks share one store. Rank 0 is driven as in `random_scheduler.py`; the others get its ticks
through a `MemoryRankGroup` that delays each rank at random. A second group compares the digests of
all states of the ranks after each tick, and once more at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from rigs import seed_processes
from rigs.caches.memory_ranks import MemoryExchange
from rigs.schedulers.checkable_worker import CheckableRig
from rigs.schedulers.random_scheduler import RandomScheduler, SchedulerOutcome
from rigs.schedulers.random_seeds import print_counts
from rigs.schedulers.random_setup import Setup
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.distributed.rank_group import RankGroup, RanksDiverged
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.tree.replicated_state import CacheState, explain_difference
from sglang.srt.messages.io_struct import (
    BatchTokenIDOutput,
    ControlReqOutput,
    RequestOutput,
    ToScheduler,
    decode_tick,
    encode,
)

_MODULE: Final = "rigs.schedulers.random_ranks"
SIZES: Final = ((2, 1), (2, 2), (4, 2), (4, 4), (3, 1), (1, 1), (4, 1))
"""Numbers of ranks, and of the sets that they are divided into. `(4, 2)` has two rounds of MIN."""
TICKS_OF_A_SEED: Final = 500
_MOST_DELAY_S: Final = 0.0005
_DEADLINE_S: Final = 30.0
"""Limit for a rank that waits for others. It is below the limit of a step, so that the error names
the missing rank: ranks that have diverged may wait for each other in different collectives."""
_END: Final = b""
"""Message in place of a tick: the run is over."""

WrapGroup = Callable[[RankGroup], RankGroup]


class RankRig(CheckableRig):
    """One rank's scheduler. Its thread alone uses it.

    Args:
        group: The scheduler's ranks.
        referee: The same ranks, to compare their states after each tick; None: without that.
        args: Arguments of `CheckableRig`.
    """

    def __init__(self, group: RankGroup, referee: RankGroup | None, **args: Any) -> None:
        super().__init__(BUILTIN_MODEL_DIR, group=group, **args)
        self._referee = referee
        self.num_ticks = 0

    def step(self, *messages: ToScheduler) -> None:
        """Rank 0: run one tick of all ranks, `tick_s` after the last one."""
        self.now += self.tick_s
        tick = self.scheduler.make_tick(self.now, messages)
        self._tick(self.group.broadcast(encode(tick)))

    def follow(self) -> bool:
        """Any other rank: run the next tick; False if there is none."""
        payload = self.group.broadcast(None)
        if payload != _END:
            self._tick(payload)
        return payload != _END

    def end(self) -> None:
        """Rank 0: tell the others that there are no more ticks."""
        self.group.broadcast(_END)

    def _tick(self, payload: bytes) -> None:
        for output in self.scheduler.step(decode_tick(payload)):
            if isinstance(output, ControlReqOutput):
                self.answers.append(output)
                continue
            assert isinstance(output, BatchTokenIDOutput)
            for one in output.outputs:
                self._collect(one)
        self.num_ticks += 1
        if self._referee is not None:
            self._compare(self._referee)

    def _compare(self, referee: RankGroup) -> None:
        digest = self.replicated_state().digest
        least, minus_most = referee.reduce_min(torch.tensor([digest, -digest])).tolist()
        if least != -minus_most:
            difference = explain_difference(referee, self.replicated_state())
            raise RanksDiverged(
                f"the ranks' states differ after tick {self.num_ticks}: {difference}"
            )

    def replicated_state(self) -> CacheState:
        """Everything that must be equal on all ranks."""
        tree, state = self.tree, self.scheduler.state
        counts = {"free tokens of L1": state.pools.allocator.available_size}
        if isinstance(tree, HiRadixCache):
            counts["free tokens of L2"] = tree.host_pool.available_size
            counts["epoch of L3"] = lambda: tree.store.epoch
            for component in tree.tree.components:
                counts["free states of L2"] = component.host.pool.available_size
        states = state.pools.req_to_token_pool.mamba_pool
        if states is not None:
            counts["free states of L1"] = states.available_size
        counts["operations under way"] = lambda: sum(tree.is_busy().values())
        return CacheState(lambda: tree.root_node, counts, state.queues)

    def _collect(self, output: RequestOutput) -> None:
        if self.group.rank == 0:
            super()._collect(output)


class _Rank(threading.Thread):
    """A rank beside rank 0, from its first tick to its last."""

    def __init__(
        self, make_rig: Callable[[], RankRig], on_failure: Callable[[BaseException], None]
    ) -> None:
        super().__init__(name="rank", daemon=True)
        self._make_rig = make_rig
        self._on_failure = on_failure
        self.replicated: Mapping[str, str] = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            rig = self._make_rig()
            with contextlib.closing(rig):
                while rig.follow():
                    if rig.num_ticks % 8 == 0:
                        rig.check()
                self.replicated = rig.replicated_state().describe()
        except BaseException as error:  # noqa: BLE001 - told by who joins this thread
            self.error = error
            self._on_failure(error)


class RandomRanks(RandomScheduler):
    """One run.

    Args:
        seed: See `RandomScheduler`.
        ranks: Number of ranks.
        attn_cp_size: Number of sets into which the ranks are divided; see `RankGroup`.
        setup: Replaces the setup that the seed draws.
        wrap_group: Wraps each rank's group, for a rank that misbehaves.
        has_referee: Compare the ranks after each tick. If False, only the tick syncs compare them.
    """

    def __init__(
        self,
        seed: int,
        ranks: int = 2,
        *,
        attn_cp_size: int = 1,
        setup: Setup | None = None,
        wrap_group: WrapGroup = lambda group: group,
        has_referee: bool = True,
    ) -> None:
        super().__init__(seed, setup, num_groups=1)
        self.setup = dataclasses.replace(self.setup, is_held=False)  # Ranks are threads.
        self._seed = seed
        self._num_ranks = ranks
        self._wrap_group = wrap_group
        self._has_referee = has_referee
        self._exchange = MemoryExchange(ranks, _DEADLINE_S, attn_cp_size=attn_cp_size)
        self._referees = MemoryExchange(ranks, _DEADLINE_S)
        self._ranks: list[_Rank] = []

    def _make_rig(self, group: int) -> CheckableRig:
        for rank in range(1, self._num_ranks):
            self._ranks.append(_Rank(partial(self._rank_rig, rank), self._fail))
            self._ranks[-1].start()
        return self._rank_rig(0)

    def _rank_rig(self, rank: int) -> RankRig:
        group = self._exchange.group(rank, seed=self._seed, most_delay_s=_MOST_DELAY_S)
        referee = self._referees.group(rank) if self._has_referee else None
        rig = RankRig(self._wrap_group(group), referee, **self.setup.rig_args())
        rig.tick_s = self.setup.tick_s  # type: ignore[misc]
        self.setup.slow_down(rig.tree, random.Random(f"{self._seed} {rank}"))
        return rig

    def _work(self, steps: int) -> None:
        rig = self.rig
        assert isinstance(rig, RankRig)
        try:
            super()._work(steps)
            # The ranks close their clients when told of the end.
            self.store.set_mood("quick")
            self.store.release()
            rig.end()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            for rank in self._ranks:
                rank.join()
            self._tell_first_error()
        mine = rig.replicated_state().describe()
        for number, rank in enumerate(self._ranks, start=1):
            assert rank.replicated == mine, f"rank {number} ends with another state than rank 0"

    def _fail(self, error: BaseException) -> None:
        """Note that a rank has failed, so that no other waits for it."""
        self._exchange.fail(error)
        self._referees.fail(error)
        self.store.set_mood("quick")
        self.store.release()

    def _tell_first_error(self) -> None:
        for number, rank in enumerate(self._ranks, start=1):
            if rank.error is not None:
                rank.error.add_note(f"on rank {number}")
                raise rank.error


def run_ranks(seed: int, ranks: int, steps: int, attn_cp_size: int = 1) -> SchedulerOutcome:
    """One run. Exceptions have notes: the state, and the command that repeats the run."""
    run = RandomRanks(seed, ranks, attn_cp_size=attn_cp_size)
    try:
        return run.run(steps)
    except BaseException as error:
        error.add_note(f"with {run.setup}")
        error.add_note(f"to repeat: {shlex.join(_command(seed, ranks, attn_cp_size, steps))}")
        raise


def _command(seed: int, ranks: int, attn_cp_size: int, steps: int) -> list[str]:
    """The command that repeats a run."""
    numbers = {"seed": seed, "ranks": ranks, "attn-cp-size": attn_cp_size, "steps": steps}
    words = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    return ["python", "-m", _MODULE, *words]


def run_for(
    seconds: float,
    first_seed: int,
    sizes: Sequence[tuple[int, int]] = SIZES,
    *,
    least_ticks: int = 0,
) -> Counter[str]:
    """Run one seed after another for `seconds`, and until each of `sizes` had its turn.

    Prints a line for each seed before it runs. The first failure is raised.

    Args:
        sizes: Pairs of ranks and `attn_cp_size`, which take turns.
        least_ticks: Fewest ticks of all runs.

    Returns:
        The counts of all runs; "ticks" are those of a rank.
    """
    counts: Counter[str] = Counter()
    began = time.monotonic()
    while (
        counts["seeds"] < len(sizes)
        or counts["ticks"] < least_ticks
        or time.monotonic() - began < seconds
    ):
        seed = first_seed + counts["seeds"]
        ranks, attn_cp_size = sizes[counts["seeds"] % len(sizes)]
        print(f"seed {seed}: {ranks} ranks in {attn_cp_size} sets", flush=True)
        outcome = run_ranks(seed, ranks, TICKS_OF_A_SEED, attn_cp_size)
        counts.update(outcome.counts)
        counts.update(seeds=1, ticks=outcome.steps)
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0, help="the only or first seed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--attn-cp-size", type=int, default=1)
    parser.add_argument("--steps", type=int, help="of one seed [5000], of each of several [500]")
    parser.add_argument("--seconds", type=float, help="run seeds for this time, of all sizes")
    seed_processes.add_seed_arguments(parser)
    args = parser.parse_args(argv)
    if args.seeds is not None:
        return seed_processes.run_in_processes(
            args.seeds,
            lambda seed: [
                sys.executable,
                *_command(seed, *SIZES[seed % len(SIZES)], args.steps or TICKS_OF_A_SEED)[1:],
            ],
            args.processes,
            args.seconds or seed_processes.DEFAULT_SECONDS,
        )
    torch.set_num_threads(1)
    began = time.monotonic()
    if args.seconds is None:
        outcome = run_ranks(args.seed, args.ranks, args.steps or 5000, args.attn_cp_size)
        print(f"seed {args.seed}: {outcome.describe()}; {args.ranks} ranks", end=" ")
        print(f"in {args.attn_cp_size} sets, {outcome.steps} ticks in {outcome.seconds:.1f} s")
        counts = outcome.counts + Counter(ticks=outcome.steps)
    else:
        counts = run_for(args.seconds, args.seed)
    print_counts(counts)
    print(f"{counts['ticks']} ticks in {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
