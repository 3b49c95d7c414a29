"""DP groups that share experts: the scheduler of a rank, and the flags that work with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.torch_rank_group import TorchRankGroup
from sglang.srt.managers.scheduler.group_scheduler import GroupScheduler
from sglang.srt.managers.scheduler.scheduler import Scheduler, SchedulerResources
from sglang.srt.managers.scheduler.step_agreement import StepAgreement
from sglang.srt.messages.ipc import IpcAddresses
from sglang.srt.model_executor.grouped_runner import GroupedModelRunner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.process.step_calls import StepCalls

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def make_scheduler(
    server_args: ServerArgs,
    resources: SchedulerResources,
    runner: ModelRunner,
    dp_rank: int,
    ipc: IpcAddresses | None,
) -> Scheduler:
    """A `GroupScheduler` for the runner of a DP group that shares experts. Groups call others at
    `ipc`; None: they do not."""
    if not isinstance(runner, GroupedModelRunner):
        return Scheduler(server_args, resources)
    size = server_args.attn_dp_size
    calls = None if resources.group.rank or ipc is None else StepCalls(ipc, dp_rank, size)
    agreement = StepAgreement(TorchRankGroup.of_world(), dp_rank, size, calls)
    return GroupScheduler(server_args, resources, agreement, runner)


def check_experts(server_args: ServerArgs, model_config: ModelConfig) -> None:
    """Raise ValueError for flags of groups and experts that do not work with this model."""
    args, name = server_args, model_config.architecture
    if not model_config.has_experts:
        if args.ep_size > 1:
            raise ValueError(
                f"--ep-size {args.ep_size} has no effect on {name}, which has no experts: leave it "
                "out"
            )
        return
    # A split prefill has other tokens on each rank of a group. The exchange counts tokens by group,
    # and sums of experts are added over a group's attention TP alone, not over its attention CP.
    if args.attn_dp_size > 1 and args.attn_cp_size > 1:
        raise ValueError(
            f"--attn-dp-size {args.attn_dp_size} does not work with --attn-cp-size "
            f"{args.attn_cp_size} and the experts of {name} yet, which take the tokens of all "
            "groups: leave one of them out"
        )
