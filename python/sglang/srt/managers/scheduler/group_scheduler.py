"""The scheduler of a DP group that steps together with the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from sglang.srt.managers.scheduler.launched_step import explaining_out_of_memory
from sglang.srt.managers.scheduler.scheduler import Scheduler, SchedulerResources
from sglang.srt.messages.io_struct import SchedulerOutput, StepCall, Tick

if TYPE_CHECKING:
    from sglang.srt.layers.forward_batch_info import ForwardBatch, GroupStep
    from sglang.srt.managers.scheduler.batch import ModelWorkerBatch
    from sglang.srt.managers.scheduler.launched_step import LaunchedStep, StepResult
    from sglang.srt.managers.scheduler.step_agreement import StepAgreement
    from sglang.srt.model_executor.grouped_runner import GroupPlan
    from sglang.srt.server_args import ServerArgs


class GroupRunner(Protocol):
    """The methods of a `GroupedModelRunner` that a scheduler calls; documented there."""

    def plan(self, forward_batch: ForwardBatch) -> GroupPlan: ...

    def run_idle(self, step: GroupStep) -> None: ...


class GroupScheduler(Scheduler):
    """A `Scheduler` that runs its steps together with the other DP groups; see `StepAgreement`.

    A group waits for the others in a step, but never for their messages, copies or stores. It stays
    until all have stopped, because they need it as long as one has work.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        resources: SchedulerResources,
        agreement: StepAgreement,
        runner: GroupRunner,
    ) -> None:
        """`runner` is the worker's."""
        super().__init__(server_args, resources)
        self._agreement, self._runner = agreement, runner
        self._has_joined = False
        """True if this tick has had its round."""
        self._has_said_end = False
        """True if the others know that this group has no work any more."""
        self._refuses_drafts = False
        """True if this group's last decode batch should have no drafts."""

    def step(self, tick: Tick) -> list[SchedulerOutput]:
        self._has_joined = False
        calls = [message for message in tick.messages if isinstance(message, StepCall)]
        for call in calls:
            self._agreement.on_call(call.number)
        if calls:
            others = [one for one in tick.messages if not isinstance(one, StepCall)]
            tick = msgspec.structs.replace(tick, messages=others)
        outputs = super().step(tick)
        if self.is_stopped:
            if self._agreement.is_called or not self._has_said_end:
                self._has_said_end = True
                with self._resources.tick_guard():
                    self._join_without_work()
            self.is_stopped = self._agreement.all_have_stopped
        return outputs

    def poll_timeout_ms(self) -> int:
        return 0 if self._agreement.is_called else super().poll_timeout_ms()

    def _run_batch(self) -> bool:
        did_forward = super()._run_batch()
        if not self._has_joined and self._agreement.is_called:
            self._join_without_work()  # The group is paused.
        return did_forward

    def _launch(self) -> LaunchedStep | None:
        step = super()._launch()
        if not self._has_joined and self._agreement.is_called:
            self._join_without_work()
        return step

    def _forward(
        self, batch: ModelWorkerBatch
    ) -> tuple[StepResult, torch.Tensor, torch.Tensor | None]:
        self._has_joined = True
        batch.forward.groups = self._agreement.join(
            self._runner.plan(batch.forward), refuses_drafts=self._refuses_drafts
        )
        return super()._forward(batch)

    def _decode_width(self, batch_size: int) -> int:
        width = super()._decode_width(batch_size)
        # Said in the next round, so that groups decide by the same numbers.
        self._refuses_drafts = width == 1
        return width if self._agreement.may_draft else 1

    def _join_without_work(self) -> None:
        self._has_joined = True
        if not self.state.queues.decoding:
            self._refuses_drafts = False
        step = self._agreement.join(
            None, refuses_drafts=self._refuses_drafts, has_stopped=self._has_said_end
        )
        if step is not None:
            with explaining_out_of_memory():
                self._runner.run_idle(step)
