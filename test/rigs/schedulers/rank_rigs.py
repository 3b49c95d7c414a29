"""Whole schedulers of several ranks in one process, each with its share of a real tiny model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rigs.schedulers.rank_threads import RankThreads
from rigs.schedulers.scheduler_rig import MAX_STEPS, Collected, SchedulerRig
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.managers.scheduler.role_switch import MakeRole, Routes
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.messages.io_struct import (
    BatchTokenIDOutput,
    ControlReqOutput,
    TokenizedGenerateReqInput,
    ToScheduler,
    decode_tick,
    encode,
)
from sglang.srt.sampling.sampling_params import SamplingParams

_MOST_DELAY_S = 0.0005


class _Rank(SchedulerRig):
    """One rank's scheduler. Only its thread uses it once it is made."""

    def take(self, payload: bytes) -> None:
        """Run one tick, as it comes from rank 0."""
        for output in self.scheduler.step(decode_tick(payload)):
            if isinstance(output, ControlReqOutput):
                self.answers.append(output)
            elif isinstance(output, BatchTokenIDOutput):
                for one in output.outputs:
                    self._collect(one)

    def replicated_state(self) -> tuple[int, ...]:
        """Numbers that must be equal on all ranks."""
        state = self.scheduler.state
        free = state.pools.allocator.available_size()
        return state.queues.digest, self.tree.root_node.tree_digest.value, free


class RankRigs:
    """`SchedulerRig` for several ranks, stepped together. Their states are compared at each tick.

    Args:
        model_path: A checkpoint whose layers `size` ranks can split.
        size: Number of ranks.
        cp_size: Number of ranks over which prefills are split.
        make_role: Makes `SchedulerResources.make_role` of a rank and its pools; None: there is
            none.
        remake_role: Makes the transport of a rank for the other role; None: the role does not
            change.
        tick_s: Seconds between two ticks.
        args: Arguments of `SchedulerRig`.
    """

    def __init__(
        self,
        model_path: Path,
        size: int,
        cp_size: int,
        *,
        make_role: Callable[[RankGroup, Sequence[BaseDevicePool]], MakeRole] | None = None,
        remake_role: Callable[[RankGroup, DisaggregationMode], tuple[MakeRole, Routes]]
        | None = None,
        tick_s: float = 1.0,
        **args: Any,
    ) -> None:
        self.threads = RankThreads(size, cp_size)
        self._args = args
        self._make_role, self._remake_role = make_role, remake_role
        self._tick_s = tick_s
        self._model_path = model_path
        self.rigs = self.threads.run(self._make)
        self._now = 1000.0

    def _make(self, rank: int) -> _Rank:
        group = self.threads.ranks.group(rank, most_delay_s=_MOST_DELAY_S)
        make_role, remake = self._make_role, self._remake_role
        return _Rank(
            self._model_path,
            group=group,
            make_role=None if make_role is None else partial(make_role, group),
            remake_role=None if remake is None else partial(remake, group),
            tp_group=self.threads.tp_groups[rank],
            cp_group=self.threads.cp_groups[rank],
            **self._args,
        )

    @property
    def results(self) -> dict[str, Collected]:
        """Outputs of all requests; the words are the same on all ranks."""
        first, *others = (rig.results for rig in self.rigs)
        for results in others:
            assert results.keys() == first.keys()
            for rid, got in results.items():
                assert got.output_ids == first[rid].output_ids, rid
                assert got.finish_reason == first[rid].finish_reason, rid
        return first

    def request(
        self, rid: str, input_ids: list[int], params: SamplingParams | None = None, **fields: Any
    ) -> TokenizedGenerateReqInput:
        """See `SchedulerRig.request`."""
        return self.rigs[0].request(rid, input_ids, params, **fields)

    def step(self, *messages: ToScheduler) -> None:
        """Run one tick of all ranks, `tick_s` after the last one."""
        self._now += self._tick_s
        payload = encode(self.rigs[0].scheduler.make_tick(self._now, messages))
        self.threads.run(lambda rank: self.rigs[rank].take(payload))
        states = [rig.replicated_state() for rig in self.rigs]
        assert len(set(states)) == 1, f"the ranks' states differ: {states}"

    def run(self, *messages: ToScheduler) -> None:
        """Send `messages`, then step until idle."""
        self.step(*messages)
        for _ in range(MAX_STEPS):
            if self.rigs[0].scheduler.is_idle():
                for rig in self.rigs:
                    rig.assert_clean()
                return
            self.step()
        raise AssertionError(f"not idle after {MAX_STEPS} steps")

    def close(self) -> None:
        """End all threads."""
        for rig in self.rigs:
            rig.close()
        self.threads.close()
