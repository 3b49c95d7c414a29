"""Ranks in one process, a thread each: collectives over memory, with random delays.

Mistakes that would hang or abort real ranks fail on all ranks here, with a reason: a call that not
every rank makes, calls of different kinds or lengths, a rank that has failed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

import torch

from sglang.srt.distributed.rank_group import RankGroup, RanksDiverged
from sglang.srt.distributed.tensor_group import TensorGroup

_DEADLINE_S: Final = 60.0

T = TypeVar("T")


class RankIsMissing(TimeoutError):
    """Not every rank made a collective in time."""


@dataclass(slots=True)
class _Call:
    """One collective, until every rank has its result."""

    payloads: dict[int, bytes | torch.Tensor | None] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    num_left: int = 0


class MemoryExchange:
    """Collectives between the ranks of one process. Any thread.

    Args:
        size: Number of ranks.
        deadline_s: A rank that waits longer for the others fails, and says who is missing.
        attn_cp_size: See `RankGroup.attn_cp_size`.
    """

    def __init__(
        self, size: int, deadline_s: float = _DEADLINE_S, *, attn_cp_size: int = 1
    ) -> None:
        assert size % attn_cp_size == 0, f"{attn_cp_size} does not divide {size}"
        self.size = size
        self.attn_cp_size = attn_cp_size
        self.num_calls = 0
        """Collectives that every rank has made; a MIN of two rounds is two."""
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._failure: BaseException | None = None

    def group(self, rank: int, *, seed: int = 0, most_delay_s: float = 0.0) -> MemoryRankGroup:
        """The group of rank `rank`; each call is delayed by up to `most_delay_s`."""
        return MemoryRankGroup(self, rank, random.Random(f"{seed} {rank}"), most_delay_s)

    def fail(self, cause: BaseException) -> None:
        """Note that a rank has failed, so that the others do not wait for it. The first cause
        counts."""
        with self._changed:
            self._failure = self._failure or cause
            self._changed.notify_all()

    def meet(
        self,
        number: int,
        rank: int,
        kind: str,
        payload: bytes | torch.Tensor | None,
        members: Sequence[int] | None = None,
    ) -> dict[int, bytes | torch.Tensor | None]:
        """Wait for all `members` in their `number`-th collective, and return what the ranks
        brought.

        Args:
            kind: The same on all ranks of the exchange, members or not.
            members: Ranks, `rank` among them; None: all.
        """
        awaited = range(self.size) if members is None else members
        with self._changed:
            call = self._calls.setdefault(number, _Call())
            call.payloads[rank], call.kinds[rank] = payload, kind
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._failure is not None or call.kinds.keys() >= set(awaited),
                self._deadline_s,
            )
            self._check_kinds(number, call.kinds)
            missing = sorted(set(awaited) - call.kinds.keys())
            if missing:
                if self._failure is not None:
                    raise RanksDiverged(f"another rank has failed: {self._failure}")
                raise RankIsMissing(f"ranks {missing} did not come to collective {number}: {kind}")
            call.num_left += 1
            if call.num_left == self.size:
                del self._calls[number]
                self.num_calls += 1
            return {member: call.payloads[member] for member in awaited}

    def _check_kinds(self, number: int, kinds: dict[int, str]) -> None:
        first = min(kinds)
        for rank, kind in sorted(kinds.items()):
            if kind != kinds[first]:
                error = RanksDiverged(
                    f"collective {number} is {kinds[first]} on rank {first}, {kind} on rank {rank}"
                )
                # Other ranks may wait for these members in a later call.
                self.fail(error)
                raise error


def run_on_ranks(
    size: int,
    work: Callable[[RankGroup], T],
    *,
    attn_cp_size: int = 1,
    seed: int = 0,
    most_delay_s: float = 0.0,
) -> list[T]:
    """Run `work` on each rank, each in its own thread. Returns the results; raises the first error.

    Args:
        size: Ranks.
        work: Gets the rank's group.
        attn_cp_size: See `RankGroup.attn_cp_size`.
        seed: Seed of the delays.
        most_delay_s: Longest delay of a rank's collective.
    """
    exchange = MemoryExchange(size, attn_cp_size=attn_cp_size)
    first: list[BaseException] = []

    def run(rank: int) -> T:
        group = exchange.group(rank, seed=seed, most_delay_s=most_delay_s)
        try:
            return work(group)
        except BaseException as error:
            first.append(error)
            exchange.fail(error)
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    if first:
        raise first[0]
    return [future.result() for future in futures]


class EchoGroup(RankGroup):
    """Rank 0 of two ranks. The other rank sees whatever this one sees."""

    rank = 0
    size = 2

    def broadcast(self, payload: bytes | None) -> bytes:
        assert payload is not None
        return payload

    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


class PassedOnGroup(RankGroup):
    """Passes calls to another group; subclasses count or change some."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.rank, self.size, self.attn_cp_size = group.rank, group.size, group.attn_cp_size

    def broadcast(self, payload: bytes | None) -> bytes:
        return self._group.broadcast(payload)

    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        return self._group.reduce_min(values)


class PlaceInGroup(TensorGroup):
    """A rank without the other ranks of its group: what it computes stays a part."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("the other ranks are not there")

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.rank]


class MemoryTensorGroup(PlaceInGroup):
    """One rank of a `MemoryExchange` that splits a model's layers with the others. One thread uses
    it."""

    def __init__(self, exchange: MemoryExchange, rank: int) -> None:
        super().__init__(rank, exchange.size)
        self._exchange = exchange
        self.num_calls = 0
        """Collectives that this rank has made."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._all(x, "a sum").sum(dim=0, dtype=x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._all(x, "a gathering")

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self._all(x, "a scattered sum").sum(dim=0)[self.rank]

    def _all(self, x: torch.Tensor, what: str) -> torch.Tensor:
        self.num_calls += 1
        kind = f"{what} of {list(x.shape)} {x.dtype}"
        said = self._exchange.meet(self.num_calls, self.rank, kind, x.clone())
        return torch.stack(
            [one for _, one in sorted(said.items()) if isinstance(one, torch.Tensor)]
        )


class MemoryRankGroup(RankGroup):
    """One rank of a `MemoryExchange`. One thread uses it.

    MIN has the rounds of `TorchRankGroup`: over the ranks with the same heads, then over those that
    split them; one where all ranks are one of these groups.

    Attributes:
        rounds: The name and the ranks of each round, this rank among them.
    """

    def __init__(
        self, exchange: MemoryExchange, rank: int, rng: random.Random, most_delay_s: float
    ) -> None:
        self._exchange = exchange
        self.rank, self.size, self.attn_cp_size = rank, exchange.size, exchange.attn_cp_size
        self._rng = rng
        self._most_delay_s = most_delay_s
        self._num_calls = 0
        own_set = self.attn_cp_rank * self.attn_tp_size
        groups = {
            "CP": range(self.attn_tp_rank, self.size, self.attn_tp_size),
            "TP": range(own_set, own_set + self.attn_tp_size),
        }
        self.rounds = [(name, ranks) for name, ranks in groups.items() if len(ranks) > 1]

    def broadcast(self, payload: bytes | None) -> bytes:
        assert (payload is not None) == (self.rank == 0), "rank 0 alone has a payload"
        said = self._meet("a broadcast", payload)[0]
        assert isinstance(said, bytes)
        return said

    def reduce_min(self, values: torch.Tensor) -> torch.Tensor:
        assert values.dtype == torch.int64 and values.device.type == "cpu" and values.ndim == 1
        least = values.clone()
        for name, ranks in self.rounds:
            over = f" over {name}" if len(ranks) < self.size else ""
            said = self._meet(f"a reduction of {len(values)} values{over}", least, ranks)
            tensors = [one for one in said.values() if isinstance(one, torch.Tensor)]
            least = torch.stack(tensors).min(dim=0).values
        return least

    def _meet(
        self,
        kind: str,
        payload: bytes | torch.Tensor | None,
        members: Sequence[int] | None = None,
    ) -> dict[int, bytes | torch.Tensor | None]:
        if self._most_delay_s:
            time.sleep(self._rng.random() * self._most_delay_s)
        number, self._num_calls = self._num_calls, self._num_calls + 1
        return self._exchange.meet(number, self.rank, kind, payload, members)
