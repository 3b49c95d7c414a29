"""A whole scheduler in this process, over a model that checks what it reads."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

from rigs.schedulers.checkable_pools import CheckableState
from rigs.schedulers.checkable_worker import CheckableWorker
from rigs.schedulers.lagging_device import LaggingDevice
from rigs.schedulers.scheduler_rig import SchedulerRig
from sglang.srt.mem_cache.device.state_spec import RankShare, RankSplit


class CheckableRig(SchedulerRig):
    """A scheduler whose model is a `CheckableWorker`.

    Args:
        state: What the model keeps, of all heads.
        heads: Heads of a rank; 0: all ranks have the same head.
        most_lag_s: See `LaggingDevice`; 0: steps run when they are launched.
        tolerates_damage: See `CheckableWorker`.
        args: Arguments of `SchedulerRig`.
    """

    device = "cpu"

    def __init__(
        self,
        model_path: Path,
        *,
        state: CheckableState | None = None,
        heads: int = 0,
        most_lag_s: float = 0.0,
        tolerates_damage: bool = False,
        **args: Any,
    ) -> None:
        self._tolerates_damage = tolerates_damage
        self._state, self._heads = state or CheckableState(), heads
        self._most_lag_s = most_lag_s
        self._device: LaggingDevice | None = None
        alignment = self._state.alignment if self._state.num_states else None
        super().__init__(model_path, snapshot_alignment=alignment, **args)

    def make_worker(
        self, model_path: Path, page_size: int, pool_tokens: int | None, max_requests: int
    ) -> CheckableWorker:
        assert pool_tokens is not None, "the driver draws the size of L1"
        state, count = self._state, self._heads
        if count:
            begin, total = self.group.attn_tp_rank * count, self.group.attn_tp_size * count
            share = RankShare(RankSplit.HEADS, begin, begin + count, total)
            state = dataclasses.replace(state, heads=share)
        if self._most_lag_s:
            self._device = LaggingDevice(random.Random(self.group.rank), self._most_lag_s)
        worker = CheckableWorker(
            page_size,
            pool_tokens,
            max_requests,
            state=state,
            device=self._device,
            tolerates_damage=self._tolerates_damage,
        )
        self.model_pools = worker.model_pools
        return worker

    def close(self) -> None:
        super().close()
        if self._device is not None:
            self._device.close()
